"""``course submit``: a run as a job on SageMaker, rehearsed here, or as a script for another launcher."""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from course_lib.commands.options import add_config_options, config_from
from course_lib.errors import ConfigError

if TYPE_CHECKING:  # what --help need not load
    from course_lib.cloud.job import Job
    from course_lib.cloud.sagemaker import Account

NAME = "submit"
HELP = "send a run to SageMaker, rehearse that here (--local), or write a script for Slurm, torchrun or Accelerate"
ASK_ABOVE = 10.0
"""Dollars that a job may cost at most without a question."""
TARGETS = ("sagemaker", "slurm", "torchrun", "accelerate")


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    _add_job(parser.add_argument_group("the job"))
    _add_account(parser.add_argument_group("the AWS account"))
    _add_how(parser.add_argument_group("how"))
    add_config_options(parser)


def _add_job(job: "argparse._ArgumentGroup") -> None:
    """Add the launcher, the machines, and for how long they are rented."""
    job.add_argument("--to", choices=TARGETS, default="sagemaker", help="launcher [sagemaker]")
    job.add_argument(
        "--instance_type",
        metavar="ML.NAME",
        help="SageMaker's name of the machine: ml.p4d.24xlarge, "
        "ml.g5.xlarge ...; sagemaker rents by it, others take --processes_per_instance too",
    )
    job.add_argument("--instance_count", type=int, default=1, metavar="N", help="machines [1]")
    job.add_argument("--processes_per_instance", type=int, metavar="N", help="ranks on each [one per GPU]")
    job.add_argument(
        "--max_hours",
        type=float,
        default=2.0,
        metavar="HOURS",
        help="stop the job after these; what it has saved by then it can go on from [2]",
    )
    job.add_argument("--spot", action="store_true", help="use spare capacity: cheaper, can be taken away")
    job.add_argument(
        "--max_wait_hours",
        type=float,
        metavar="HOURS",
        help="with --spot, until the end, waits included [twice max_hours]",
    )
    job.add_argument(
        "--warm_pool",
        type=int,
        nargs="?",
        const=15,
        default=0,
        metavar="MINUTES",
        help="keep the machines so long after the job for the next one, and pay for them [15]",
    )
    job.add_argument("--job_name", default="course", metavar="NAME", help="the job's name begins with it [course]")


def _add_account(account: "argparse._ArgumentGroup") -> None:
    """Add what a job is sent with and to."""
    account.add_argument("--role", metavar="ARN", help="role that the job takes; needed to send it")
    account.add_argument("--region", default="us-east-1", help="[us-east-1]")
    account.add_argument("--bucket", help="for code, data, checkpoints and models [the SDK's own]")
    account.add_argument("--image_uri", metavar="URI", help="container image [AWS's newest for PyTorch]")
    account.add_argument("--tag", action="append", default=[], metavar="NAME=VALUE", help="put on the job; repeatable")
    account.add_argument(
        "--environment",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="variable of the container, readable to all who may see the job; repeatable",
    )


def _add_how(how: "argparse._ArgumentGroup") -> None:
    """Add whether the job is sent, shown, or rehearsed here."""
    how.add_argument("--dry_run", action="store_true", help="print the exact request or script, and send nothing")
    how.add_argument(
        "--yes",
        action="store_true",
        help=f"send it without a question, also where it can cost more than ${ASK_ABOVE:g}",
    )
    how.add_argument("--local", action="store_true", help="run the request here, with SageMaker's own drivers")
    how.add_argument(
        "--local_dir",
        type=Path,
        default=Path("runs/sagemaker"),
        metavar="DIR",
        help="where a job's request, description and model are put [runs/sagemaker]",
    )


def run(args: argparse.Namespace) -> int:
    """Say what it costs; then print, rehearse or send it."""
    from course_lib.cloud.job import Job, accelerators, estimate
    from course_lib.cloud.launchers import LAUNCHERS

    max_wait = args.max_wait_hours if args.max_wait_hours is not None else 2 * args.max_hours
    kind, processes = args.instance_type or "", args.processes_per_instance
    if not kind and (args.to == "sagemaker" or processes is None):
        raise ConfigError(
            f"--to {args.to} without --instance_type",
            "name the machine, as ml.g5.xlarge"
            if args.to == "sagemaker"
            else "say how many ranks each machine has: --processes_per_instance 8",
        )
    job = Job(
        config_from(args),
        kind,
        args.instance_count,
        accelerators(kind) if processes is None else processes,
        args.max_hours,
        args.spot,
        max_wait,
        args.warm_pool,
        args.job_name,
    )
    if args.to != "sagemaker":
        return _script(args, job, *LAUNCHERS[args.to])
    cost = estimate(job)
    if not args.local:
        print(_cost(job, cost), file=sys.stderr, flush=True)
    if args.dry_run:
        from course_lib.cloud import sagemaker
        from course_lib.tracking.redact import redacted

        print(json.dumps(redacted(sagemaker.request(job, _account(args, rehearsal=True))), indent=2))
        return 0
    if args.local:
        return _local(args, job)
    _ask(args, cost.job + cost.warm_pool)
    return _send(args, job)


