"""A stage's backward in two halves: first the gradient of its inputs (I), later that of its weights (W).

Autograd's graph of a stage has a trunk, the nodes that lie between outputs and inputs, and branches that lead to
weights. I walks the trunk alone, and keeps the gradient that comes by wherever a branch leaves it: at the matrix
product that multiplies by the weight, at the sum that adds the bias. W walks the branches from there. Nothing is
computed twice, and nothing that W computes is waited for by another stage (Qi et al. 2023, *Zero Bubble Pipeline
Parallelism*, arXiv 2401.10241, section 2). For two linear layers, gradients flowing upwards::

         x        <- I ends here       w1                      w2
         |                             |                       |
       matmul 1 ---- branch of w1 -----'                       |
         |                                                     |
       matmul 2 ---- branch of w2 -----------------------------'
         |
       output     <- I begins here; W begins at matmul 1 and at matmul 2, with the gradient that came by in I
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients = tuple[Tensor | None, ...]
"""Of a node's outputs."""


@dataclass(eq=False)
class _Branch:
    """Weights whose branches leave the trunk at the same nodes.

    Attributes:
        nodes: of the trunk; several where a weight is used more than once.
        weights: leaves of the graph.
        gradients: what came by in I at each node.
    """

    nodes: set[Node]
    weights: list[Tensor]
    gradients: dict[Node, Gradients] = field(default_factory=dict)


class SplitBackward:
    """The backward of one micro-batch through one stage, in two calls.

    Gradients of weights arrive in ``.grad`` as after ``backward()``, and their hooks are called. With activation
    checkpointing each branch would compute its block's forward again: such stages take whole backwards.

    Args:
        outputs: where the graph begins; the tensors themselves may be gone.
        inputs: leaves that require a gradient. Without any, I has nothing to do, and W is the whole backward.
    """

    def __init__(self, outputs: Sequence[GradientEdge], inputs: Sequence[Tensor]):
        self._outputs, self._inputs = tuple(outputs), tuple(inputs)

    def input(self, gradients: Sequence[Tensor]) -> Gradients:
        """Phase I: the gradient of each input, from those of the outputs; None where an input was not used."""
        self._gradients = tuple(gradients)
        self._branches, self._beside = _branches([edge.node for edge in self._outputs], self._inputs)
        if not self._inputs or not self._outputs:
            return (None,) * len(self._inputs)
        # --- walk the trunk, and keep what comes by where a branch leaves it. Only the inputs are asked for, so that
        # autograd does not enter the branches; the graph is retained, since W walks them. ---
        hooks = [node.register_prehook(_keep(branch, node)) for branch in self._branches for node in branch.nodes]
        input_gradients = torch.autograd.grad(
            self._outputs, self._inputs, self._gradients, retain_graph=True, allow_unused=True
        )
        for hook in hooks:
            hook.remove()
        return input_gradients

    def weight(self) -> None:
        """Phase W: add the gradients of the weights, each from where its branch leaves the trunk."""
        # --- the branches, one after the other: a node's kept gradient goes in where it came by in I ---
        for branch in self._branches:
            edges, gradients = [], []
            for node, kept in branch.gradients.items():
                for index, gradient in enumerate(kept):
                    if gradient is not None:
                        edges.append(GradientEdge(node, index))
                        gradients.append(gradient)
            # A weight that is used twice has one node above the other: what the upper sends down was counted in I.
            again = branch.gradients if len(branch.gradients) > 1 else {}
            hooks = [node.register_prehook(_replace(kept)) for node, kept in again.items()]
            torch.autograd.backward(edges, gradients, retain_graph=True, inputs=branch.weights)
            for hook in hooks:
                hook.remove()
        # --- what hangs on the outputs past the trunk, such as the last layer's bias: from the very beginning ---
        if self._beside:
            torch.autograd.backward(self._outputs, self._gradients, retain_graph=True, inputs=self._beside)
        del self._branches, self._beside, self._gradients, self._outputs, self._inputs  # and with them the graph


def _branches(roots: Iterable[Node], inputs: Iterable[Tensor]) -> tuple[list[_Branch], list[Tensor]]:
    """The branches of a graph, and the weights that the outputs reach past the trunk."""
    # --- the trunk: what lies above the inputs, that is, between them and the outputs ---
    users = _users(roots)
    trunk = _above([get_gradient_edge(tensor).node for tensor in inputs], users)
    # --- for each weight the nodes of the trunk that its branch hangs on ---
    branch_at: dict[Node, _Branch] = {}
    beside = []
    for leaf in [node for node in users if hasattr(node, "variable") and node not in trunk]:
        own = _above([leaf], users, until=trunk)  # the branch: a transpose, a cast, a view of the weight
        nodes = {user for node in own for user in users[node] if user in trunk}
        if not nodes or any(node in own for node in roots):
            beside.append(leaf.variable)
            continue
        # Weights that share a node are one branch: walked one by one, the node would compute for both each time.
        branch = _Branch(nodes, [leaf.variable])
        for other in {id(branch_at[node]): branch_at[node] for node in nodes if node in branch_at}.values():
            branch.nodes |= other.nodes
            branch.weights += other.weights
        branch_at.update(dict.fromkeys(branch.nodes, branch))
    return list({id(branch): branch for branch in branch_at.values()}.values()), beside


def _users(roots: Iterable[Node]) -> dict[Node, list[Node]]:
    """All nodes below the roots, each with those right above it."""
    users: dict[Node, list[Node]] = {node: [] for node in roots}
    stack = list(users)
    while stack:
        node = stack.pop()
        for below, _ in node.next_functions:
            if below is not None:
                if below not in users:
                    users[below] = []
                    stack.append(below)
                users[below].append(node)
    return users


def _above(nodes: Iterable[Node], users: dict[Node, list[Node]], until: Iterable[Node] = ()) -> set[Node]:
    """The nodes, and all that lie above them below ``until``."""
    reached = {node for node in nodes if node in users}
    stack = list(reached)
    while stack:
        for user in users[stack.pop()]:
            if user not in reached and user not in until:
                reached.add(user)
                stack.append(user)
    return reached


def _keep(branch: _Branch, node: Node) -> Callable[[Gradients], None]:
    return lambda gradients: branch.gradients.update({node: gradients})


def _replace(gradients: Gradients) -> Callable[[Gradients], Gradients]:
    return lambda _: gradients
