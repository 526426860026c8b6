"""Writes a job for other launchers: a Slurm script, torchrun, Accelerate's YAML.

Each of them is text that stands by itself; nothing here is started.
"""

import shlex
from collections.abc import Callable

from course_lib.cloud.job import Job
from course_lib.launching.interrupts import NOTE
from course_lib.missing_extra import torch_version
from course_lib.planning import hardware

PORT = 29500
TRAIN = "course_lib/cli.py train"


def options(job: Job) -> str:
    """The trainer's options, quoted for a shell."""
    return " ".join(f"--{name} {shlex.quote(value)}" for name, value in job.fields.items())


RESUME = "--resume_from_checkpoint auto"
"""The same command starts a run and goes on with it, also where it ended before its first checkpoint."""


def torchrun(job: Job) -> str:
    """A script for every machine, by hand: ``HEAD=10.0.0.1 bash torchrun.sh`` on each, at about the same time."""
    meeting = (
        f'--rdzv_backend c10d --rdzv_endpoint "${{HEAD:?the address of one of the machines}}:{PORT}" '
        f"--rdzv_id {job.name}"
        if job.instance_count > 1
        else "--standalone"
    )
    return f"""#!/bin/bash
# {job.instance_count} × {job.processes} ranks. output_dir has to be on a disk that all machines share.
set -euo pipefail
exec torchrun --nnodes {job.instance_count} --nproc_per_node {job.processes} {meeting} \\
    {TRAIN} {options(job)} {RESUME}
"""


def slurm(job: Job) -> str:
    """A script for ``sbatch``: one task per node, which starts that node's ranks.

    Two minutes before the time is up, or when the job is preempted, torchrun gets SIGTERM and passes it on; the ranks
    write a checkpoint and end, and the job is put back into the queue and goes on from there.
    """
    note = shlex.quote(f"{job.config.output_dir}/{NOTE}")
    gpus = f"#SBATCH --gpus-per-node={job.processes}\n" if _has_gpus(job) else ""
    patience = "--shutdown-timeout 100 " if torch_version() >= (2, 12) else ""  # before, always 30 s
    hours, minutes = divmod(round(job.max_hours * 60), 60)
    return f"""#!/bin/bash
#SBATCH --job-name={job.name}
#SBATCH --nodes={job.instance_count}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --exclusive
#SBATCH --time={hours:02d}:{minutes:02d}:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# output_dir has to be on a disk that all nodes share.
set -uo pipefail
rm -f {note}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# srun gives a task one core where it is not told; torchrun gives a rank one thread.
threads=$((SLURM_CPUS_ON_NODE / {job.processes}))
export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-$((threads > 1 ? threads : 1))}}
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" \\
    torchrun --nnodes "$SLURM_NNODES" --nproc_per_node {job.processes} \\
    {patience}--rdzv_backend c10d --rdzv_endpoint "$head:{PORT}" --rdzv_id "$SLURM_JOB_ID" \\
    {TRAIN} {options(job)} {RESUME}
code=$?
# torchrun ends with 1 whatever its ranks end with; the trainer leaves this file where it was asked to stop and saved.
if [ $code -ne 0 ] && [ -e {note} ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
"""


def accelerate(job: Job) -> str:
    """Accelerate's configuration for all machines; the launch line, which differs by machine, stands in it."""
    from course_lib.training.launchfiles import accelerate_yaml, several_processes  # torch takes two seconds

    world = job.instance_count * job.processes
    line = f"accelerate launch --config_file FILE --machine_rank 0 --main_process_ip 10.0.0.1 {TRAIN} {options(job)}"
    cpu = "" if _has_gpus(job) else "ACCELERATE_USE_CPU=true "
    head = (
        "# The same line on each machine, with its own --machine_rank; the address is that of machine 0:\n"
        f"#   {cpu}{line}\n"
        "# mixed_precision: the run's own option decides.\n"
    )
    return accelerate_yaml(several_processes(world), world, job.instance_count, head=head)


def _has_gpus(job: Job) -> bool:
    if not job.instance_type:
        return job.config.run.device != "cpu"
    return hardware.accelerator(job.instance_type).name != "CPU"


LAUNCHERS: dict[str, tuple[str, Callable[[Job], str]]] = {
    "slurm": ("job.sbatch", slurm),
    "torchrun": ("torchrun.sh", torchrun),
    "accelerate": ("accelerate.yaml", accelerate),
}
"""File name and writer by launcher."""
