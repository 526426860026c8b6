"""Stages of a model on the ranks of a pipeline, and pipelines side by side."""

import contextlib
import functools
import itertools
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from course_lib.config import Config
from course_lib.errors import ConfigError
from course_lib.modeling.inputs import model_inputs, unpadded_rows
from course_lib.modeling.stages import Split, cut, parse_spec, shared_weights, split_at, split_evenly
from course_lib.parallel.blocks import blocks
from course_lib.parallel.ddp import average_gradients
from course_lib.parallel.pipeline.actions import Schedule
from course_lib.parallel.pipeline.executor import PipelineExecutor
from course_lib.parallel.pipeline.fitted.search import uniform
from course_lib.parallel.pipeline.simulation import Costs, simulate
from course_lib.parallel.pipeline.tied import sum_shared_gradients
from course_lib.parallel.tensor_plans import exchange_hidden, named
from course_lib.parallel.topology import RankGrid
from course_lib.parallel.torch_engines.pipeline import TorchPipeline
from course_lib.parallel.tp_collectives import SEQUENCE, gather, scatter
from course_lib.parallel.zero import Zero1
from course_lib.training.engines.sharded import ShardedEngine, gradients_of
from course_lib.training.engines.stages_state import StagesState
from course_lib.training.evaluation import scores_of_rows
from course_lib.training.loss import summed_loss
from course_lib.training.precision import autocast
from course_lib.training.ranks import Ranks


