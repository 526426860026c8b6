"""Builds, shows and sends a SageMaker training job, through version 3 of AWS's own SDK."""

import contextlib
import importlib.metadata
import logging
import re
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from course_lib.cloud.container import CHANNELS
from course_lib.cloud.job import Job
from course_lib.errors import CourseError
from course_lib.missing_extra import COURSE
from course_lib.tracking.redact import is_secret, redact

if TYPE_CHECKING:
    from sagemaker.train import ModelTrainer

ROOT = Path(__file__).resolve().parents[2]
ENTRY = "course_lib/cli.py"
REQUIREMENTS = "requirements.txt"
CHECKPOINTS = "/opt/ml/checkpoints"
NO_TELEMETRY = {"SchemaVersion": "1.0", "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}}}
"""The SDK reports each call to AWS unless its configuration says so."""
METRICS = {
    "train:loss": "loss",
    "train:learning_rate": "learning_rate",
    "train:gradient_norm": "gradient_norm",
    "train:samples_per_second": "samples_per_second",
    "eval:loss": "eval.loss",
    "eval:accuracy": "eval.accuracy",
    "eval:macro_f1": "eval.macro_f1",
    "eval:perplexity": "eval.perplexity",
}
"""Name of a metric in SageMaker, and of the number in the trainer's printed lines that it is read from."""
ON_THE_JOB = ("train", "tracking")
"""Extras of the course that a training needs, beside its base."""


class CloudError(CourseError):
    """A job that could not be sent, or that did not end well."""


def metric_definitions() -> dict[str, str]:
    """Regular expression by metric name; each reads one number of a line that ``container.metric_line`` made."""
    return {name: rf"metrics:.* {re.escape(field)}=([0-9.eE+-]+|nan|inf)" for name, field in METRICS.items()}


@dataclass(frozen=True)
class Account:
    """Account and region that a job is sent to, and its role.

    Attributes:
        role: ARN of the role that the job takes.
        region: AWS's name of it.
        bucket: for code, data, checkpoints and output; default: the SDK's own for the account.
        image: the container's image; default: AWS's PyTorch image for the instance.
        tags: put on the job, for whoever reads the bill.
        environment: variables of the container. Whoever may describe the job can read them.
    """

    role: str
    region: str = "us-east-1"
    bucket: str | None = None
    image: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"arn:aws[a-z-]*:iam::\d{12}:role/.+", self.role):
            raise CloudError(
                f"role `{self.role}` is no ARN of a role",
                "give --role arn:aws:iam::ACCOUNT:role/NAME, one that SageMaker may take",
            )
        if self.bucket and not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", self.bucket):
            raise CloudError(
                f"bucket `{self.bucket}` is no name of one",
                "give 3 to 63 small letters, digits, points and hyphens, without s3://",
            )
        for name, value in self.tags.items():
            if (
                re.search(r"[^\w\s.:/=+@-]", name + value)
                or not 0 < len(name) <= 128
                or len(value) > 256
                or (name.lower().startswith("aws:"))
            ):
                raise CloudError(
                    f"AWS takes no tag {name}={value}",
                    "use letters, digits, spaces and _.:/=+-@, at "
                    "most 128 before the = and 256 after it, and no name that begins with aws:",
                )
        for name, value in self.environment.items():
            if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]{0,511}", name) or len(value) > 512:
                raise CloudError(
                    f"SageMaker takes no environment variable {name} of {len(value)} characters",
                    "use letters, digits and _ in its name, and up to 512 characters",
                )
            if is_secret(name):
                raise CloudError(
                    f"environment variable {name} would be readable to anyone who may describe the job",
                    "keep keys in AWS Secrets Manager, and let the role read them",
                )


def hyperparameters(job: Job) -> dict[str, str]:
    """Options that the drivers hand to the entry script: the config's fields that differ from their defaults.

    Raises:
        CloudError: a value that the drivers cannot carry.
    """
    fields = {name: value for name, value in job.fields.items() if name != "output_dir"} | {"progress_bar": "false"}
    for name in inputs(job):
        fields.pop(name)
    for name, value in fields.items():
        if "'" in value:  # the drivers write it between single quotes into a file that bash reads
            raise CloudError(f"{name} {value} cannot travel as a hyperparameter", "leave out the apostrophe")
    return fields


def inputs(job: Job) -> dict[str, str]:
    """Source by channel: data and model where they lie in a folder here or in S3, not on the Hub."""
    sources = {name: str(job.config[name]) for name in CHANNELS}
    return {name: source for name, source in sources.items() if source.startswith("s3://") or Path(source).exists()}


