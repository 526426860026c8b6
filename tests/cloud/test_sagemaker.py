"""The request that the SDK makes of a job, its cost, and what is refused; and what the container makes of it."""

import io
import json
import os
import re
import shlex
import shutil
import socket
import sys
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest

from course_lib import cli
from course_lib.cloud import container, sagemaker
from course_lib.cloud.job import Job, accelerators, estimate
from course_lib.cloud.sagemaker import Account, CloudError
from course_lib.cloud.stand_in import ROLE
from course_lib.commands import submit
from course_lib.config import build
from course_lib.config.files import load
from course_lib.errors import ConfigError
from course_lib.training import run as runs
from course_lib.training.checkpoints import checkpoint, manifest
from tests.forked_process import run_course

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def job(instance_type="ml.p4d.24xlarge", instance_count=2, processes=8, config=None, **rest):
    config = config or build({"model": "tiny-bert", "max_steps": 4})
    return Job(config, instance_type, instance_count, processes, **rest)


def request_of(chosen, **account):
    """The captured request of a job; sockets are forbidden while it is made."""
    refuse = mock.Mock(side_effect=AssertionError("the dry run opened a connection"))
    with mock.patch.object(socket.socket, "connect", refuse), mock.patch.object(socket, "getaddrinfo", refuse):
        return sagemaker.request(chosen, Account(ROLE, **account))


@pytest.fixture(scope="module")
def spot(tmp_path_factory):
    rows = tmp_path_factory.mktemp("rows") / "train.csv"
    rows.write_text("text,label\nfine,good\nawful,bad\n")
    place = {"dataset": str(rows), "resume_from_checkpoint": "s3://mine/checkpoints"}
    config = build({"model": "tiny-bert", "max_steps": 4, "num_processes": 16} | place)
    chosen = job(config=config, max_hours=3, spot=True, max_wait_hours=5, name="tweets")
    return request_of(chosen, bucket="mine", tags={"team": "nlp"}, environment={"NCCL_DEBUG": "INFO"})


def test_machines_time_spot_tags_environment_role_and_image(spot):
    assert spot["ResourceConfig"] == {"InstanceType": "ml.p4d.24xlarge", "InstanceCount": 2, "VolumeSizeInGB": 30}
    assert spot["EnableManagedSpotTraining"] is True
    assert spot["StoppingCondition"] == {"MaxRuntimeInSeconds": 3 * 3600, "MaxWaitTimeInSeconds": 5 * 3600}
    assert spot["Tags"] == [{"Key": "team", "Value": "nlp"}] and spot["Environment"] == {"NCCL_DEBUG": "INFO"}
    assert spot["RoleArn"] == ROLE and re.fullmatch(r"tweets-\d+", spot["TrainingJobName"])
    image = r"\d{12}\.dkr\.ecr\.us-east-1\.amazonaws\.com/pytorch-training:[\d.]+-gpu-py\d+.*"
    assert re.fullmatch(image, spot["AlgorithmSpecification"]["TrainingImage"])


def test_places_and_options_of_the_trainer(spot):
    assert spot["CheckpointConfig"] == {"S3Uri": "s3://mine/checkpoints", "LocalPath": "/opt/ml/checkpoints"}
    assert spot["OutputDataConfig"]["S3OutputPath"] == "s3://mine/tweets/output"
    uris = {each["ChannelName"]: each["DataSource"]["S3DataSource"]["S3Uri"] for each in spot["InputDataConfig"]}
    assert uris.keys() == {"dataset", "code", "sm_drivers"}
    assert [uri for uri in uris.values() if not uri.startswith("s3://mine/tweets/")] == []
    assert spot["HyperParameters"] == {"model": "tiny-bert", "max_steps": "4", "progress_bar": "false"}
    assert load([], spot["HyperParameters"]).run.max_steps == 4


def test_every_field_survives_the_way_through_the_drivers():
    words = {"model": "tiny-gpt2", "task": "causal_lm", "run_name": "7", "tracker": "jsonl,wandb"}
    numbers = {"learning_rate": 3e-4, "eval_steps": 0, "split_spec": None, "save_total_limit": None}
    config = build(words | numbers | {"group_by_length": False})
    through = {}
    for name, text in sagemaker.hyperparameters(job(config=config, instance_count=1)).items():
        try:  # as container_drivers/common/utils.py does it
            read = json.loads(text)
        except json.JSONDecodeError:
            read = text
        through[name] = read if isinstance(read, str) else json.dumps(read)
    assert load([], through).replace(progress_bar=True) == config


def test_a_warm_pool_and_a_new_folder_for_checkpoints():
    request = request_of(job("ml.g5.xlarge", 1, 1, keep_alive_minutes=15), region="eu-west-1")
    assert ".dkr.ecr.eu-west-1.amazonaws.com/" in request["AlgorithmSpecification"]["TrainingImage"]
    assert request["ResourceConfig"]["KeepAlivePeriodInSeconds"] == 900
    assert request["CheckpointConfig"]["S3Uri"].endswith(f"/{request['TrainingJobName']}/checkpoints")
    assert "EnableManagedSpotTraining" not in request


