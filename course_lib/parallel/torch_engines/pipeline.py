"""The same stages and the same tables in torch.distributed.pipelining."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.utils._pytree import tree_map

from course_lib.errors import ConfigError
from course_lib.missing_extra import torch_version
from course_lib.parallel.pipeline import csv_form
from course_lib.parallel.pipeline.actions import Schedule
from course_lib.parallel.pipeline.executor import LossFunction, StepResult
from course_lib.parallel.pipeline.passes import without_communication
from course_lib.parallel.pipeline.validation import check


class TorchPipeline:
    """Runs a table in torch's schedule runtime, with the face of ``PipelineExecutor``.

    Stages that ``fully_shard`` has split over data parallel ranks are gathered before their first action of a batch,
    and their gradients reduced after the last: the runtime adds these actions to the table.

    Args:
        schedule: the table; torch adds its own sends and receives.
        stages: the stages that live on this rank, by number; each gets a forward hook.
        loss_function: of the last stage's output and targets.
        group: whose rank r runs row r; the default group by default.
        device: of the stages.
    Raises:
        ConfigError: a table that cannot run.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, nn.Module],
        loss_function: LossFunction,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
    ):
        check(schedule)
        ranks = schedule.stage_ranks
        if torch_version() < (2, 12) and any(ranks[stage] == ranks[stage + 1] for stage in range(schedule.stages - 1)):
            raise ConfigError(
                "torch's schedule runtime sends every stage's output to another rank before torch 2.12, "
                "and this table has neighbouring stages on one rank",
                "take the engine scratch, another schedule, or torch 2.12",
            )
        self.table = without_communication(schedule)
        for module in stages.values():
            module.register_forward_hook(own_memory)
        self.stages, self.loss_function, self.group = dict(stages), loss_function, group
        self.device = torch.device(device)
        self._engines: dict[tuple, Any] = {}

    def step(
        self, *inputs: Tensor, targets: Tensor, scale: float | Tensor | None = None, **extras: Tensor
    ) -> StepResult:
        """Forward and backward of one batch; as ``PipelineExecutor.step``, without spans and peak."""
        if scale is None:
            scale = 1 / self.table.microbatches
        losses: list[Tensor] = []
        self._scale = scale  # read by `_scaled_loss`: torch's engine knows 1 / micro-batches only
        self._engine(inputs, extras).step(
            *self._own(inputs), target=targets, losses=losses, return_outputs=False, **extras
        )
        return StepResult([loss.detach() / scale for loss in losses])

    def _own(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The inputs, where the first stage is."""
        return inputs if 0 in self.stages else ()

    def _engine(self, inputs: tuple[Tensor, ...], extras: Mapping[str, Tensor]) -> Any:
        """torch's schedule for batches of this form: it learns the shapes of messages once and keeps to them."""
        form = tuple((tensor.shape, tensor.dtype) for tensor in (*inputs, *extras.values()))
        if form not in self._engines:
            self._engines[form] = self._build()
        return self._engines[form]

    def _build(self) -> Any:
        # --- phase 1: a stage of torch's for each of ours; it finds out the shapes of messages in its first step ---
        parts = [
            pipelining.PipelineStage(module, stage, self.table.stages, self.device, group=self.group)
            for stage, module in sorted(self.stages.items())
        ]
        # --- phase 2: its runtime, which walks a table as our executor does. `scale_grads` would divide once more ---
        options: dict[str, Any] = {
            "n_microbatches": self.table.microbatches,
            "loss_fn": self._scaled_loss,
            "scale_grads": False,
        }
        runtime = _PipelineScheduleRuntime(parts, **options)
        # --- phase 3: the table. It is read from a file and in no other way; torch adds its own sends and receives ---
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "table.csv")
            csv_form.write(self.table, path)
            runtime._load_csv(str(path), format="compute_only")
        return runtime

    def _scaled_loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.loss_function(output, target) * self._scale


def own_memory(stage: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Forward hook: outputs that own their memory, since torch's split backward detaches them in place."""
    return tree_map(lambda output: output.clone() if output._is_view() else output, outputs)