def stage(folder: Path) -> Path:
    """Pack the code of a job into an archive in a folder: the package, and the list of what pip installs for it."""
    wanted = []
    for line in importlib.metadata.requires(COURSE) or ():
        of_extra = re.search(r'(?:;| and) extra == "(\w+)"$', line)
        if of_extra is None or of_extra[1] in ON_THE_JOB:
            wanted.append(line[: of_extra.start()] if of_extra else line)
    requirements = folder / REQUIREMENTS
    requirements.write_text("\n".join(wanted) + "\n", encoding="utf-8")
    archive = folder / "code.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(
            ROOT / "course_lib", "course_lib", filter=lambda entry: None if "__pycache__" in entry.name else entry
        )
        installed = (Path(file.locate()) for file in importlib.metadata.files(COURSE) or () if file.name == "LICENSE")
        packed.add(next(path for path in (ROOT / "LICENSE", *installed) if path.exists()), "LICENSE")
        packed.add(requirements, REQUIREMENTS)
    return archive


def model_trainer(
    job: Job, account: Account, source: Path, *, boto_session: Any = None, install: bool = True
) -> "ModelTrainer":
    """The SDK's ModelTrainer for a job; ``.train()`` sends it.

    Args:
        job: what to train, on what.
        account: where to, and as whom.
        source: archive that :func:`stage` packed.
        boto_session: to talk to AWS with; default: of the region, with this machine's credentials.
        install: let the container install the requirements; not where this environment stands in for it.
    Raises:
        CloudError: the SDK is not installed, or there is no image for the instance.
    """
    sdk = _sdk()
    if job.checkpoints and not job.checkpoints.startswith("s3://"):
        raise CloudError(
            f"resume_from_checkpoint {job.checkpoints} is on this machine",
            "give the s3:// folder of the job's checkpoints, which its description names",
        )
    session = sdk.Session(
        boto_session or sdk.boto3.Session(region_name=account.region),
        default_bucket=account.bucket,
        sagemaker_config=NO_TELEMETRY,
    )
    place = f"s3://{session.default_bucket()}/{job.name}"
    stopping = {"max_runtime_in_seconds": round(job.max_hours * 3600)}
    if job.spot:
        stopping["max_wait_time_in_seconds"] = round(job.max_wait_hours * 3600)
    configs = sdk.configs
    trainer = sdk.ModelTrainer(
        sagemaker_session=session,
        role=account.role,
        base_job_name=job.name,
        training_image=account.image or default_image(job, account.region),
        source_code=configs.SourceCode(
            source_dir=str(source), entry_script=ENTRY, requirements=REQUIREMENTS if install else None
        ),
        distributed=sdk.Torchrun(process_count_per_node=job.processes),
        compute=configs.Compute(
            instance_type=job.instance_type,
            instance_count=job.instance_count,
            enable_managed_spot_training=job.spot or None,
            keep_alive_period_in_seconds=job.keep_alive_minutes * 60 or None,
        ),
        stopping_condition=configs.StoppingCondition(**stopping),
        output_data_config=configs.OutputDataConfig(s3_output_path=f"{place}/output"),
        checkpoint_config=configs.CheckpointConfig(s3_uri=job.checkpoints, local_path=CHECKPOINTS),
        hyperparameters=hyperparameters(job),
        environment=dict(account.environment),
        tags=[configs.Tag(key=key, value=value) for key, value in account.tags.items()] or None,
    )
    return trainer.with_metric_definitions(
        [configs.MetricDefinition(name=name, regex=regex) for name, regex in metric_definitions().items()]
    )


def default_image(job: Job, region: str) -> str:
    """AWS's newest PyTorch training image that the SDK knows, for the instance."""
    from sagemaker.core import image_uris

    known = image_uris.config_for_framework("pytorch")["training"]["versions"]
    version = max(known, key=lambda text: tuple(map(int, text.split("."))))
    return image_uris.retrieve(
        "pytorch",
        region,
        version=version,
        py_version=known[version]["py_versions"][-1],
        instance_type=job.instance_type,
        image_scope="training",
    )


def credentials(region: str) -> Any:
    """A boto3 session of the region with this machine's credentials.

    Raises:
        CloudError: there are none.
    """
    boto_session = _sdk().boto3.Session(region_name=region)
    if boto_session.get_credentials() is None:
        raise CloudError("no AWS credentials were found", "run `aws configure`, or rehearse with --local or --dry_run")
    return boto_session


