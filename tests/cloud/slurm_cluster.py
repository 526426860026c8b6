"""A Slurm cluster of two nodes, both on this machine, out of the system's own packages.

The packages are unpacked into a folder, so that nothing is installed and nobody has to be root.
"""

import contextlib
import getpass
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tests.waiting import until

PACKAGES = ("slurm-client", "slurmctld", "slurmd", "slurm-wlm-basic-plugins")
DAEMONS = ("slurmctld", "slurmd", "slurmstepd")
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
AuthType=auth/none
CredType=cred/none
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0
GresTypes=gpu
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 State=UNKNOWN
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def unpacked(folder: Path) -> Path:
    """The folder with Slurm's packages and those that they need and the system lacks; skips where they are not had."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        pytest.skip("Slurm was not run: its packages are unpacked with apt-get and dpkg-deb, which are not here")
    state, cache, debs, root = (folder / name for name in ("lists", "cache", "debs", "root"))
    for path in (state / "lists/partial", cache / "archives/partial", debs):
        path.mkdir(parents=True)
    user = getpass.getuser()  # apt's own user may not write here

    def apt(*words: str) -> str:
        settings = (
            f"-oDir::State={state} -oDir::State::status=/var/lib/dpkg/status -oDir::Cache={cache} "
            f"-oAPT::Sandbox::User={user} -oAPT::Update::Error-Mode=any -oAcquire::Languages=none"
        )
        command, env = ["apt-get", *settings.split(), *words], os.environ | {"LC_ALL": "C"}
        done = subprocess.run(command, cwd=debs, capture_output=True, text=True, timeout=480, env=env)
        if done.returncode:
            wrong = next((line for line in done.stderr.splitlines() if line.startswith("E: ")), done.stderr)
            pytest.skip(f"Slurm was not run: `apt-get {words[0]}` said {wrong}")
        return done.stdout

    apt("update")
    lacking = re.findall(r"^Inst (\S+)", apt("-s", "--no-install-recommends", "install", *PACKAGES), re.MULTILINE)
    apt("download", *sorted({*PACKAGES, *lacking}))
    for package in debs.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, root], check=True, timeout=240)
    return root


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for endpoint in sockets:
            endpoint.bind(("127.0.0.1", 0))
        return [endpoint.getsockname()[1] for endpoint in sockets]


def ended(daemon: subprocess.Popen) -> None:
    """Ends a daemon; one that waits for a job which a test has left is killed."""
    daemon.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        daemon.wait(10)
    daemon.kill()


@contextlib.contextmanager
def cluster(folder: Path):
    """The environment with which ``sbatch`` and the others speak to a controller and two nodes, while they run."""
    root = unpacked(folder)
    auth = next(root.rglob("auth_none.so"), None)
    if auth is None:
        pytest.skip("Slurm was not run: the system's packages have no auth/none")
    (folder / "state").mkdir()
    host = socket.gethostname().split(".")[0]
    conf = folder / "slurm.conf"
    filled = CONF.format(host=host, user=getpass.getuser(), ports=free_ports(3), plugins=auth.parent, folder=folder)
    conf.write_text(filled)
    paths = {"PATH": f"{root}/usr/bin:{os.environ['PATH']}", "LD_LIBRARY_PATH": f"{auth.parent.parent}:{auth.parent}"}
    env = os.environ | paths | {"SLURM_CONF": str(conf)}
    controller, node, step = (next((root / "usr/sbin").glob(f"{name}*")) for name in DAEMONS)
    commands = {name: [node, "-D", "-N", name, "-d", step] for name in ("node1", "node2")}
    commands = {"controller": [controller, "-D"], **commands}
    with contextlib.ExitStack() as stack:
        for name, command in commands.items():
            log = stack.enter_context(open(folder / f"{name}.log", "w"))
            daemon = stack.enter_context(subprocess.Popen(command, env=env, stdout=log, stderr=log))
            stack.callback(ended, daemon)

        def said(*command: str) -> str:
            both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            return subprocess.run(command, env=env, text=True, timeout=30, **both).stdout.strip()

        def logs() -> str:
            return "\n".join(f"{name}.log:\n{(folder / f'{name}.log').read_text()}" for name in commands)

        def wait_for(wanted: str, *command: str) -> None:
            until(lambda: said(*command) == wanted, what=f"{command[0]}: {wanted}", told=logs)

        wait_for("2 idle", "sinfo", "-h", "-o", "%D %T")
        try:
            yield env
        finally:
            said("scancel", "--signal=KILL", "--full", "--user", getpass.getuser())
            wait_for("", "squeue", "-h")  # a job's end that finds no controller is told again and again