def _for_stages(batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """What every stage takes of a batch; see :class:`~course_lib.modeling.stages.Stage`."""
    inputs, unpadded = model_inputs(batch), unpadded_rows(batch)
    return inputs if unpadded is None else inputs | {"unpadded": torch.tensor(unpadded)}


class OwnStages(nn.Module):
    """The stages of this rank; only their parameters are here. Never called: the executor calls each stage."""

    def __init__(self, stages: Mapping[int, nn.Module]):
        super().__init__()
        self.stages = nn.ModuleDict({str(number): stage for number, stage in stages.items()})


class _InPrecision(nn.Module):
    """A stage whose forward runs under autocast; its backward, later, must not."""

    def __init__(self, stage: nn.Module, precision: str, device: torch.device):
        super().__init__()
        self.stage, self.precision, self.device = stage, precision, device

    def forward(self, *received: Tensor, **batch: Tensor) -> Any:
        with autocast(self.precision, self.device):
            return self.stage(*received, **batch)


class PipelineEngine(ShardedEngine):
    """D pipelines of P ranks; gradients of a stage are reduced over its D copies, whose ranks may share its optimizer
    state (ZeRO-1).

    A rank holds its stages alone, all ranks of a pipeline see the same batch, and a batch goes through it in
    ``pipeline_chunks`` micro-batches, in the order of the schedule. The gradient is that of the plain loop for the same
    global batch.

    Attributes:
        schedule: the table that every pipeline runs.
        split: where the model is cut.
        stages: of this rank, by number.
        stage_blocks: the transformer blocks in each of them.
    """

    stored_class = StagesState
    has_schedule = True
    zero: Zero1 | None = None

    def __init__(self, config: Config, ranks: Ranks):
        super().__init__(config, ranks)
        self.schedule = self._schedule(config.pipeline.pipeline_chunks or min(2 * ranks.grid.pp, config.run.batch_size))

    @classmethod
    def make_grid(cls, config: Config, processes: int) -> RankGrid:
        pipeline, ranks, tensor = config.pipeline, processes, config.parallel.tensor_parallel_size
        if ranks < 2:
            raise ConfigError("a pipeline needs several processes, and there is one", "use --num_processes 2 or more")
        data, stages = pipeline.data_parallel_size, pipeline.pipeline_parallel_size
        data = data or (max(1, ranks // stages // tensor) if stages else 1)
        stages = stages or max(1, ranks // data // tensor)
        if data * stages * tensor != ranks:
            per_pipeline = f"{stages} ranks" if tensor == 1 else f"{stages} × {tensor} ranks"
            sizes = "data_parallel_size × pipeline_parallel_size" + " × tensor_parallel_size" * (tensor > 1)
            raise ConfigError(
                f"{data} pipelines of {per_pipeline} are {data * stages * tensor} ranks, and there are {ranks}",
                f"choose {sizes} equal to the number of processes",
            )
        return RankGrid(data, stages, tensor)

    def _schedule(self, microbatches: int) -> Schedule:
        pipeline = self.config.pipeline
        return uniform(pipeline.schedule, self.ranks.grid.pp, microbatches, pipeline.stages_per_rank)

    def split_layers(self, model: nn.Module) -> None:
        """Decide where to cut, while the model is whole and its costs can be counted, and then split its layers.

        Raises:
            ConfigError: the model cannot be cut so.
        """
        pipeline, stages = self.config.pipeline, self.schedule.stages
        self.split: Split
        if pipeline.split_spec:
            self.split = split_at(model, parse_spec(pipeline.split_spec))
            if self.split.stages != stages:
                raise ConfigError(
                    f"split_spec makes {self.split.stages} stages, and {self.schedule.name} has {stages} "
                    f"on {self.ranks.grid.pp} ranks",
                    f"name {stages - 1} places to cut at",
                )
        else:
            self.split = split_evenly(model, stages, pipeline.split_by, self.config.data.max_length)
        self.stored.keep_shell()
        super().split_layers(model)
        if self.stored.buffer_names:
            raise ConfigError(
                f"{type(model).__name__} stores buffers ({self.stored.buffer_names[0]}), which no stage owns",
                "train it with --training_type accelerated",
            )

    def take_part(self, model: nn.Module) -> nn.Module:
        """Cut the model and keep this rank's stages."""
        stored, kinds = self.stored, {type(block) for block in blocks(model).values()}
        stored.remember_whole(model)
        self.stages = cut(model, self.split, self.schedule.stages_of(self.ranks.place.pp))
        self.shared = shared_weights(model, self.split)
        if self.tensor is not None and self.config.parallel.sequence_parallel:
            self._whole_between_stages(model)
        own = OwnStages(self.stages)
        self.stage_blocks = {
            number: [module for module in stage.modules() if type(module) in kinds]
            for number, stage in self.stages.items()
        }
        if not any(parameter.requires_grad for parameter in own.parameters()):
            raise ConfigError(
                f"the stages of rank {self.ranks.place.pp} have nothing to train", "cut elsewhere with --split_spec"
            )
        stored.names = {parameter: stored.names[parameter] for parameter in own.parameters()}  # the others may go
        return own

    def blocks(self) -> list[nn.Module]:
        return list(itertools.chain.from_iterable(self.stage_blocks.values()))

    def _whole_between_stages(self, model: nn.Module) -> None:
        """Send hidden states whole from stage to stage: a stage makes its masks by their length."""
        assert self.tensor is not None
        group, plan = self.ranks.groups.tp, self.tensor.plan
        sliced = list(plan.blocks_of(model).values())  # what works on slices, in order
        if (name := named(model, plan.final_norm)) is not None:
            sliced.append(model.get_submodule(name))
        for stage in self.stages.values():
            held = set(stage.modules())
            own = [module for module in sliced if module in held]
            if own and own[0] is not sliced[0]:
                own[0].register_forward_pre_hook(
                    functools.partial(exchange_hidden, functools.partial(scatter, dim=SEQUENCE), group),
                    with_kwargs=True,
                )
            if own and own[-1] is not sliced[-1]:
                own[-1].register_forward_hook(lambda module, args, hidden: gather(hidden, group, SEQUENCE))

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> None:
        parallel, group = self.config.parallel, self.ranks.groups.dp
        self.stored.copies = {self.stored.names[parameter] for parameter in self._second_copies()}
        if parallel.strategy == "zero1":
            self.zero = Zero1(model, optimizer, group=group, bucket_bytes=parallel.bucket_bytes)
        else:
            for tensor in model.parameters():
                dist.broadcast(tensor.detach(), group=group, group_src=0)
        self.stored.zero, self.stored.holds_shards = self.zero, self.zero is not None
        self.score_with(model)  # the executors over the stages, of which an evaluation runs the forwards

    def score_with(self, model: nn.Module) -> None:
        config, device, self.wrapped = self.config, self.device, model
        stages = {
            number: stage if isinstance(stage, FSDPModule) else _InPrecision(stage, self.precision, device)
            for number, stage in self.stages.items()
        }

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            return summed_loss(logits, labels, config.data.task, config.optim.label_smoothing_factor)

        group = self.ranks.groups.pp
        self.forwards = PipelineExecutor(self.schedule, stages, loss, group, device)
        self.executor: PipelineExecutor | TorchPipeline = self.forwards
        if config.parallel.chosen_engine == "torch":
            self.executor = TorchPipeline(self.schedule, stages, loss, group, device)

    def _second_copies(self) -> set[nn.Parameter]:
        """This rank's copies of tied weights that count on an earlier rank."""
        ranks, copies = self.schedule.stage_ranks, set()
        for names in self.shared:
            first = ranks[min(names)]
            copies |= {
                self.stages[stage].get_parameter(name)
                for stage, name in names.items()
                if stage in self.stages and ranks[stage] == self.ranks.place.pp != first
            }
        return copies

    # --- one step ---

    def run_schedule(self, batch: Mapping[str, Tensor], share: Tensor) -> Tensor:
        # Gradients are averaged over the pipelines; the loss is already a share of their sum.
        done = self.executor.step(targets=batch["labels"], scale=share * self.ranks.grid.dp, **_for_stages(batch))
        return sum(done.losses, torch.zeros((), device=self.device)) * share

    def scores(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:  # type: ignore[override]
        done, labels, task = self.forwards.evaluate(**_for_stages(batch)), batch["labels"], self.config.data.task
        if self.schedule.stages - 1 in self.stages:
            scores = scores_of_rows(torch.cat(done.outputs), labels, task)
        else:
            room = torch.empty(len(labels), 2, device=self.device)
            scores = (room, torch.empty_like(labels)) if task == "classification" else (room,)
        scores = tuple(tensor.contiguous() for tensor in scores)
        for tensor in scores:  # from the rank that has the last stage to all of its pipeline
            dist.broadcast(tensor, group=self.ranks.groups.pp, group_src=self.schedule.stage_ranks[-1])
        return scores

    def clip(self, max_norm: float) -> Tensor:
        sum_shared_gradients(self.shared, self.stages, self.schedule.stage_ranks, self.ranks.groups.pp)
        return self.clip_together(self.gradients(), max_norm, self.stored.copies)

    def gradients(self) -> dict[str, Tensor]:
        """This rank's gradients, or shards of them, once they are reduced over the pipelines; by the model's names."""
        names = self.stored.names
        if self.zero:
            whole_name = {name: names[parameter] for name, parameter in self.model.named_parameters()}
            return {whole_name[name]: gradient for name, gradient in gradients_of(self.zero).items()}
        average_gradients(self.model.parameters(), self.ranks.groups.dp, self.config.parallel.bucket_bytes)
        return {name: p.grad for p, name in names.items() if p.grad is not None}

    def update(self) -> None:
        (self.zero or self.optimizer).step()

    def zero_grad(self) -> None:
        (self.zero or self.optimizer).zero_grad()

    def autocast(self) -> AbstractContextManager:
        return contextlib.nullcontext()  # each stage has its own

    def describe(self) -> Mapping[str, Any]:
        """The pipeline; the bubble is the simulator's, for the stages' costs as counted."""
        costs = self.split.stage_costs
        timeline = simulate(self.schedule, Costs(forward=costs, backward_input=costs, backward_weight=costs))
        return {
            **super().describe(),
            "pipeline": {
                "schedule": self.schedule.name,
                "pipeline_parallel_size": self.ranks.grid.pp,
                "data_parallel_size": self.ranks.grid.dp,
                "stages": self.schedule.stages,
                "pipeline_chunks": self.schedule.microbatches,
                "split": str(self.split).splitlines(),
                "predicted_bubble": float(timeline.bubble),
            },
        }