@contextlib.contextmanager
def told() -> Iterator[None]:
    """One line for whatever AWS or its client refuses."""
    sdk = _sdk()
    try:
        yield
    except (sdk.exceptions.BotoCoreError, sdk.exceptions.ClientError, sdk.RoleValidationError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CloudError(
            f"AWS cannot be used: {redact(reason)}", "look at the credentials, the role, the region and the network"
        ) from None


def send(job: Job, trainer: "ModelTrainer") -> str:
    """Upload code and data, create the job, and return its name."""
    channels = [_sdk().configs.InputData(channel_name=name, data_source=source) for name, source in inputs(job).items()]
    trainer.train(input_data_config=channels, wait=False, logs=False)
    return trainer._latest_training_job.training_job_name


def request(job: Job, account: Account) -> dict[str, Any]:
    """The exact CreateTrainingJob request that the SDK would send for a job, with nothing sent.

    Without ``account.bucket`` its account number is moto's.
    """

    def submit(session: Any, folder: Path) -> None:
        send(job, model_trainer(job, account, stage(folder), boto_session=session.boto_session))

    return caught(submit, account.region)


def caught(submit: Callable[[Any, Path], Any], region: str = "us-east-1") -> dict[str, Any]:
    """The CreateTrainingJob request of whatever a function submits; moto stands in for AWS within this process.

    Args:
        submit: called with a session of the SDK, and an empty folder for what it uploads.
        region: AWS's name of it.
    """
    from course_lib.cloud.stand_in import stand_in

    with tempfile.TemporaryDirectory() as folder, stand_in(region) as boto_session:
        requests: list[dict[str, Any]] = []
        boto_session.events.register(
            "provide-client-params.sagemaker.CreateTrainingJob", lambda params, **_: requests.append(params)
        )
        submit(_sdk().Session(boto_session, sagemaker_config=NO_TELEMETRY), Path(folder))
    return requests[0]


def estimator_v2(job: Job, account: Account, source: Path) -> dict[str, Any]:
    """The arguments of version 2's ``sagemaker.huggingface.HuggingFace``, for the same job.

    Version 2 ended with 2.257 and cannot share an environment with version 3.

    Args:
        job: what to train, on what.
        account: where to, and as whom.
        source: folder into which the archive of :func:`stage` was unpacked: version 2 packs all that it finds there.
    """
    arguments: dict[str, Any] = {
        "entry_point": ENTRY,
        "source_dir": str(source),
        "role": account.role,
        "instance_type": job.instance_type,
        "instance_count": job.instance_count,
        "image_uri": account.image or default_image(job, account.region),
        "py_version": None,  # the image's
        "distribution": {"torch_distributed": {"enabled": True}},
        "hyperparameters": hyperparameters(job),
        "metric_definitions": [{"Name": name, "Regex": regex} for name, regex in metric_definitions().items()],
        "max_run": round(job.max_hours * 3600),
        "base_job_name": job.name,
        "checkpoint_local_path": CHECKPOINTS,
        "environment": dict(account.environment),
        "tags": [{"Key": key, "Value": value} for key, value in account.tags.items()],
    }
    if account.bucket:
        place = f"s3://{account.bucket}/{job.name}"
        arguments |= {"output_path": f"{place}/output", "checkpoint_s3_uri": job.checkpoints or f"{place}/checkpoints"}
    if job.spot:
        arguments |= {"use_spot_instances": True, "max_wait": round(job.max_wait_hours * 3600)}
    if job.keep_alive_minutes:
        arguments["keep_alive_period_in_seconds"] = job.keep_alive_minutes * 60
    return arguments


@dataclass(frozen=True)
class _Sdk:
    """The parts of the SDK that are used here."""

    boto3: Any
    exceptions: Any
    RoleValidationError: Any
    Session: Any
    ModelTrainer: Any
    Torchrun: Any
    configs: Any


def _sdk() -> _Sdk:
    """The SDK, imported when it is needed: that takes seconds."""
    try:
        import boto3
        from botocore import exceptions
        from sagemaker.core.helper.iam_role_resolver import RoleValidationError
        from sagemaker.core.helper.session_helper import Session
        from sagemaker.core.training import configs
        from sagemaker.train import ModelTrainer
        from sagemaker.train.distributed import Torchrun
    except ModuleNotFoundError as error:
        raise CloudError(
            f"the SageMaker SDK is not installed ({error.name} is missing)",
            f"{Path(sys.executable).name} -m pip install -c constraints.txt -e .[sagemaker]",
        ) from None
    for name in ("sagemaker", "sagemaker.core", "sagemaker.train", "botocore"):
        logging.getLogger(name).setLevel(logging.WARNING)  # the request is shown whole, and logs are followed here
    return _Sdk(boto3, exceptions, RoleValidationError, Session, ModelTrainer, Torchrun, configs)
