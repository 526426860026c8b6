"""Muon: momentum whose singular values are all made about 1, for the matrices within a transformer's blocks.

For a matrix W of shape (n, m) with gradient G::

    B = mu B + (1 - mu) G                  momentum
    U = mu B + (1 - mu) G                  Nesterov's look ahead
    O = newton_schulz(U)                   U's singular vectors, with singular values of about 1
    W = (1 - lr decay) W - lr 0.2 sqrt(max(n, m)) O

The factor gives O the root mean square that AdamW's updates have, so that one learning rate serves both: embeddings,
the output layer, norms and biases stay with AdamW. The rule looks at whole matrices: half of a matrix has other
singular vectors than the matrix, which is why ZeRO's flat shards break it; see
:mod:`course_lib.parallel.sharded_muon`.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024, kellerjordan.github.io/posts/
muon); Liu et al., "Muon is Scalable for LLM Training" (arXiv 2502.16982), section 2.2 for decay and factor.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from course_lib.errors import ConfigError
from course_lib.parallel.blocks import blocks

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of p(s) = a s + b s^3 + c s^5: five times p lifts all s from 0.01 to 1 into 0.68 to 1.13, roughly."""
ITERATIONS = 5


def newton_schulz(matrix: Tensor) -> Tensor:
    """U p(p(p(p(p(S / |S|))))) V^T of a matrix U S V^T, by matrix products alone.

    Args:
        matrix: (n, m), of any dtype; it is computed in. Muon uses bf16, which is enough: the values need not be 1.
    Returns:
        (n, m), of the same dtype; of a matrix of zeros: zeros.
    """
    a, b, c = COEFFICIENTS
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix  # so that X X^T is the smaller of the two
    x = wide / wide.norm().clamp(min=1e-7)  # Frobenius: no singular value is above 1
    for _ in range(ITERATIONS):
        gram = x @ x.T  # (k, k), k = min(n, m); U S^2 U^T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)  # a X + (b XX^T + c (XX^T)^2) X
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def look_ahead(momentum_buffer: Tensor, gradient: Tensor, momentum: float) -> Tensor:
    """Move the momentum on, in place, and give U. Element by element: shards will do."""
    momentum_buffer.lerp_(gradient, 1 - momentum)
    return gradient.lerp(momentum_buffer, momentum)


def apply_(weight: Tensor, update: Tensor, lr: float, weight_decay: float) -> None:
    """Make the step of one whole matrix, in place.

    Args:
        weight: (n, m).
        update: U, (n, m), whole.
        lr: learning rate.
        weight_decay: decoupled, as AdamW's.
    """
    direction = newton_schulz(update.bfloat16())
    weight.mul_(1 - lr * weight_decay)
    weight.add_(direction, alpha=-lr * 0.2 * math.sqrt(max(weight.shape)))


class Muon(Optimizer):
    """Muon for groups that say ``"muon": True``, AdamW for the others; every rank has whole matrices and gradients.

    Args:
        groups: as torch's; see :func:`muon_groups`.
        lr: of both rules.
        momentum: mu.
        betas: of AdamW.
        eps: of AdamW.
    Raises:
        ConfigError: a parameter in a group for Muon that is no matrix.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, lr: float, momentum: float, betas: tuple[float, float], eps: float
    ):
        super().__init__(
            groups, {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": 0.0, "muon": False}
        )
        for group in self.param_groups:
            for parameter in group["params"]:
                if group["muon"] and parameter.ndim != 2:
                    raise ConfigError(
                        f"Muon of a parameter of shape {tuple(parameter.shape)}",
                        "give it matrices; AdamW trains all else",
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    (self._muon if group["muon"] else self._adamw)(parameter, parameter.grad, group)
        return loss

    def _muon(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        update = look_ahead(state["momentum_buffer"], gradient, group["momentum"])
        apply_(weight, update, group["lr"], group["weight_decay"])

    def _adamw(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Loshchilov and Hutter, arXiv 1711.05101, algorithm 2."""
        state, (beta1, beta2) = self.state[weight], group["betas"]
        if not state:
            state |= {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(weight),
                "exp_avg_sq": torch.zeros_like(weight),
            }
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        step = state["step"].item()
        deviation = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.addcdiv_(state["exp_avg"], deviation, value=-group["lr"] / (1 - beta1**step))


def muon_groups(model: nn.Module, groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Optimizer groups parted into those for Muon, the matrices of the model's blocks, and those for AdamW.

    Raises:
        ConfigError: the model has no blocks.
    """
    hidden = {parameter for block in blocks(model).values() for parameter in block.parameters() if parameter.ndim == 2}
    parted = [
        group | {"params": [p for p in group["params"] if (p in hidden) == for_muon], "muon": for_muon}
        for group in groups
        for for_muon in (True, False)
    ]
    return [group for group in parted if group["params"]]
