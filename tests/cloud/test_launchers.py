"""Scripts for other launchers, each read by the parser of what is to run it: bash, torchrun, Accelerate, our trainer.

Slurm itself reads and runs its script in test_launchers_slurm.py, where its packages can be downloaded; here its text
alone is looked at.
"""

import shlex
import subprocess

import pytest
from accelerate.commands.config import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from course_lib import cli
from course_lib.cloud.job import Job
from course_lib.cloud.launchers import LAUNCHERS
from course_lib.commands.options import config_from
from course_lib.config import build
from course_lib.launching.interrupts import NOTE

RUN = {"run_name": "it's a run", "output_dir": "runs/my job", "text_column": None, "group_by_length": False}
CONFIG = build({"model": "tiny-bert", "max_steps": 4} | RUN)
JOB = Job(CONFIG, "ml.p4d.24xlarge", 2, 8, max_hours=2.5, spot=True, max_wait_hours=5, name="tweets")
ALONE = Job(CONFIG, "ml.m5.xlarge", 1, 2)


def written(name, job=JOB):
    return LAUNCHERS[name][1](job)


@pytest.mark.parametrize("job", [JOB, ALONE], ids=["2x8", "1x2"])
@pytest.mark.parametrize("name", ["slurm", "torchrun"])
def test_bash_torchrun_and_the_trainer_read_it(name, job):
    text = written(name, job)
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert checked.returncode == 0 and not checked.stderr
    line = next(line for line in text.replace("\\\n", " ").splitlines() if "torchrun --" in line)
    for variable, value in (("$SLURM_NNODES", "2"), ("$SLURM_JOB_ID", "7"), ("$head", "10.0.0.1")):
        line = line.replace(variable, value)
    words = shlex.split(line)
    parsed = get_args_parser().parse_args(words[words.index("torchrun") + 1 :])
    assert parsed.nproc_per_node == str(job.processes) and parsed.training_script == "course_lib/cli.py"
    assert parsed.nnodes == str(job.instance_count if name == "torchrun" else 2)
    config = config_from(cli.parse(parsed.training_script_args))
    assert config.output.resume_from_checkpoint == "auto" and config.replace(resume_from_checkpoint=None) == CONFIG


DIRECTIVES = """#!/bin/bash
#SBATCH --job-name=tweets
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=02:30:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
"""


def test_the_directives_of_slurm_come_before_the_first_command():
    assert written("slurm").splitlines()[:11] == DIRECTIVES.splitlines()
    assert "gpus-per-node" not in written("slurm", ALONE)


@pytest.mark.parametrize(
    ("ranks", "told", "code"),
    [("true", "", 0), ("false", "", 1), ("touch 'runs/my job/interrupted.json'; false", "requeue", 1)],
    ids=["finished", "failed", "asked-to-stop"],
)
def test_slurm_puts_the_job_back_where_the_ranks_were_asked_to_stop(tmp_path, ranks, told, code):
    (tmp_path / "runs" / "my job").mkdir(parents=True)
    (tmp_path / "runs" / "my job" / NOTE).touch()  # of the time before
    lines = written("slurm").splitlines()
    [forget] = [line for line in lines if line.startswith("rm -f")]
    script = ["scontrol() { echo $1; }", forget, ranks, *lines[lines.index("code=$?") :]]
    command, env = ["bash", "-uc", "\n".join(script)], {"SLURM_JOB_ID": "7"}
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, env=env)
    assert (done.stdout.strip(), done.returncode, done.stderr) == (told, code, "")


def test_accelerate_loads_its_file_and_its_line(tmp_path):
    file = tmp_path / "accelerate.yaml"
    file.write_text(written("accelerate"))
    loaded = load_config_from_file(str(file))
    assert (loaded.num_machines, loaded.num_processes, loaded.main_process_port) == (2, 16, 29500)
    assert loaded.distributed_type == "MULTI_GPU"
    line = next(line for line in written("accelerate").splitlines() if "accelerate launch" in line)
    words = shlex.split(line.lstrip("# "))
    parsed = launch_command_parser().parse_args(words[words.index("launch") + 1 :])
    assert (parsed.machine_rank, parsed.main_process_ip) == (0, "10.0.0.1")
    assert config_from(cli.parse(parsed.training_script_args)) == CONFIG


def test_the_command_prints_and_writes_them(tmp_path, capsys):
    options = f"submit --instance_type ml.g5.12xlarge --local_dir {tmp_path}/out --model tiny-bert".split()
    for name, (file, _) in LAUNCHERS.items():
        assert cli.main([*options, "--to", name, "--dry_run"]) == 0
        printed = capsys.readouterr().out
        assert not (tmp_path / "out" / file).exists()
        assert cli.main([*options, "--to", name]) == 0
        assert (tmp_path / "out" / file).read_text() == printed
        capsys.readouterr()
    assert cli.main([*options, "--to", "slurm", "--local"]) != 0
    assert "--local rehearses SageMaker, not slurm" in capsys.readouterr().err


def test_machines_that_are_there_need_no_name(capsys):
    base = ["submit", "--model", "tiny-bert", "--dry_run", "--instance_count", "2"]
    for name in LAUNCHERS:
        assert cli.main([*base, "--to", name, "--processes_per_instance", "4"]) == 0
        unnamed = capsys.readouterr().out
        assert cli.main([*base, "--to", name, "--instance_type", "ml.g5.12xlarge"]) == 0
        assert unnamed == capsys.readouterr().out, "it has four GPUs"
    assert cli.main([*base, "--to", "slurm", "--processes_per_instance", "4", "--device", "cpu"]) == 0
    assert "--gpus-per-node" not in capsys.readouterr().out
    for name, cure in {"slurm": "--processes_per_instance", "sagemaker": "ml.g5"}.items():
        assert cli.main([*base, "--to", name]) == 2
        said = capsys.readouterr().err
        assert f"--to {name} without --instance_type" in said and cure in said and said.count("\n") == 1
