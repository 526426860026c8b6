"""Which experts a mixture of experts uses while it trains, on which rank, and how unevenly."""

from typing import TYPE_CHECKING, Any

from course_lib.modeling.mixtures import ExpertCounts
from course_lib.training.callbacks.base import Callback
from course_lib.training.checkpoints import checkpoint
from course_lib.training.checkpoints.run_folder import MONITOR
from course_lib.writing import JsonLines

if TYPE_CHECKING:
    from course_lib.training.trainer import Trainer

EXPERTS = "experts.jsonl"
MODEL_TYPES = ("olmoe", "mixtral")


class ExpertLoad(Callback):
    """Adds to each logged line of a mixture of experts what its routers did in the steps since the last one.

    - ``expert_imbalance``: choices of the expert that was chosen most, by the mean of its layer, over all ranks; of the
      worst layer; 1 is even.
    - ``experts_unused``: experts of all layers that no token chose.
    - ``tokens_dropped``: copies of tokens for which their expert had no room.

    Padding counts: it is routed as well. Choices by layer, rank and expert are lines of ``monitor/experts.jsonl``.
    Other models, and blocks that torch.compile has compiled, are left alone.

    Args:
        model_type: of the whole model: a stage of a pipeline doesn't know it.
    """

    def __init__(self, model_type: str):
        self.model_type = model_type
        self.counts: ExpertCounts | None = None

    def on_train_begin(self, trainer: "Trainer") -> None:
        if self.model_type in MODEL_TYPES and not trainer.config.model.torch_compile:
            self.counts = ExpertCounts(trainer.model)
            self.lines = JsonLines(trainer.output_dir / MONITOR / EXPERTS)
            if trainer.is_main:
                with checkpoint.saving(str(self.lines.path)):
                    self.lines.path.parent.mkdir(parents=True, exist_ok=True)
                    self.lines.cut(trainer.state.step)

    def on_log(self, trainer: "Trainer", line: dict[str, Any]) -> None:
        if self.counts is None or "loss" not in line:
            return
        chosen, dropped = self.counts.take()
        by_rank = trainer.engine.gather_objects((dict(zip(self.counts.names, chosen.tolist(), strict=True)), dropped))
        layers = {name: [rank_counts[name] for rank_counts, _ in by_rank if name in rank_counts]
                  for name in dict.fromkeys(name for rank_counts, _ in by_rank for name in rank_counts)}
        totals = [[sum(counts) for counts in zip(*ranks, strict=True)] for ranks in layers.values()]
        line |= {"expert_imbalance": round(max(max(total) * len(total) / sum(total) for total in totals), 4),
                 "experts_unused": sum(total.count(0) for total in totals),
                 "tokens_dropped": sum(dropped for _, dropped in by_rank)}
        if trainer.is_main:
            with checkpoint.saving(f"a line of {self.lines.path}"):
                self.lines.append({"step": line["step"], "chosen": layers})

    def on_train_end(self, trainer: "Trainer") -> None:
        if self.counts is not None:
            self.counts.close()
