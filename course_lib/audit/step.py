"""The audit of one step of any training loop, in the job that runs it."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from course_lib.audit.attribution import attribute
from course_lib.audit.layouts import Layout
from course_lib.audit.session import check_reaches
from course_lib.audit.subject import Record, Subject, gradients_of, plain_name, weights_of
from course_lib.audit.verdict import Verdict, judge
from course_lib.errors import CourseError
from course_lib.parallel.trees import tensors_of


class GradientDiffers(CourseError):
    """A step's gradients, or its loss, are not those of one process.

    Attributes:
        verdict: on all parameters.
    """

    def __init__(self, verdict: Verdict):
        self.verdict = verdict
        wrong = verdict.told or [f"the loss is {verdict.loss_apart:.2g} of its size away from one process"]
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        super().__init__(
            f"{verdict.layout}: {wrong[0]}{more}{verdict.untried and f'; {verdict.untried}'}", "see `error.verdict`"
        )

    def __reduce__(self):
        return type(self), (self.verdict,)


@dataclass(frozen=True)
class Reference:
    """One process that takes the step, to compare with.

    Attributes:
        model: builds the plain model, on rank 0 alone; it is given the weights that the step begins with.
        loss: ``loss(model, batch)`` of the whole batch, a scalar.
        clip: largest norm of the gradient, where the loop clips it before ``optimizer.step()``.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    clip: float | None = None


@dataclass
class AuditedStep:
    """Handle of an audited block: its loss goes in, the verdict comes out.

    Attributes:
        loss: set it in the block (of this rank, or of all) to have it compared.
        verdict: on every rank, after the block.
    """

    loss: Tensor | float | None = None
    verdict: Verdict | None = None


@contextlib.contextmanager
def step(
    model: nn.Module,
    reference: Reference,
    *,
    batch: Any,
    layout: Layout | None = None,
    gradients: Callable[[], Mapping[str, Tensor | None]] | None = None,
    weights: Callable[[], Mapping[str, Tensor]] | None = None,
    strict: bool = True,
) -> Iterator[AuditedStep]:
    """Compare the gradients of the step in this block with those of one process; every rank enters it.

    They are read when the first optimizer steps, or at the block's end where none does.

    Args:
        model: as it is trained, wrapped or not.
        reference: computed on rank 0 from the gathered batch.
        batch: of this rank; the ranks' are joined along dimension 0, in the order of the data axes (and along
            dimension 1 in that of cp).
        layout: of the job; default: all ranks are data parallel.
        gradients: whole gradients by name, where ``.grad`` does not have them; every rank calls it.
        weights: whole parameters by name, likewise.
        strict: raise what is found; else it is in ``verdict`` alone.
    Raises:
        GradientDiffers: on every rank.
        CourseError: the layout has another number of ranks than the job, no gradient was seen, the loss reaches no
            weight, or what differs may be what was drawn at random in the block.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    layout = layout or Layout(dp=ranks)
    if layout.ranks != ranks:
        raise CourseError(f"the layout {layout} has {layout.ranks} ranks, and the job {ranks}", "give the job's")
    told = AuditedStep()
    with _recorded(Subject(model, None, None, batch, gradients, weights), told) as mine:  # type: ignore[arg-type]
        yield told
    everybody = _gathered((mine, batch), ranks)
    verdict: list[Any] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        verdict = [_verdict(reference, everybody, layout)]
    if dist.is_initialized():
        dist.broadcast_object_list(verdict)
    if isinstance(verdict[0], CourseError):
        raise verdict[0]
    told.verdict = verdict[0]
    if strict and (told.verdict.wrong or not told.verdict.losses_agree):
        raise GradientDiffers(told.verdict)


@contextlib.contextmanager
def _recorded(subject: Subject, told: AuditedStep) -> Iterator[Record]:
    """Weights before the block, and the gradients that its first optimizer step sees."""
    record, before = Record(weights_of(subject)), _generators()

    def read(*_: Any) -> None:
        if not record.gradients:
            record.gradients = gradients_of(subject)

    hook = register_optimizer_step_pre_hook(read)
    try:
        yield record
        read()
    finally:
        hook.remove()
    record.drew = any(not torch.equal(*states) for states in zip(before, _generators(), strict=True))
    if told.loss is not None:
        record.losses = [float(torch.as_tensor(told.loss).detach().double())]
    if all(gradient is None for gradient in record.gradients.values()):
        raise CourseError(
            "no parameter of the model has a gradient when the optimizer steps",
            "call backward in the block, or give `gradients`, where the engine keeps them elsewhere",
        )


def _generators() -> list[Tensor]:
    """States of torch's generators: what is drawn changes them."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]