def test_the_code_that_is_sent_is_the_package_and_its_requirements(tmp_path):
    with tarfile.open(sagemaker.stage(tmp_path)) as archive:
        packed = archive.getnames()
        wanted = archive.extractfile("requirements.txt").read().decode()
    names = set(re.findall(r"^[a-z0-9-]+", wanted.lower(), re.MULTILINE))
    assert {"torch", "transformers", "accelerate", "deepspeed", "wandb"} <= names
    assert names & {"jupyter", "matplotlib", "nbgrader", "sagemaker-train", "pytest"} == set()
    assert "extra" not in wanted and not any("__pycache__" in name for name in packed)
    assert {name.split("/")[0] for name in packed} == {"LICENSE", "course_lib", "requirements.txt"}
    assert {"course_lib/cli.py", "course_lib/planning/catalogue/hardware.yaml"} <= set(packed)


def test_a_course_without_a_checkout_sends_the_licence_that_was_installed_with_it(tmp_path, monkeypatch):
    (tmp_path / "site-packages/course_lib").mkdir(parents=True)
    monkeypatch.setattr(sagemaker, "ROOT", tmp_path / "site-packages")
    with tarfile.open(sagemaker.stage(tmp_path)) as archive:
        assert b"Apache License" in archive.extractfile("LICENSE").read()


def test_metric_definitions_read_what_the_trainer_logs(tmp_path):
    printed = []
    sizes = {"max_train_samples": 32, "max_eval_samples": 16, "max_steps": 2, "max_length": 16, "batch_size": 8}
    quiet = {"logging_steps": 1, "baselines": False, "progress_bar": False, "tracker": "none"}
    where = {"training_type": "basic", "device": "cpu", "output_dir": str(tmp_path / "run")}
    config = build({"model": "tiny-bert"} | sizes | quiet | where)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SM_MODEL_DIR", str(tmp_path / "ml" / "model"))
        patch.setattr("builtins.print", lambda *parts, **_: printed.append(" ".join(map(str, parts))))
        runs.train(config, container.metric_lines())
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    values = {
        name: [float(match[1]) for line in printed if (match := re.search(regex, line))]
        for name, regex in sagemaker.metric_definitions().items()
    }
    for name, field in sagemaker.METRICS.items():
        assert values[name] == pytest.approx([line[field] for line in logged if field in line], rel=1e-5), name
    assert len(values["train:loss"]) == 2 and len(values["eval:macro_f1"]) == 1
    assert values["train:loss"][-1] != values["eval:loss"][-1] and values["eval:perplexity"] == []


def test_the_containers_arguments(tmp_path):
    assert container.discover({}) is None and container.metric_lines() == [], "outside of one"
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "train.csv").touch()
    inside = container.discover({"SM_MODEL_DIR": str(tmp_path / "model"), "SM_CHANNEL_DATASET": str(rows)})
    place, resume = ["--output_dir", str(tmp_path / "checkpoints")], ["--resume_from_checkpoint", "auto"]
    file = ["--dataset", str(rows / "train.csv")]
    assert inside.arguments(["--max_steps", "4"]) == ["train", "--max_steps", "4", *file, *place, *resume]
    (rows / "test.csv").touch()
    assert inside.arguments([]) == ["train", "--dataset", str(rows), *place, *resume]
    for given in ("--resume_from_checkpoint=latest", "--overwrite_output_dir"):
        assert inside.arguments([given]) == ["train", given, "--dataset", str(rows), *place]
    assert "--resume_from_checkpoint" not in inside.arguments(["--output-dir=elsewhere"])
    assert inside.arguments(["doctor"]) == ["doctor"]


def test_the_first_reason_of_a_failure_is_kept_and_cut(tmp_path):
    inside = container.discover({"SM_MODEL_DIR": str(tmp_path / "model")})
    inside.failed("x" * 2000 + "the cause")
    inside.failed("a consequence")
    told = (tmp_path / "output" / "failure").read_text()
    assert told.endswith("the cause") and len(told) == container.REASON_CHARACTERS


def test_machines_without_a_shared_disk_each_keep_their_part_of_a_checkpoint(tmp_path):
    together = threading.Barrier(2)

    def machine(rank):
        def save(folder):
            (folder / f"rank{rank}").touch()

        checkpoint.write(tmp_path / f"machine{rank}", 2, save, is_main=rank == 0, barrier=together.wait)

    with ThreadPoolExecutor(2) as machines:
        list(machines.map(machine, (0, 1)))
    first, second = (tmp_path / f"machine{rank}" / "checkpoint-000002" for rank in (0, 1))
    assert sorted(path.name for path in first.iterdir()) == [manifest.MANIFEST, "rank0"]
    assert [path.name for path in second.iterdir()] == ["rank1"]
    shutil.copytree(first, second, dirs_exist_ok=True)  # as a folder in S3 brings them together
    assert checkpoint.latest(second.parent) == second


