"""Load of a mixture's experts while it trains: which are used, on which rank, and how unevenly."""

from typing import Any

from course_lib.modeling.mixtures import ExpertCounts
from course_lib.training.callbacks.base import Callback
from course_lib.training.checkpoints import checkpoint
from course_lib.training.checkpoints.run_folder import MONITOR
from course_lib.training.session import Session
from course_lib.writing import JsonLines

EXPERTS = "experts.jsonl"
MODEL_TYPES = ("olmoe", "mixtral")


class ExpertLoad(Callback):
    """Adds to each logged line of a mixture of experts what its routers did in the steps since the last one.

    - ``expert_imbalance``: choices of the expert that was chosen most, by the mean of its layer, over all ranks; of the
      worst layer; 1 is even.
    - ``experts_unused``: experts of all layers that no token chose.
    - ``tokens_dropped``: copies of tokens for which their expert had no room.
    - ``router_aux_loss``: with ``router_aux_loss_coef``, the routers' own loss, before it is multiplied by that; the
      mean of the micro-batches.
    - ``expert_rank_imbalance``: where ranks share the experts, copies that the busiest rank's experts were to work on,
      by the mean of the ranks that share them with it; all layers together; 1 is even. The others wait for that rank.

    Padding counts: it is routed as well. Choices by layer, rank and expert are lines of ``monitor/experts.jsonl``.
    Other models, and blocks that torch.compile has compiled, are left alone.

    Args:
        model_type: of the whole model: a stage of a pipeline doesn't know it.
    """

    def __init__(self, model_type: str):
        self.model_type = model_type
        self.counts: ExpertCounts | None = None

    def on_train_begin(self, trainer: Session) -> None:
        if self.model_type in MODEL_TYPES and not trainer.config.model.torch_compile:
            self.counts = ExpertCounts(trainer.model)
            self.lines = JsonLines(trainer.output_dir / MONITOR / EXPERTS)
            if trainer.is_main:
                with checkpoint.saving(str(self.lines.path)):
                    self.lines.path.parent.mkdir(parents=True, exist_ok=True)
                    self.lines.cut(trainer.state.step)

    def on_log(self, trainer: Session, line: dict[str, Any]) -> None:
        if self.counts is None or "loss" not in line:
            return
        chosen, dropped = self.counts.take()
        own_loss = trainer.router_loss.take() if trainer.router_loss else 0.0
        by_rank = trainer.ranks.gather_objects(
            (dict(zip(self.counts.names, chosen.tolist(), strict=True)), dropped, own_loss)
        )
        layers = {
            name: [rank_counts[name] for rank_counts, *_ in by_rank if name in rank_counts]
            for name in dict.fromkeys(name for rank_counts, *_ in by_rank for name in rank_counts)
        }
        totals = [[sum(counts) for counts in zip(*ranks, strict=True)] for ranks in layers.values()]
        line |= {
            "expert_imbalance": round(max(max(total) * len(total) / sum(total) for total in totals), 4),
            "experts_unused": sum(total.count(0) for total in totals),
            "tokens_dropped": sum(dropped for _, dropped, _ in by_rank),
        }
        if trainer.router_loss:
            line["router_aux_loss"] = round(sum(share for *_, share in by_rank), 6)
        if (sharing := trainer.config.parallel.expert_parallel_size) > 1:
            line["expert_rank_imbalance"] = round(
                max(
                    imbalance_of_ranks([ranks[first : first + sharing] for ranks in layers.values()])
                    for first in range(0, len(by_rank), sharing)
                ),
                4,
            )
        if trainer.is_main:
            with checkpoint.saving(f"a line of {self.lines.path}"):
                self.lines.append({"step": line["step"], "chosen": layers})

    def on_train_end(self, trainer: Session) -> None:
        if self.counts is not None:
            self.counts.close()


def imbalance_of_ranks(layers: list[list[list[int]]]) -> float:
    """Copies of tokens for the experts of the busiest rank of a group, by the mean of the group.

    Args:
        layers: of each layer, how often the tokens of each rank chose each expert; rank r has the r-th part of these.
    """
    ranks = len(layers[0])
    work = [0] * ranks
    for chosen in layers:
        total = [sum(counts) for counts in zip(*chosen, strict=True)]
        own = len(total) // ranks
        for rank in range(ranks):
            work[rank] += sum(total[rank * own : (rank + 1) * own])
    return max(work) * ranks / sum(work)
