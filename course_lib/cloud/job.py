"""Describes a training job for other machines: what runs, on how many of which, for how long, at what cost."""

import re
from dataclasses import dataclass

from course_lib.config import Config, flatten, options
from course_lib.errors import ConfigError
from course_lib.planning import hardware

NOT_SENT = ("num_processes", "overwrite_output_dir", "resume_from_checkpoint", "progress_bar", "env_file")
"""Fields of the config that the launcher decides, or that make no sense on another machine."""
PRICES = "AWS SageMaker training list prices, us-east-1, written down 2025-06 from memory: check before you rent"
"""As in ``planning/catalogue/hardware.yaml``, where they are renewed."""


@dataclass(frozen=True)
class Job:
    """A run on equal machines.

    Attributes:
        config: what is trained.
        instance_type: SageMaker's name of the machine; see ``planning/catalogue/hardware.yaml``. Empty for machines
            that are there, with a GPU for each rank unless the run's device is the CPU.
        instance_count: machines.
        processes: ranks on each.
        max_hours: after which it is stopped.
        spot: on spare capacity, which can be taken away; the job then goes on from its newest checkpoint.
        max_wait_hours: with spot, from submission to the end, waits included.
        keep_alive_minutes: of the machines after the job, for the next one (a warm pool); 0: none.
        name: of the job; letters, digits and hyphens.
    """

    config: Config
    instance_type: str
    instance_count: int = 1
    processes: int = 1
    max_hours: float = 2.0
    spot: bool = False
    max_wait_hours: float = 4.0
    keep_alive_minutes: int = 0
    name: str = "course"

    def __post_init__(self) -> None:
        world, wanted = self.instance_count * self.processes, self.config.run.num_processes
        if self.instance_count < 1 or self.processes < 1:
            raise ConfigError(f"{self.instance_count} instances of {self.processes} processes", "give at least one")
        if wanted not in (None, world):
            machines = f"{self.instance_count} × {self.instance_type or 'a machine'}"
            raise ConfigError(
                f"num_processes is {wanted}, and {machines} start {self.processes} each",
                "leave num_processes out, or give --processes_per_instance",
            )
        if world > 1 and self.config.run.training_type == "basic":
            raise ConfigError(f"training_type basic runs one process, not {world}", "use --training_type accelerated")
        if not re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,39}", self.name):
            raise ConfigError(f"job name `{self.name}`", "use up to 40 letters, digits and hyphens")
        if self.max_hours <= 0 or (self.spot and self.max_wait_hours < self.max_hours):
            raise ConfigError(
                f"max_hours {self.max_hours:g}, max_wait_hours {self.max_wait_hours:g}",
                "give more than 0 hours, and no shorter wait than the run",
            )
        if self.spot and self.keep_alive_minutes:
            raise ConfigError("a warm pool cannot be kept on spot capacity", "leave out --spot or --warm_pool")
        if not 0 <= self.keep_alive_minutes <= 60:
            raise ConfigError(f"a warm pool of {self.keep_alive_minutes} minutes", "give 1 to 60")

    @property
    def checkpoints(self) -> str | None:
        """Folder in S3 with the checkpoints to go on from and to add to; None for a new one, of the job's own."""
        return self.config.output.resume_from_checkpoint

    @property
    def fields(self) -> dict[str, str]:
        """The config's fields that differ from their defaults, as text: options of the trainer."""
        defaults = {option.name: option.default for option in options()}
        given = {
            name: value
            for name, value in flatten(self.config).items()
            if value != defaults[name] and name not in NOT_SENT
        }
        return {
            name: "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in given.items()
        }


@dataclass(frozen=True)
class Estimate:
    """Upper bound of a job's cost, in dollars at list price.

    Attributes:
        hourly: of one instance.
        job: if it runs for ``max_hours``; on spot capacity it costs less, by how much changes from day to day.
        warm_pool: if the kept instances are not used again.
        source: of the price, with its date.
    """

    hourly: float
    job: float
    warm_pool: float
    source: str


def accelerators(instance_type: str) -> int:
    """Ranks that an instance takes: its GPUs, or 1 where it has none.

    Raises:
        ConfigError: it is not in the catalogue.
    """
    return _instance(instance_type).gpus


def estimate(job: Job) -> Estimate:
    """The most that a job can cost."""
    machine = _instance(job.instance_type)
    assert machine.dollars_per_gpu_hour is not None  # every instance has a price
    hourly = machine.dollars_per_gpu_hour * machine.gpus
    return Estimate(
        hourly,
        hourly * job.instance_count * job.max_hours,
        hourly * job.instance_count * job.keep_alive_minutes / 60,
        PRICES,
    )


def _instance(instance_type: str) -> hardware.Cluster:
    cluster = hardware.cluster(instance_type)
    if cluster.instance is None:
        raise ConfigError(
            f"`{instance_type}` is no SageMaker instance",
            "choose from " + ", ".join(name for name in hardware.names() if name.startswith("ml.")),
        )
    return cluster