def _script(args: argparse.Namespace, job: "Job", file: str, write: Any) -> int:
    """Print or write a launcher's script."""
    from course_lib.writing import write_text

    if args.local:
        raise ConfigError(f"--local rehearses SageMaker, not {args.to}", "leave it out")
    if args.dry_run:
        print(write(job), end="")
        return 0
    args.local_dir.mkdir(parents=True, exist_ok=True)
    write_text(args.local_dir / file, write(job))
    print(f"written: {args.local_dir / file}; nothing was started")
    return 0


def _cost(job: "Job", cost: Any) -> str:
    spot = "; on spot capacity less, by how much changes from day to day" if job.spot else ""
    pool = f", and ${cost.warm_pool:,.2f} for the warm pool" if job.keep_alive_minutes else ""
    return (
        f"cost: {job.instance_count} × {job.instance_type} at ${cost.hourly:,.2f} an hour, at most "
        f"${cost.job:,.2f} for {job.max_hours:g} hours{pool}{spot} ({cost.source})"
    )


def _ask(args: argparse.Namespace, dollars: float) -> None:
    """Have a job that can cost more than ASK_ABOVE confirmed.

    Raises:
        ConfigError: nobody is there to ask, or the answer is not yes.
    """
    if args.yes or dollars <= ASK_ABOVE:
        return
    what = f"the job can cost ${dollars:,.2f}, and more than ${ASK_ABOVE:g} needs a yes"
    if not sys.stdin.isatty():
        raise ConfigError(what, "add --yes, or lower --max_hours", cure={"yes": ""})
    print(f"course: {what}. Send it? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ConfigError("not sent", "lower --max_hours, or answer yes")


def _account(args: argparse.Namespace, rehearsal: bool) -> "Account":
    from course_lib.cloud.sagemaker import Account
    from course_lib.cloud.stand_in import ROLE

    role = args.role or (ROLE if rehearsal else "")
    return Account(
        role,
        args.region,
        args.bucket,
        args.image_uri,
        _pairs("--tag", args.tag),
        _pairs("--environment", args.environment),
    )


def _pairs(option: str, given: list[str]) -> dict[str, str]:
    """``NAME=VALUE`` options as a mapping."""
    for pair in given:
        if not pair.partition("=")[0] or "=" not in pair:
            raise ConfigError(f"{option} {pair}", f"write {option} NAME=VALUE")
    return {name: value for name, _, value in (pair.partition("=") for pair in given)}


def _send(args: argparse.Namespace, job: "Job") -> int:
    """Send the job to AWS, follow it, and bring the model here."""
    from course_lib.cloud import sagemaker, watching

    account = _account(args, rehearsal=False)
    boto_session = sagemaker.credentials(account.region)
    with sagemaker.told(), tempfile.TemporaryDirectory() as beside:
        archive = sagemaker.stage(Path(beside))
        name = sagemaker.send(job, sagemaker.model_trainer(job, account, archive, boto_session=boto_session))
        print(f"job: {name}", flush=True)
        description = watching.follow(name, boto_session, poll=10.0)
        _say(description, watching.fetch(description, args.local_dir / name / "model", boto_session))
    return 0


def _local(args: argparse.Namespace, job: "Job") -> int:
    """Rehearse the job here, and leave what it left."""
    from course_lib.cloud import sagemaker, watching

    print(
        f"local: {job.instance_count} × {job.instance_type} as {job.processes} process(es) each on this machine; "
        "nothing is sent, nothing is paid",
        flush=True,
    )
    done = watching.rehearse(
        job, args.local_dir, _account(args, rehearsal=True), say=lambda line: print(line, flush=True)
    )
    if done.model is None:
        raise sagemaker.CloudError(done.failure)
    _say(done.description, done.model)
    return 0


def _say(description: Mapping[str, Any], model: Path) -> None:
    for metric in description.get("FinalMetricDataList", ()):
        print(f"{metric['MetricName']}: {metric['Value']:.6g}")
    seconds = description.get("BillableTimeInSeconds", 0)
    print(f"completed, {seconds} s to pay for; model: {model}", flush=True)
