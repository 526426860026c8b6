"""Checks that ranks agree: on config, data, model, step, and the parameters that all of them hold.

Ranks that differ seldom say so: the loss still falls, and the weights that are saved are those of rank 0.
"""

from collections.abc import Mapping

from torch import Tensor

from course_lib.config import Config, flatten
from course_lib.hangs.desync import GatheringRanks, Topic, compare, replicas, topic
from course_lib.training.callbacks.base import Callback
from course_lib.training.session import Session

OWN_ON_EACH_RANK = frozenset(
    {"dataset", "model", "output_dir", "env_file", "num_workers", "pin_memory", "progress_bar"}
)
"""Fields that ranks may differ in: paths, as machines may mount them elsewhere, whose content is compared by itself;
and what changes no result."""

SAMPLE = 64
"""Elements of a parameter that a sampled comparison looks at, at least, where it has as many."""


class AgreementCheck(Callback):
    """Compares the ranks before an engine wraps the model, before the first step, and every ``guard.desync_steps``.

    It counts the steps that it sees rather than read ``trainer.state.step``, which is one of the things compared.

    Args:
        config: of this rank.
    """

    def __init__(self, config: Config):
        self.elements = None if config.guard.desync_check == "full" else SAMPLE
        self.every, self.steps, self.agreed = config.guard.desync_steps, 0, ""

    def on_connect(self, trainer: Session) -> None:
        if trainer.num_processes > 1:
            parameters = trainer.stored.parameters()
            compare(
                [_config(trainer), _data(trainer), _model(trainer, parameters, parameters)],
                "before the first step",
                GatheringRanks(trainer.device),
            )

    def on_train_begin(self, trainer: Session) -> None:
        self._compare(trainer, "before the first step")

    def on_step_end(self, trainer: Session) -> None:
        self.steps += 1
        if self.steps % self.every == 0:
            self._compare(trainer, f"after step {trainer.state.step}")

    def _compare(self, trainer: Session, when: str) -> None:
        if trainer.num_processes > 1:
            parts = held_alike(trainer)
            whole = {name: parameter for _, alike in parts for name, parameter in alike.items()}
            compare(
                [
                    _config(trainer),
                    _data(trainer),
                    _model(trainer, trainer.stored.parameters(), whole),
                    _step(trainer),
                    *(
                        replicas(
                            alike,
                            "look for what that rank alone does, and resume from a checkpoint before it",
                            part,
                            self.elements,
                            self.steps,
                        )
                        for part, alike in parts
                    ),
                ],
                f"{when} (they agreed {self.agreed})" if self.agreed else when,
                GatheringRanks(trainer.device),
            )
        self.agreed = when


def _config(trainer: Session) -> Topic:
    fields = flatten(trainer.config).items()
    return topic(
        {f"`{name}`": repr(value) for name, value in fields if name not in OWN_ON_EACH_RANK},
        "start every rank with the same options and config files",
    )


def _data(trainer: Session) -> Topic:
    rows = {f"the number of {split} rows": str(len(part)) for split, part in trainer.data.splits.items()}
    return topic(
        rows | {"the data's fingerprint": trainer.data.fingerprint[:12]}, "give every machine the same data files"
    )


def _model(trainer: Session, parameters: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> Topic:
    """Parameters by name, in module order: shape where this rank has the whole, dtype, and whether trained."""

    def described(name: str, parameter: Tensor) -> str:
        shape = f"{tuple(parameter.shape)} " if name in whole else ""
        trained = "trained" if parameter.requires_grad else "frozen"
        return f"{shape}{str(parameter.dtype).removeprefix('torch.')} {trained}"

    return topic(
        {f"parameter `{name}`": described(name, parameter) for name, parameter in parameters.items()},
        "build the same model on every rank",
        trainer.ranks.part,
    )


def _step(trainer: Session) -> Topic:
    return topic({"the step": str(trainer.state.step)}, "let every rank resume from the same checkpoint")


def held_alike(trainer: Session) -> list[tuple[int, dict[str, Tensor]]]:
    """The parameters that other ranks hold too, by name, beside a number that is the same on those ranks.

    As many sets on every rank: experts that are spread are a set beside all else, which more ranks hold.

    Data parallel, ZeRO-1 and ZeRO-2 keep every parameter on every rank, pipelines side by side each of their stages.
    FSDP and ZeRO-3 leave shards, which differ by design, except for the copies that a ``shard_group_size`` makes.
    torch's ``zero2`` is FSDP2, whose units are shards between two steps. Under LocalSGD and DiLoCo all differ.
    """
    if trainer.engine.trains_apart:
        return [(0, {})]
    parallel, parameters = trainer.config.parallel, trainer.stored.parameters()
    if parallel.strategy in ("zero3", "fsdp") or (parallel.strategy, parallel.chosen_engine) == ("zero2", "torch"):
        if not parallel.shard_group_size:
            return [(0, {})]
        return [(trainer.rank % parallel.shard_group_size, parameters)]
    return trainer.stored.parameters_by_part()
