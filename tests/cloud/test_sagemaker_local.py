"""`course submit --local`: the SDK's request, its drivers and torchrun on this machine, as a user calls it."""

import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification

from course_lib.cloud.instance import Instance, download, packed, upload
from course_lib.cloud.local_player import playing
from course_lib.cloud.sagemaker import NO_TELEMETRY
from course_lib.cloud.stand_in import ROLE, stand_in
from course_lib.launching.netns import in_own_network

ROOT = Path(__file__).resolve().parents[2]
COMMAND = shlex.split(
    "-m course_lib submit --local --config configs/quickstart.yaml --instance_type ml.m5.xlarge --model tiny-bert "
    "--max_train_samples 64 --batch_size 4 --max_eval_samples 32 --max_length 32 --max_steps 4 --logging_steps 2 "
    "--baselines false --device cpu --tracker none"
)
RUINED = shlex.split(  # the first evaluation stays the best
    "--eval_steps 1 --best_metric loss --learning_rate 0.5 --max_grad_norm 0 --lr_scheduler constant --warmup_ratio 0"
)


def submit(folder, *more):
    command = [sys.executable, *COMMAND, "--local_dir", str(folder), *more]
    env = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    env |= {"WANDB_API_KEY": "secret-of-this-machine"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=960, env=env)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A job on two instances, in a network of its own, where there is nothing but the loopback interface."""
    folder = tmp_path_factory.mktemp("two")
    done = in_own_network(submit, folder, "--instance_count", "2", *RUINED)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (job,) = folder.iterdir()
    return done, job


@pytest.mark.long
def test_both_instances_trained_together_and_their_log_was_streamed_without_keys(two):
    done, job = two
    assert "[algo-1] Running Torchrun Driver" in done.stdout and "[algo-2] Running Torchrun Driver" in done.stdout
    assert "torchrun --nnodes=2 --nproc_per_node=1" in done.stdout
    assert "[algo-1] metrics: step=4 " in done.stdout and "[algo-2] metrics" not in done.stdout
    assert "processes    2 (cpu" in done.stdout
    streamed = [line for line in done.stdout.splitlines() if line.startswith("[algo-")]
    assert (job / "log.txt").read_text().splitlines() == streamed
    files = [path for path in job.rglob("*") if path.is_file()]
    assert len(files) >= 7 and [path for path in files if b"secret-of-this-machine" in path.read_bytes()] == []
    assert "secret-of-this-machine" not in done.stdout + done.stderr


@pytest.mark.long
def test_the_status_and_the_metrics_are_true(two):
    done, job = two
    described = json.loads((job / "job.json").read_text())
    assert described["TrainingJobStatus"] == "Completed"
    phases = [phase["Status"] for phase in described["SecondaryStatusTransitions"]]
    assert phases == ["Downloading", "Training", "Uploading"]
    metrics = {metric["MetricName"]: metric["Value"] for metric in described["FinalMetricDataList"]}
    last = [line for line in done.stdout.splitlines() if "metrics: step=4 " in line and " loss=" in line][-1]
    assert f"loss={metrics['train:loss']:.6g}" in last and 0 <= metrics["eval:accuracy"] <= 1
    assert f"train:loss: {metrics['train:loss']:.6g}" in done.stdout


@pytest.mark.long
def test_the_best_weights_came_back_though_the_instances_share_no_disk(two):
    done, job = two
    model = AutoModelForSequenceClassification.from_pretrained(job / "model")
    assert len(model.config.id2label) == 3
    validation = [float(loss) for loss in re.findall(r"metrics: .*eval\.loss=(\S+)", done.stdout)]
    (loss,) = re.findall(r"\| loss \| (\S+) \|", (job / "model" / "README.md").read_text())  # of the test split
    assert len(validation) == 4 and float(loss) < 2 * validation[0] < validation[-1] / 2


@pytest.mark.long
def test_a_failed_job_says_the_trainers_own_reason(tmp_path):
    done = submit(tmp_path, "--text_column", "tweet")
    assert done.returncode == 1
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("course: job course-") and "failed: AlgorithmError:" in line and "`tweet`" in line
    assert "Traceback" not in done.stderr
    (job,) = tmp_path.iterdir()
    described = json.loads((job / "job.json").read_text())
    assert described["TrainingJobStatus"] == "Failed" and "`tweet`" in described["FailureReason"]
    assert described["FinalMetricDataList"] == [] and not (job / "model").exists()


def test_folders_go_to_s3_and_come_back(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "one").write_text("1")
    with stand_in() as session:
        s3 = session.client("s3")
        s3.create_bucket(Bucket="mine")
        upload(s3, tmp_path / "a", "s3://mine/place")
        upload(s3, tmp_path / "a", "s3://mine/place-of-another")
        download(s3, "s3://mine/place", tmp_path / "back")
        download(s3, "s3://mine/place/b/one", tmp_path / "file")
    assert [path.relative_to(tmp_path / "back").as_posix() for path in (tmp_path / "back").rglob("*")] == ["b", "b/one"]
    assert (tmp_path / "file" / "one").read_text() == "1"
    (tmp_path / "model.tar.gz").write_bytes(packed([tmp_path / "a"]))
    with tarfile.open(tmp_path / "model.tar.gz") as archive:
        assert archive.getnames() == ["b", "b/one"]


def test_the_three_literals(tmp_path):
    here = Instance(tmp_path, 1, 2, 4321).here
    assert here('cd /opt/ml/input; M = "algo-1"; P = 7777; Q = 17777') == (
        f'cd {tmp_path}/input; M = "127.0.0.1"; P = 4321; Q = 17777'
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_sdks_own_waiting_sees_somebody_elses_script_fail(tmp_path):
    from sagemaker.core.helper.session_helper import Session
    from sagemaker.core.training.configs import Compute, SourceCode
    from sagemaker.core.utils.exceptions import FailedStatusError
    from sagemaker.train import ModelTrainer

    script = "import os, sys\nopen(os.environ['SM_OUTPUT_FAILURE'], 'w').write('no luck')\nsys.exit(3)\n"
    (tmp_path / "fails.py").write_text(script)
    code = SourceCode(source_dir=str(tmp_path), entry_script="fails.py")
    machine = Compute(instance_type="ml.m5.xlarge", instance_count=1)
    with playing() as player:
        session = Session(player.boto_session, sagemaker_config=NO_TELEMETRY)
        job = {"training_image": "image", "role": ROLE, "base_job_name": "theirs", "sagemaker_session": session}
        trainer = ModelTrainer(**job, source_code=code, compute=machine)
        with pytest.raises(FailedStatusError, match="AlgorithmError: no luck, exit code: 3"):
            trainer.train(wait=True, logs=True)
