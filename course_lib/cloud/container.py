"""Reads what SageMaker's training container tells the trainer, and where it wants files left.

Its drivers start ``cli.py --name value …``, an option a hyperparameter and no command, with ``SM_*`` variables
(sagemaker-train 1.x, container_drivers/scripts/environment.py). Outside a container all of this does nothing.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from course_lib.training.callbacks import Callback

CHANNELS = ("dataset", "model")
"""Fields of the config that a channel of the same name replaces by its folder."""
REASON_CHARACTERS = 1024
"""Of a failure's text, what SageMaker keeps."""


@dataclass(frozen=True)
class Container:
    """The folders of a training container.

    Attributes:
        model: what lies here at the end becomes ``model.tar.gz``.
        output: what lies here at the end becomes ``output.tar.gz``.
        failure: the file whose text becomes the job's failure reason.
        checkpoints: kept in S3 while the job runs, and put back when it is started again.
        channels: folder of each input channel, by name.
    """

    model: Path
    output: Path
    failure: Path
    checkpoints: Path
    channels: Mapping[str, Path]

    def arguments(self, argv: Sequence[str]) -> list[str]:
        """The command line that was meant: `train` where no command stands, the channels' folders, a place to resume.

        Checkpoints go where SageMaker keeps them, and a job that finds some there goes on from the newest.
        """
        argv = list(argv) if argv and not argv[0].startswith("-") else ["train", *argv]
        if argv[0] != "train":
            return argv
        given = {name.partition("=")[0].lstrip("-").replace("-", "_") for name in argv if name.startswith("--")}
        for name in CHANNELS:
            if name in self.channels:
                argv += [f"--{name}", str(_content(self.channels[name]))]
        if "output_dir" not in given:
            argv += ["--output_dir", str(self.checkpoints)]
            if not given & {"resume_from_checkpoint", "overwrite_output_dir"}:
                argv += ["--resume_from_checkpoint", "auto"]
        return argv

    def collect(self, run: Path, model: Path) -> None:
        """Leave the trained model and the run's records where SageMaker fetches them."""
        shutil.copytree(model, self.model, dirs_exist_ok=True)
        self.output.mkdir(parents=True, exist_ok=True)
        for name in ("config.yaml", "metrics.jsonl", "summary.json"):
            shutil.copy(run / name, self.output)

    def failed(self, reason: str) -> None:
        """Say why the job fails; the first of several ranks to speak is heard."""
        self.failure.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.failure.open("x", encoding="utf-8") as out:
                out.write(reason[-REASON_CHARACTERS:])
        except FileExistsError:
            pass  # another rank's reason, and the earlier


def _content(channel: Path) -> Path:
    """A channel's one file, where that is all that was put in; else its folder."""
    inside = list(channel.glob("*"))
    return inside[0] if len(inside) == 1 and inside[0].is_file() else channel


def discover(environ: Mapping[str, str] | None = None) -> Container | None:
    """The container that this process runs in; None elsewhere."""
    environ = os.environ if environ is None else environ
    if "SM_MODEL_DIR" not in environ:
        return None
    model = Path(environ["SM_MODEL_DIR"])
    prefix = "SM_CHANNEL_"
    return Container(
        model=model,
        output=Path(environ.get("SM_OUTPUT_DATA_DIR", model.parent / "output" / "data")),
        failure=Path(environ.get("SM_OUTPUT_FAILURE", model.parent / "output" / "failure")),
        checkpoints=model.parent / "checkpoints",
        channels={
            name.removeprefix(prefix).lower(): Path(folder)
            for name, folder in environ.items()
            if name.startswith(prefix)
        },
    )


def metric_line(line: Mapping[str, Any]) -> str:
    """A logged line as one line of text: ``metrics: step=10 loss=0.6931 …``."""
    return "metrics: " + " ".join(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}" for name, value in line.items()
    )


def metric_lines() -> "list[Callback]":
    """In a container, a callback that prints every logged line, for the job's metric definitions to read."""
    if discover() is None:
        return []
    from course_lib.training.callbacks import Callback

    class MetricLines(Callback):
        """Prints, on the main rank."""

        def on_log(self, trainer: Any, line: dict[str, Any]) -> None:
            trainer.say(metric_line(line))

    return [MetricLines()]