def test_cost_is_bounded_by_price_machines_and_hours():
    cost = estimate(job(max_hours=3, keep_alive_minutes=30))
    assert cost.job == pytest.approx(cost.hourly * 2 * 3) and cost.warm_pool == pytest.approx(cost.hourly)
    assert 10 < cost.hourly < 100
    assert accelerators("ml.p4d.24xlarge") == 8 and accelerators("ml.m5.xlarge") == 1


HERE = build({"resume_from_checkpoint": "latest"})


@pytest.mark.parametrize(
    ("build_it", "told"),
    [
        (lambda: job(config=build({"num_processes": 3})), "num_processes is 3, and 2 × ml.p4d.24xlarge start 8 each"),
        (lambda: job(spot=True, keep_alive_minutes=5), "a warm pool cannot be kept on spot capacity"),
        (lambda: job(max_hours=0), "max_hours 0"),
        (lambda: job(spot=True, max_hours=4, max_wait_hours=2), "max_wait_hours 2"),
        (lambda: job(config=build({"training_type": "basic"})), "training_type basic runs one process, not 16"),
        (lambda: job(name="my job"), "job name `my job`"),
        (lambda: accelerators("ml.p4d.huge"), "ml.p4d.huge"),
        (lambda: accelerators("H100"), "`H100` is no SageMaker instance"),
        (lambda: Account("admin"), "role `admin` is no ARN of a role"),
        (lambda: Account(ROLE, environment={"WANDB_API_KEY": "x"}), "WANDB_API_KEY would be readable to anyone who"),
        (lambda: sagemaker.hyperparameters(job(config=build({"run_name": "it's"}))), "run_name it's cannot travel"),
        (lambda: sagemaker.request(job(config=HERE), Account(ROLE)), "resume_from_checkpoint latest is on this"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(build_it, told):
    with pytest.raises((ConfigError, CloudError)) as refused:
        build_it()
    assert told in str(refused.value) and refused.value.instead


@pytest.mark.parametrize(
    ("more", "keys", "told"),
    [
        ([], False, "is no ARN of a role"),
        pytest.param(["--role", ROLE], False, "no AWS credentials were found", marks=pytest.mark.long),
        (["--role", ROLE], True, "AWS cannot be used: Could not connect to the endpoint URL"),
    ],
    ids=["no role", "no credentials", "no network"],
)
def test_what_the_job_costs_and_what_lacks_is_said_before_anything_is_sent(tmp_path, monkeypatch, more, keys, told):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    env = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"}
    if keys:
        env |= {"AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE", "AWS_SECRET_ACCESS_KEY": "x" * 40}
    line = ("submit", "--instance_type", "ml.g5.xlarge", "--model", "tiny-bert", *more)
    done = run_course(*line, HOME=str(tmp_path), **env)
    lines = done.stderr.strip().splitlines()
    assert lines[0].startswith("cost: 1 × ml.g5.xlarge at $") and lines[-1].startswith("course: ") and told in lines[-1]
    assert done.returncode != 0 and not done.stdout and "Traceback" not in done.stderr


def test_a_dear_job_needs_a_yes(monkeypatch, capsys):
    sent = []
    monkeypatch.setattr(submit, "_send", lambda args, job: sent.append(job) or 0)
    dear = ["submit", "--instance_type", "ml.p4d.24xlarge", "--instance_count", "2", "--role", ROLE]
    monkeypatch.setattr(sys, "stdin", io.StringIO("yes\n"))
    assert cli.main(dear) == 2 and not sent, "nobody sits at a pipe"
    said = r"course: the job can cost \$\d+\.\d\d, and more than \$10 needs a yes: .*\. Try: course submit .* --yes"
    assert re.fullmatch(said, capsys.readouterr().err.splitlines()[-1])
    assert cli.main([*dear, "--yes"]) == 0 and sent.pop().max_hours == 2
    assert cli.main(["submit", "--instance_type", "ml.g5.xlarge", "--role", ROLE]) == 0 and sent.pop()
    for answer, code in (("n\n", 2), ("\n", 2), ("", 2), ("y\n", 0)):
        terminal = io.StringIO(answer)
        terminal.isatty = lambda: True
        monkeypatch.setattr(sys, "stdin", terminal)
        assert cli.main(dear) == code and len(sent) == (code == 0)
        assert "Send it? [y/N]" in capsys.readouterr().err


def test_the_dry_run_prints_the_request_and_nothing_else(capsys):
    dry = shlex.split("submit --dry_run --instance_type ml.g5.xlarge --model tiny-bert")
    given = shlex.split("--warm_pool --tag team=nlp --environment NCCL_DEBUG=INFO")
    assert cli.main([*dry, *given]) == 0
    out, err = capsys.readouterr()
    request = json.loads(out)
    assert request["ResourceConfig"]["KeepAlivePeriodInSeconds"] == 900 and "for the warm pool" in err
    assert request["Tags"] == [{"Key": "team", "Value": "nlp"}] and request["Environment"] == {"NCCL_DEBUG": "INFO"}
    assert cli.main([*dry, "--tag", "team"]) != 0
    assert "write --tag NAME=VALUE" in capsys.readouterr().err
