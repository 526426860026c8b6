"""`make lab`: the server that it starts reaches lessons, exercises and whatever they link to, and logs no error."""

import contextlib
import json
import os
import posixpath
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import nbformat
import pytest

from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "of-the-test"
REDIRECTED = (">", "/dev/null")
LINK = re.compile(r"\]\(([^()\s]+)\)|(?:href|src)=[\"']([^\"']+)")


def commands_of_make():
    """The lines by which `make lab` trusts the notebooks and starts JupyterLab."""
    asked = ("lab", f"PYTHON={sys.executable}", "ARGS=--no-browser --ServerApp.port=0")
    lines = subprocess.run(
        ["make", "--dry-run", *asked], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    ).stdout.splitlines()
    found = [shlex.split(next(line for line in lines if f"bin/jupyter {verb}" in line)) for verb in ("trust", "lab")]
    assert [command[0] for command in found] == [".venv/bin/jupyter"] * 2
    return [
        [str(Path(sys.executable).with_name("jupyter")), *(each for each in command[1:] if each not in REDIRECTED)]
        for command in found
    ]


def written(folder):
    """What a server says of itself, once all of it is in the file."""
    return [text for text in (path.read_text() for path in folder.glob("jpserver-*.json")) if text.endswith("}")]


@contextlib.contextmanager
def started(course, private):
    """JupyterLab over a folder, as `make lab` starts it: its address and its log."""
    environment = os.environ | {
        "JUPYTER_RUNTIME_DIR": str(private),
        "JUPYTER_CONFIG_DIR": str(private / "config"),
        "JUPYTER_DATA_DIR": str(private / "data"),
        "JUPYTER_TOKEN": TOKEN,
    }
    trust, start = commands_of_make()
    subprocess.run(trust, cwd=course, env=environment, check=True, timeout=480)
    log = private / "log"
    with log.open("w") as out:
        server = subprocess.Popen(
            start, cwd=course, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        told = {"files": [log], "told": log.read_text}
        about = until(
            lambda: "is running at" in log.read_text() and written(private), server, what="the server", **told
        )
        address = json.loads(about[0])["url"]
        until(lambda: listens(address), server, what="its answer", **told)
        yield address, log
    finally:
        server.terminate()
        try:
            server.wait(80)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(80)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with started(ROOT, tmp_path_factory.mktemp("lab")) as (address, log):
        yield address, log


def listens(address):
    """It says that it is running before it does."""
    place = urllib.parse.urlsplit(address)
    with socket.socket() as tried:
        return tried.connect_ex((place.hostname, place.port)) == 0


def status(address, path):
    """What the server answers when a page asks for a file, as JupyterLab does where a link is clicked."""
    url = f"{address}api/contents/{urllib.parse.quote(path)}?content=0&token={TOKEN}"
    try:
        with urllib.request.urlopen(url, timeout=300) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def links():
    """Every file that a lesson or an exercise links to, from the folder of the course, and who does."""
    found = {}
    for path in sorted([*ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("exercises/*.ipynb")]):
        for cell in nbformat.read(path, as_version=4).cells:
            targets = [a or b for a, b in LINK.findall(cell.source)] if cell.cell_type == "markdown" else []
            for target in targets:
                url = urllib.parse.urlsplit(target)
                if url.path and not (url.scheme or url.netloc):
                    place = posixpath.join(path.parent.name, urllib.parse.unquote(url.path))
                    found[posixpath.normpath(place)] = path.name
    return found


def test_it_opens_lesson_0(lab):
    address, log = lab
    assert "/lab/tree/notebooks/00_start_here.ipynb?token=" in log.read_text()
    assert status(address, "notebooks/00_start_here.ipynb") == 200


def test_every_link_of_lessons_and_exercises_can_be_followed(lab):
    address, log = lab
    targets = links()
    assert {"exercises/02_data_parallel.ipynb", "notebooks/02_data_parallel.ipynb"} <= set(targets)
    assert {path: by for path, by in targets.items() if status(address, path) != 200} == {}
    assert status(address, "exercises/nowhere.ipynb") == 404
    lines = [line for line in log.read_text().splitlines() if line.startswith("[E ")]
    assert lines == [], "the server, or nbgrader in it, logged an error"
