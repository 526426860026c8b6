"""Simulates one machine of a job: a folder in the place of ``/opt/ml``, and the container's processes.

Three literals of the drivers and of the request are rewritten, in the copies that are run: ``/opt/ml`` to the
folder, the host ``algo-1`` to 127.0.0.1, and its port 7777 to a free one.
"""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

PASSED_ON = (
    "PATH",
    "HOME",
    "TMPDIR",
    "LANG",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "CUDA_VISIBLE_DEVICES",
)
"""Of this process's environment, what the job sees besides the request's; the drivers print all that it sees."""


class Instance:
    """One machine of a job: a folder in the place of ``/opt/ml``, and the processes of its container.

    Args:
        root: the folder.
        number: from 0.
        count: of instances.
        port: at which the first one awaits the others.
    """

    def __init__(self, root: Path, number: int, count: int, port: int):
        self.root, self.number, self.port = root, number, port
        self.hosts = [f"127.0.0.{i + 1}" for i in range(count)]
        self.process: subprocess.Popen[str] | None = None

    def lay_out(self, request: Mapping[str, Any], s3: Any) -> None:
        """Make the folders, fetch the channels and checkpoints, write the configuration files."""
        shutil.rmtree(self.root, ignore_errors=True)
        for name in ("input/config", "model", "output/data", "checkpoints"):
            (self.root / name).mkdir(parents=True)
        channels = {}
        for channel in request["InputDataConfig"]:
            name = channel["ChannelName"]
            download(s3, channel["DataSource"]["S3DataSource"]["S3Uri"], self.root / "input" / "data" / name)
            channels[name] = {"TrainingInputMode": "File"}
        if "CheckpointConfig" in request:
            download(s3, request["CheckpointConfig"]["S3Uri"], self.root / "checkpoints")
        for path in (self.root / "input" / "data" / "sm_drivers").rglob("*"):
            if path.suffix in (".py", ".sh", ".json"):  # beside them may lie the byte code of an installed copy
                path.write_text(self.here(path.read_text(encoding="utf-8")), encoding="utf-8")
        configs = {
            "hyperparameters": {name: self.here(value) for name, value in request["HyperParameters"].items()},
            "inputdataconfig": channels,
            "resourceconfig": {
                "current_host": self.hosts[self.number],
                "hosts": self.hosts,
                "network_interface_name": "lo",
                "current_instance_type": request["ResourceConfig"]["InstanceType"],
            },
        }
        for name, content in configs.items():
            (self.root / "input" / "config" / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")

    def here(self, text: str) -> str:
        """The text with the three literals rewritten."""
        text = text.replace("/opt/ml", str(self.root)).replace('"algo-1"', f'"{self.hosts[0]}"')
        return re.sub(r"\b7777\b", str(self.port), text)

    def start(self, request: Mapping[str, Any], log: Path) -> None:
        """Run the container's command, its output going to a file."""
        algorithm = request["AlgorithmSpecification"]
        command = [self.here(part) for part in (*algorithm["ContainerEntrypoint"], *algorithm["ContainerArguments"])]
        # Each would take all cores, which the instances share here.
        environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // len(self.hosts)))}
        environment |= {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        environment |= request.get("Environment", {}) | {
            "TRAINING_JOB_NAME": request["TrainingJobName"],
            "PYTHONUNBUFFERED": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PET_MASTER_PORT": str(self.port),
        }  # one instance alone is given no port, and torchrun's own may be taken
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command,
                env=environment,
                cwd=self.root,
                stdout=out,
                text=True,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def processes(self) -> list[psutil.Process]:
        """Every process of the container that is still there."""
        if self.process is None or self.process.poll() is not None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            container = psutil.Process(self.process.pid)
            return [container, *container.children(recursive=True)]
        return []

    def interrupt(self) -> None:
        """Ask the ranks to stop: SIGTERM to their launcher, which passes it on."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if any(Path(part).name == "torchrun" for part in process.cmdline()[:2]):
                    process.terminate()

    def kill(self) -> None:
        """End every process at once."""
        for process in reversed(self.processes()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def ended(self) -> bool:
        """Whether the container has ended."""
        assert self.process is not None
        return self.process.poll() is not None

    def failed(self) -> bool:
        """Whether it has ended, and not well."""
        assert self.process is not None
        return bool(self.process.poll())


def split(uri: str) -> tuple[str, str]:
    """Bucket and key of an ``s3://`` address."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key


def download(s3: Any, uri: str, folder: Path) -> None:
    """Fetch what lies under an ``s3://`` address, a folder or one file."""
    bucket, prefix = split(uri)
    folder.mkdir(parents=True, exist_ok=True)
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for entry in page.get("Contents", ()):
            rest = entry["Key"].removeprefix(prefix)
            if rest and prefix and not prefix.endswith("/") and not rest.startswith("/"):
                continue  # another name that begins alike
            target = folder / (rest.lstrip("/") or Path(entry["Key"]).name)
            target.parent.mkdir(parents=True, exist_ok=True)
            s3.download_file(bucket, entry["Key"], str(target))


def upload(s3: Any, folder: Path, uri: str) -> None:
    """Make what lies under an ``s3://`` address the files of a folder, and add to what other folders put there."""
    bucket, prefix = split(uri)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        s3.upload_file(str(path), bucket, f"{prefix.rstrip('/')}/{path.relative_to(folder).as_posix()}")


def put(s3: Any, uri: str, content: bytes) -> None:
    """Store one object."""
    bucket, key = split(uri)
    s3.put_object(Bucket=bucket, Key=key, Body=content)


def packed(folders: list[Path]) -> bytes:
    """A ``tar.gz`` of what lies in some folders, as one."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for folder in folders:
            for path in sorted(folder.iterdir()):
                archive.add(path, arcname=path.name)
    return buffer.getvalue()