def _gathered(mine: Any, ranks: int) -> list[Any]:
    everybody: list[Any] = [mine] * ranks
    if dist.is_initialized():
        dist.all_gather_object(everybody, mine)
    return everybody


def _verdict(reference: Reference, everybody: list[Any], layout: Layout) -> Verdict | CourseError:
    """On rank 0; what could not be judged is returned, so that all ranks raise it."""
    observed, batches = [record for record, _ in everybody], [batch for _, batch in everybody]
    for record, batch in zip(observed, batches, strict=True):
        record.batch = batch
    try:
        for rank, record in enumerate(observed):
            _check_same(observed[0], record, rank)
        right = _computed(reference, observed[0].start, _joined(batches, layout))
        check_reaches(right)
    except CourseError as error:
        return error
    right.losses = right.losses if any(record.losses for record in observed) else []
    if not right.losses:
        for record in observed:
            record.losses = []
    verdict = judge(right, observed, layout)
    if verdict.wrong and any(record.drew for record in (right, *observed)):
        return CourseError(
            "random numbers were drawn in the step, so that its gradients differ from one process's "
            "though they be right",
            "switch dropout off while the step is audited, and load the batch before the block",
        )
    if verdict.wrong:
        unclipped = replace(reference, clip=None)
        attribute(
            verdict,
            right,
            observed,
            lambda batches: [_computed(unclipped, observed[0].start, batch).gradients for batch in batches],
        )
    return verdict


def _check_same(first: Record, other: Record, rank: int) -> None:
    for name, weight in other.start.items():
        if name in first.start and not torch.equal(weight, first.start[name]):
            raise CourseError(
                f"`{name}` does not begin with the same values on rank {rank} as on rank 0",
                "hand rank 0's weights to all ranks first",
            )


def _computed(reference: Reference, start: dict[str, Tensor], batch: Any) -> Record:
    with torch.random.fork_rng(devices=[]):
        model = reference.model()
    before = _generators()
    parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    for name, parameter in parameters.items():
        if name not in start:
            raise CourseError(
                f"the reference has a parameter `{name}`, and the model that is trained none",
                "build the same model, without what a wrapper adds",
            )
        parameter.data.copy_(start[name])
        parameter.grad = None
    loss = reference.loss(model, batch)
    loss.backward()
    if reference.clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), reference.clip)
    record = Record(
        start, [float(loss.detach().double())], {name: parameter.grad for name, parameter in parameters.items()}
    )
    record.terms = max((tensor.numel() for tensor in tensors_of(batch)), default=1)
    record.drew = any(not torch.equal(*states) for states in zip(before, _generators(), strict=True))
    return record


def _joined(batches: list[Any], layout: Layout) -> Any:
    """The whole batch: of ranks that share their data, the first one's."""
    rows = []
    for data in range(layout.dp * layout.shard):
        parts = [
            batches[rank]
            for rank in range(layout.ranks)
            if (place := layout.place(rank))["dp"] * layout.shard + place["shard"] == data
            and not place["pp"]
            and not place["ep"]
            and not place["tp"]
        ]
        rows.append(_cat(parts, 1) if len(parts) > 1 else parts[0])
    return _cat(rows, 0) if len(rows) > 1 else rows[0]


def _cat(parts: list[Any], dim: int) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts, dim) if first.dim() > dim else first
    if isinstance(first, Mapping):
        return {key: _cat([part[key] for part in parts], dim) for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)(_cat(list(column), dim) for column in zip(*parts, strict=True))
    return first
