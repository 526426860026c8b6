"""Every command line that a lesson or the README shows is one that its program takes, as it stands there."""

import re
import shlex
from pathlib import Path

import nbformat
import pytest
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from course_lib import cli
from course_lib.commands.options import config_from

ROOT = Path(__file__).resolve().parents[1]
MADE_BY_THE_READER = ("mine/", "planned/")
OTHERS = {"aws", "make", "papermill", "pip", "export", "sbatch", "bash", "torchfrtrace", "trackio"}


def shown(path):
    """The logical lines of a file's shell blocks."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = "\n".join(c.source for c in nbformat.reads(text, as_version=4).cells if c.cell_type == "markdown")
    lines = [
        line
        for block in re.findall(r"```bash\n(.*?)```", text, re.S)
        for line in block.replace("\\\n", " ").splitlines()
    ]
    return [(path.name, line) for line in lines if line.strip() and not line.startswith("#")]


LINES = [
    each
    for path in sorted(
        [*ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("exercises/*.ipynb"), *ROOT.glob("*.md"), *ROOT.glob("*/*.md")]
    )
    for each in shown(path)
]


def ours(words):
    """The arguments of `course` in a command line, without those of what starts it; None: another program's."""
    program, *rest = words
    if program == "course":
        return rest
    if program == "accelerate":
        assert rest[0] == "launch"
        started = launch_command_parser().parse_args(rest[1:])
        assert (
            started.config_file is None
            or started.config_file.startswith(MADE_BY_THE_READER)
            or (ROOT / started.config_file).exists()
        )
    elif program == "torchrun":
        started = get_args_parser().parse_args(rest)
    else:
        assert Path(program).name in OTHERS, f"`{program}` begins a line and is no program: is a line cut in two?"
        return None
    if started.training_script == "train.py":  # which the reader writes
        return None
    assert started.training_script == ("course_lib.cli" if started.module else "course_lib/cli.py")
    return started.training_script_args


@pytest.mark.parametrize(("name", "line"), LINES)
def test_it_is_taken(name, line, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(line.partition(" > ")[0], comments=True)
    while re.match(r"[A-Z_]+=", words[0]):
        del words[0]
    arguments = ours(words)
    if arguments is None:
        return
    args = cli.parse(arguments)
    if arguments[0] in ("train", "evaluate"):
        args.config = [file for file in args.config if not file.startswith(MADE_BY_THE_READER)]
        config_from(args)


@pytest.mark.parametrize("line", ["--data_parallel_size 2", "course train --nonsense 3", "course tran"])
def test_a_broken_one_is_not(line):
    with pytest.raises((AssertionError, cli.ConfigError)):
        cli.parse(ours(shlex.split(line)))
