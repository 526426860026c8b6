"""Plays SageMaker on this machine: takes the SDK's real request and runs it with the SDK's own container drivers.

moto stands in for AWS's services within this process. What the request names is fetched from its S3 into a folder an
instance, laid out like ``/opt/ml``; there the container's command is run, its log goes to moto's CloudWatch, and what
it leaves goes back to S3. Instead of a container image it is this Python environment, and instead of two machines two
process trees that meet over the loopback interface.

A spot interruption is SIGTERM to torchrun, which passes it on to the ranks. On SageMaker the signal reaches the
container's first process, which with these drivers is a bash that passes nothing on: only checkpoints that were due
before it are sure there.
"""

import contextlib
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from course_lib.cloud.instance import Instance, packed, put, upload
from course_lib.cloud.stand_in import ACCOUNT, REGION, stand_in
from course_lib.launching.launch_environment import reserved_port

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
GRACE_SECONDS = 120
"""Between SIGTERM and SIGKILL, as SageMaker has it."""
ALONE_SECONDS = 20
"""For the other instances to end by themselves, after one has failed."""


@dataclass
class Player:
    """Runs every training job that is created with its session.

    Attributes:
        boto_session: to hand to the SDK.
        interrupt_at: a pattern; a spot job is interrupted once, when a line of its log matches.
        requests: the jobs' requests, as the SDK made them, by job name.
    """

    boto_session: Any
    interrupt_at: str | None = None
    requests: dict[str, dict[str, Any]] = field(default_factory=dict)
    threads: list[threading.Thread] = field(default_factory=list)
    instances: list["Instance"] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.boto_session.events.register("provide-client-params.sagemaker.CreateTrainingJob", self._taken)
        self.boto_session.events.register("after-call.sagemaker.CreateTrainingJob", self._created)

    def _taken(self, params: dict[str, Any], **_: Any) -> None:
        self.requests[params["TrainingJobName"]] = params

    def _created(self, **_: Any) -> None:
        """Play the newest job in a thread, so that whoever created it can follow it."""
        from moto.sagemaker.models import sagemaker_backends

        name, request = list(self.requests.items())[-1]
        described = sagemaker_backends[ACCOUNT][REGION].training_jobs[name]
        described.training_job_status, described.secondary_status = "InProgress", "Starting"
        described.final_metric_data_list, described.secondary_status_transitions = [], []
        described.algorithm_specification["MetricDefinitions"] = request["AlgorithmSpecification"].get(
            "MetricDefinitions", []
        )
        thread = threading.Thread(target=_Play(self, request, described).run, daemon=True)
        self.threads.append(thread)
        thread.start()

    def close(self) -> None:
        """End whatever still runs."""
        for instance in self.instances:
            instance.kill()
        for thread in self.threads:
            thread.join()


@contextlib.contextmanager
def playing(interrupt_at: str | None = None) -> Iterator[Player]:
    """A player, whose session takes jobs while the block runs."""
    with stand_in() as boto_session:
        player = Player(boto_session, interrupt_at)
        try:
            yield player
        finally:
            player.close()


