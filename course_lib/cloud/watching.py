"""Follows a job that was sent: its log, its end, its model; or rehearses all of that on this machine."""

import json
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_lib.cloud.instance import split
from course_lib.cloud.job import Job
from course_lib.cloud.local_player import LOG_GROUP, playing
from course_lib.cloud.sagemaker import Account, CloudError, model_trainer, send, stage
from course_lib.cloud.stand_in import ROLE
from course_lib.tracking.redact import redact, redacted
from course_lib.writing import write_text


@dataclass(frozen=True)
class Rehearsal:
    """A job that was played on this machine.

    Attributes:
        name: of the job.
        request: as the SDK made it.
        description: SageMaker's, after the end, as moto gives it.
        lines: the log, each line with its instance.
        model: folder of the trained model; None where the job failed.
        failure: why, in one line; empty where it did not fail.
    """

    name: str
    request: Mapping[str, Any]
    description: Mapping[str, Any]
    lines: tuple[str, ...]
    model: Path | None
    failure: str = ""


def rehearse(
    job: Job,
    folder: Path,
    account: Account | None = None,
    *,
    interrupt_at: str | None = None,
    say: Callable[[str], None] = print,
) -> Rehearsal:
    """Send a job to a stand-in of AWS that runs it on this machine; see :mod:`course_lib.cloud.local_player`.

    Args:
        job: what to train.
        folder: gets a folder with the job's name: its request, description, log and model.
        account: whose settings to use; nobody's credentials are asked for.
        interrupt_at: a pattern; a spot job is interrupted once, when a line of its log matches.
        say: is given each line of the log as it comes.
    """
    lines: list[str] = []

    def hear(line: str) -> None:
        lines.append(line)
        say(line)

    with playing(interrupt_at) as player, tempfile.TemporaryDirectory() as beside:
        trainer = model_trainer(
            job, account or Account(ROLE), stage(Path(beside)), boto_session=player.boto_session, install=False
        )
        name = send(job, trainer)
        here, model, failure = folder / name, None, ""
        try:
            follow(name, player.boto_session, say=hear, poll=0.5)
        except CloudError as error:
            failure = str(error)
        description = describe(name, player.boto_session)
        if not failure:
            model = fetch(description, here / "model", player.boto_session)
        keep(here, player.requests[name], description)
        write_text(here / "log.txt", redact("\n".join(lines)) + "\n")
        return Rehearsal(name, player.requests[name], description, tuple(lines), model, failure)


def keep(folder: Path, request: Mapping[str, Any], description: Mapping[str, Any]) -> None:
    """Leave a job's request and description in a folder, as JSON, keys hidden."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("request", request), ("job", description)):
        write_text(folder / f"{name}.json", json.dumps(redacted(content), indent=2, default=str) + "\n")


def describe(name: str, boto_session: Any) -> dict[str, Any]:
    """SageMaker's description of a job."""
    description = boto_session.client("sagemaker").describe_training_job(TrainingJobName=name)
    return {key: value for key, value in description.items() if key != "ResponseMetadata"}


def follow(name: str, boto_session: Any, say: Callable[[str], None] = print, poll: float = 5.0) -> dict[str, Any]:
    """Show the container's log lines as they come, until the job ends.

    Returns:
        SageMaker's description of the finished job.
    Raises:
        CloudError: the job failed, with its failure reason, or was stopped.
    """
    logs = boto_session.client("logs")
    tokens: dict[str, str] = {}
    while True:
        description = describe(name, boto_session)
        ended = description["TrainingJobStatus"] in ("Completed", "Failed", "Stopped")
        for stream in _streams(logs, name):
            for line in _new_lines(logs, stream, tokens):
                say(f"[{stream.split('/')[1].rpartition('-')[0]}] {line}")
        if ended:
            break
        time.sleep(poll)
    if description["TrainingJobStatus"] != "Completed":
        reason = description.get("FailureReason", "no reason")
        raise CloudError(
            f"job {name} {description['TrainingJobStatus'].lower()}: {reason}",
            "mend what it names; its log is in CloudWatch, group /aws/sagemaker/TrainingJobs",
        )
    return description


def fetch(description: Mapping[str, Any], folder: Path, boto_session: Any) -> Path:
    """Bring a finished job's model here and unpack it.

    Args:
        description: what :func:`follow` returned.
        folder: becomes the model's folder, which ``from_pretrained`` loads.
        boto_session: whose S3 client downloads the model.
    """
    bucket, key = split(description["ModelArtifacts"]["S3ModelArtifacts"])
    with tempfile.TemporaryDirectory() as beside:
        archive = Path(beside) / "model.tar.gz"
        boto_session.client("s3").download_file(bucket, key, str(archive))
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
    return folder


def _streams(logs: Any, name: str) -> list[str]:
    try:
        page = logs.describe_log_streams(logGroupName=LOG_GROUP, logStreamNamePrefix=f"{name}/")
    except logs.exceptions.ResourceNotFoundException:
        return []  # an account's first job, before its container has said anything
    return [stream["logStreamName"] for stream in page["logStreams"]]


def _new_lines(logs: Any, stream: str, tokens: dict[str, str]) -> list[str]:
    """What a log stream has got since the last look; ``tokens`` remembers where that was."""
    lines: list[str] = []
    while True:
        after = {"nextToken": tokens[stream]} if stream in tokens else {}
        page = logs.get_log_events(logGroupName=LOG_GROUP, logStreamName=stream, startFromHead=True, **after)
        lines += [event["message"] for event in page["events"]]
        tokens[stream] = page["nextForwardToken"]
        if not page["events"]:
            return lines
