"""The report of ``make gpu`` as Markdown, without what tells of its user."""

import datetime
import getpass
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from benchmarks.hardware.findings import Settings
from benchmarks.hardware.processes import ROOT, Outcome

FOLDERS = re.compile(r"(?:~|(?<![\w.:/~>…]))/(?!dev/|proc/)(?:[\w.+@~-]+/)+")
"""The folders of an absolute path, which may name a user or a machine; not those of an address on the network."""


def private(text: str) -> str:
    """A text of a program without folders of this machine, its name, and its user's."""
    text = text.replace(str(ROOT), "<course>")
    home = str(Path.home())
    if len(home) > 1:  # a container's user may live in /
        text = text.replace(home, "~")
    text = FOLDERS.sub("…/", text)
    for name, instead in (*((name, "<host>") for name in host_names()), (user_name(), "<user>")):
        if len(name) > 1:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", instead, text)
    return text


def host_names() -> list[str]:
    """What this machine is called, the longest first."""
    name = socket.gethostname()
    return sorted({name, name.split(".")[0]} - {"localhost"}, key=len, reverse=True)


def user_name() -> str:
    """Who runs this; nobody where the system does not say, and for root, who is everybody's."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have a number alone
        return ""
    return "" if name == "root" else name


def render(outcomes: Sequence[Outcome], settings: Settings, seconds: float, here: Path) -> str:
    """The whole report.

    Args:
        outcomes: of the sections, in order.
        settings: that they ran with.
        seconds: that all took.
        here: the report's own folder, from which logs are named.
    """
    device = "the simulated device" if settings.simulated else settings.counted
    kind = "tiny" if settings.tiny else "full" if settings.full else "quick"
    lines = [
        f"# What runs on {device}" + (": no figure in here is a GPU's" if settings.simulated else ""),
        "",
        f"{datetime.date.today()}, {seconds / 60:.1f} minutes, a {kind} run of `make gpu`. "
        "It names no user, no host and no folder; the logs may.",
        "",
    ]
    lines += ["| section | result | seconds | failed | not run |", "|---|---|---|---|---|"]
    lines += [
        f"| {each.section.title} | {each.state} | {each.seconds:.0f} | {len(each.failures)} | {len(each.left_out)} |"
        for each in outcomes
    ]
    for each in outcomes:
        lines += ["", f"## {each.section.title}: {each.state}", *_body(each, here)]
    return "\n".join(lines) + "\n"


def _body(outcome: Outcome, here: Path) -> list[str]:
    lines: list[str] = []
    for part in outcome.parts:
        lines += ["", *(private(part).splitlines() if isinstance(part, str) else _table(part))]
    if outcome.failures:
        log = private(os.path.relpath(outcome.log, here))
        lines += ["", f"**Failed** (log: `{log}`):", ""]
        lines += [f"- {private(what)}: `{private(why).replace('`', chr(39))}`" for what, why in outcome.failures]
    if outcome.left_out:
        lines += ["", "**Not run:**", ""]
        lines += [f"- {private(what)}: {private(why)}" for what, why in outcome.left_out]
    return lines


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[private(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    header, *body = cells
    shown = ["| " + " | ".join(row) + " |" for row in body] or ["| " + " | ".join("" for _ in header) + " |"]
    return ["| " + " | ".join(header) + " |", "|" + "---|" * len(header), *shown]