class _Play:
    """One job from its start to its end, in a thread."""

    def __init__(self, player: Player, request: dict[str, Any], described: Any):
        self.player, self.request, self.described = player, request, described
        self.name: str = request["TrainingJobName"]
        self.s3, self.logs = player.boto_session.client("s3"), player.boto_session.client("logs")
        self.lines: list[str] = []
        self.seconds = 0.0
        self.interrupt_at = player.interrupt_at if request.get("EnableManagedSpotTraining") else None

    def run(self) -> None:
        described, started = self.described, datetime.now(UTC)
        described.training_start_time = started
        try:
            with tempfile.TemporaryDirectory(prefix="sagemaker-") as folder, reserved_port() as port:
                status, reason = self.play(Path(folder), port)
        except Exception as error:  # a thread has nobody to raise to; the job says it
            status, reason = "Failed", f"InternalServerError: the local player: {type(error).__name__}: {error}"
        described.final_metric_data_list = self.metrics()
        described.training_end_time = datetime.now(UTC)
        described.training_time_in_seconds = round((described.training_end_time - started).total_seconds())
        described.billable_time_in_seconds = round(self.seconds)
        if reason:
            described.failure_reason = reason
        described.secondary_status = status
        described.training_job_status = status  # the last, since whoever waits reads it first

    def play(self, folder: Path, port: int) -> tuple[str, str]:
        """Run the job, whose instances meet at a port, again after an interruption; its status, and why it failed."""
        count = self.request["ResourceConfig"]["InstanceCount"]
        instances = [Instance(folder / f"algo-{number + 1}", number, count, port) for number in range(count)]
        self.player.instances += instances
        while True:
            self.goes_into("Downloading")
            for instance in instances:
                instance.lay_out(self.request, self.s3)
            self.goes_into("Training")
            began = time.monotonic()
            interrupted = self.run_once(instances, folder)
            self.seconds += time.monotonic() - began
            self.goes_into("Uploading")
            if "CheckpointConfig" in self.request:
                for instance in instances:
                    upload(self.s3, instance.root / "checkpoints", self.request["CheckpointConfig"]["S3Uri"])
            if not interrupted:
                break
            self.goes_into("Interrupted")
        place = f"{self.request['OutputDataConfig']['S3OutputPath'].rstrip('/')}/{self.name}/output"
        for source, archive in (("model", "model.tar.gz"), ("output/data", "output.tar.gz")):
            put(self.s3, f"{place}/{archive}", packed([instance.root / source for instance in instances]))
        codes = [instance.process.returncode for instance in instances if instance.process]
        if not any(codes):
            return "Completed", ""
        files = [file for instance in instances if (file := instance.root / "output" / "failure").exists()]
        told = [file.read_text() for file in sorted(files, key=lambda file: file.stat().st_mtime)]  # the cause first
        code = next(filter(None, codes))
        return "Failed", f"AlgorithmError: {told[0] if told else 'no reason given'}, exit code: {code}"

    def run_once(self, instances: list[Instance], folder: Path) -> bool:
        """Start every instance and pass on what it prints until all have ended; whether they were interrupted."""
        at = datetime.now(UTC).strftime("%s")
        files = []
        for instance in instances:
            log = folder / f"algo-{instance.number + 1}.log"
            instance.start(self.request, log)
            files.append((f"{self.name}/algo-{instance.number + 1}-{at}", log.open(errors="replace")))
        for stream, _ in files:
            self.open_stream(stream)
        interrupted = False
        kill_at = float("inf")
        while True:
            over = all(instance.ended() for instance in instances)
            for stream, file in files:
                for line in self.passed_on(stream, file):
                    if self.interrupt_at and re.search(self.interrupt_at, line):
                        self.interrupt_at, interrupted, kill_at = None, True, time.monotonic() + GRACE_SECONDS
                        for instance in instances:
                            instance.interrupt()
            if over:
                break
            if any(instance.failed() for instance in instances):
                kill_at = min(kill_at, time.monotonic() + ALONE_SECONDS)
            if time.monotonic() > kill_at:
                for instance in instances:
                    instance.kill()
            time.sleep(0.1)
        for _, file in files:
            file.close()
        return interrupted and any(instance.failed() for instance in instances)

    def open_stream(self, stream: str) -> None:
        with contextlib.suppress(self.logs.exceptions.ResourceAlreadyExistsException):
            self.logs.create_log_group(logGroupName=LOG_GROUP)
        self.logs.create_log_stream(logGroupName=LOG_GROUP, logStreamName=stream)

    def passed_on(self, stream: str, file: Any) -> list[str]:
        """The whole lines that a log file has got since the last look; they go to CloudWatch too."""
        lines = []
        while True:
            place = file.tell()
            line = file.readline()
            if not line.endswith("\n"):
                file.seek(place)
                break
            lines.append(re.split(r"\r", line.rstrip("\n"))[-1])
        if lines:
            now = int(time.time() * 1000)
            self.logs.put_log_events(
                logGroupName=LOG_GROUP,
                logStreamName=stream,
                logEvents=[{"timestamp": now, "message": line or " "} for line in lines],
            )
            self.lines += lines
        return lines

    def goes_into(self, status: str) -> None:
        now = datetime.now(UTC)
        self.described.secondary_status = status
        self.described.secondary_status_transitions.append({"Status": status, "StartTime": now})

    def metrics(self) -> list[dict[str, Any]]:
        """The last value of each metric that the request defines, read from the log by its regular expression."""
        last = []
        for metric in self.request["AlgorithmSpecification"].get("MetricDefinitions", ()):
            values = [match[1] for line in self.lines if (match := re.search(metric["Regex"], line))]
            if values:
                last.append({"MetricName": metric["Name"], "Value": float(values[-1]), "Timestamp": datetime.now(UTC)})
        return last
