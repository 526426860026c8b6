"""The set-up: done once, redone when a pin changes or it was interrupted, and plain about what went wrong."""

import http.server
import importlib.util
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bootstrap(tmp_path):
    """The script as a module, in a folder of its own that holds what it reads."""
    for name in ("tools/bootstrap.py", "pyproject.toml", "constraints.txt", "requirements/minilm.txt", "book/npm.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    spec = importlib.util.spec_from_file_location("bootstrap", tmp_path / "tools/bootstrap.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert tmp_path == module.ROOT
    return module


@pytest.fixture
def installs(bootstrap, monkeypatch):
    """The constraints that each installation was asked for; an environment is a link to this Python."""
    asked = []

    def make_venv(venv):
        (venv / "bin").mkdir()
        (venv / "bin/python").symlink_to(sys.executable)

    monkeypatch.setattr(bootstrap, "make_venv", make_venv)
    monkeypatch.setattr(bootstrap, "install", lambda venv, constraints: asked.append(constraints))
    monkeypatch.setattr(bootstrap, "fetch_for_the_book", lambda: None)
    return asked


def test_a_second_setup_does_nothing(bootstrap, installs):
    bootstrap.setup()
    bootstrap.setup()
    assert installs == ["constraints.txt"]
    assert not subprocess.run([sys.executable, bootstrap.__file__, "setup"], capture_output=True, check=True).stdout


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt", "requirements/minilm.txt", "book/npm.py"])
def test_a_changed_input_updates_in_place(bootstrap, installs, name):
    bootstrap.setup()
    (bootstrap.VENV / "kept").touch()
    with open(bootstrap.ROOT / name, "a", encoding="utf-8") as changed:
        changed.write("# changed\n")
    bootstrap.setup()
    assert len(installs) == 2 and (bootstrap.VENV / "kept").exists()


def test_an_interrupted_setup_starts_from_nothing(bootstrap, installs, monkeypatch):
    def interrupted(venv, constraints):
        (venv / "half").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(bootstrap, "install", interrupted)
        bootstrap.setup()
    assert json.loads(bootstrap.STAMP.read_text())["finished"] is False
    bootstrap.setup()
    assert installs == ["constraints.txt"] and not (bootstrap.VENV / "half").exists()
    assert json.loads(bootstrap.STAMP.read_text())["finished"] is True


def gone_python(bootstrap):
    (bootstrap.VENV / "bin/python").unlink()
    (bootstrap.VENV / "bin/python").symlink_to(bootstrap.ROOT / "gone")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda bootstrap: bootstrap.write_stamp(bootstrap.wanted_stamp() | {"python": "another"}),
        lambda bootstrap: bootstrap.write_stamp(bootstrap.wanted_stamp() | {"folder": "another"}),
        gone_python,
    ],
    ids=["another Python", "a moved folder", "a Python that is gone"],
)
def test_what_cannot_be_kept_starts_from_nothing(bootstrap, installs, spoil):
    bootstrap.setup()
    spoil(bootstrap)
    (bootstrap.VENV / "old").touch()
    bootstrap.setup()
    assert len(installs) == 2 and not (bootstrap.VENV / "old").exists()


def test_a_venv_of_someone_else_for_another_python_is_left_alone(bootstrap, installs):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bootstrap.VENV], check=True)
    with pytest.raises(bootstrap.SetupError, match="was not made by `make setup` and holds no Python with pip"):
        bootstrap.setup()
    assert not installs and (bootstrap.VENV / "pyvenv.cfg").exists() and not bootstrap.STAMP.exists()


def test_two_setups_at_once_install_once(bootstrap, installs, monkeypatch):
    quick = bootstrap.install
    monkeypatch.setattr(bootstrap, "install", lambda *asked: (time.sleep(0.3), quick(*asked)))
    both = [threading.Thread(target=bootstrap.setup) for _ in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join(timeout=400)
    assert installs == ["constraints.txt"]


# --- what it runs


@pytest.mark.parametrize(
    ("gpu", "reachable", "system", "extra"),
    [
        (False, True, "linux", True),
        (False, False, "linux", False),
        (True, True, "linux", False),
        (False, True, "darwin", False),
    ],
)
def test_torch_comes_without_cuda_where_there_is_no_gpu(bootstrap, monkeypatch, gpu, reachable, system, extra):
    ran = []
    monkeypatch.setattr(bootstrap, "gpu_answers", lambda: gpu)
    monkeypatch.setattr(bootstrap, "answers", lambda url: reachable)
    monkeypatch.setattr(bootstrap.sys, "platform", system)
    monkeypatch.setattr(bootstrap, "pip_config", lambda venv: {"find-links": "a b", "cert": "roots.pem"})
    monkeypatch.setattr(bootstrap, "phase", lambda label, command, **env: ran.append((command, env)))
    bootstrap.install(bootstrap.VENV, "constraints.txt")
    (uv, pinned), (torch, env), (course, _), (minilm, free) = ran
    assert uv[-2:] == ["--no-compile", "uv"] and pinned["PIP_CONSTRAINT"] == "constraints.txt"
    for command in (torch, course):
        assert command[2:5] == ["uv", "pip", "install"] and command[command.index("-c") + 1] == "constraints.txt"
        assert [command[i + 1] for i, part in enumerate(command) if part == "--find-links"] == ["a", "b"]
    assert (bootstrap.CPU_INDEX in torch) is extra and env["SSL_CERT_FILE"] == "roots.pem"
    assert torch[-1] == "torch>=2.6,<2.14" and course[-2:] == ["-e", ".[dev,book,all]"]
    assert "PIP_CONSTRAINT" not in free and {"--no-deps", "--require-hashes"} < set(minilm)
    assert not any("--index-url" in command for command, _ in ran)


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_pip_installs_where_uv_cannot(bootstrap, monkeypatch, capsys, failing):
    ran = []

    def phase(label, command, **env):
        ran.append((command, env))
        if len(ran) == failing:
            raise bootstrap.SetupError("uv failed", "")

    monkeypatch.setattr(bootstrap, "gpu_answers", lambda: True)
    monkeypatch.setattr(bootstrap, "phase", phase)
    bootstrap.install(Path(sys.prefix), "constraints.txt")
    torch, course, _ = ran[failing:]
    assert torch[0][2:4] == course[0][2:4] == ["pip", "install"] and course[0][-1] == ".[dev,book,all]"
    assert torch[1]["PIP_CONSTRAINT"] == course[1]["PIP_CONSTRAINT"] == "constraints.txt"
    assert "uv failed" in (said := capsys.readouterr().out) and "pip installs instead" in said


def test_uv_is_told_what_pip_is_told(bootstrap, monkeypatch, tmp_path):
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://one.example\ntrusted-host = one.example\n"
        "extra-index-url = https://two.example https://three.example\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_INDEX_URL", "https://four.example")
    command, _ = bootstrap.uv_command(Path(sys.prefix), "install", "constraints.txt")
    asked = ("--index-url", "--extra-index-url", "--allow-insecure-host")
    told = [command[i : i + 2] for i, part in enumerate(command) if part in asked]
    assert told == [
        ["--index-url", "https://four.example"],
        ["--extra-index-url", "https://two.example"],
        ["--extra-index-url", "https://three.example"],
        ["--allow-insecure-host", "one.example"],
    ]


def test_new_pins_are_resolved_and_nothing_is_installed_but_uv(bootstrap, monkeypatch, capsys):
    ran = []

    def phase(label, command, **env):
        ran.append(command)
        if "compile" in command:
            assert {"setuptools", "uv"} < set(Path(command[command.index("pyproject.toml") + 1]).read_text().split())
            Path(command[-1]).write_text("torch==2.13.0+cpu\nuv==0.13.1\n")

    monkeypatch.setattr(bootstrap, "make_venv", lambda venv: None)
    monkeypatch.setattr(bootstrap, "pip_config", lambda venv: {"index-url": "https://one.example"})
    monkeypatch.setattr(bootstrap, "answers", lambda url: True)
    monkeypatch.setattr(bootstrap, "gpu_answers", lambda: False)
    monkeypatch.setattr(bootstrap.sys, "platform", "linux")
    monkeypatch.setattr(bootstrap, "phase", phase)
    bootstrap.pins()
    uv, resolve = ran
    assert uv[-2:] == ["--no-compile", "uv"] and resolve[2:5] == ["uv", "pip", "compile"]
    assert {"--extra=dev", "--extra=book", "--extra=all", bootstrap.CPU_INDEX} < set(resolve)
    assert resolve[resolve.index("-c") + 1] == "requirements/bounds.txt"
    written = (bootstrap.ROOT / "constraints.txt").read_text()
    assert written == bootstrap.PINS_HEADER + "torch==2.13.0\nuv==0.13.1\n", "torch for GPUs has that version, too"


@pytest.mark.parametrize(
    ("gpus", "line"),
    [
        (
            0,
            "ACCELERATE_USE_CPU=true .venv/bin/accelerate launch --config_file configs/accelerate/cpu2.yaml "
            "--num_cpu_threads_per_process 3",
        ),
        (1, ".venv/bin/accelerate launch --config_file configs/accelerate/gpu.yaml"),
        (4, ".venv/bin/accelerate launch --config_file configs/accelerate/multi-gpu.yaml --num_processes 4"),
    ],
)
def test_the_launcher_uses_the_machine(bootstrap, monkeypatch, capsys, gpus, line):
    seen = subprocess.CompletedProcess([], 0, stdout=f"{gpus}\n")
    monkeypatch.setattr(bootstrap, "gpu_answers", lambda: True)
    monkeypatch.setattr(bootstrap.subprocess, "run", lambda *command, **options: seen)
    monkeypatch.setattr(bootstrap, "cores", lambda: 6)
    bootstrap.launcher()
    assert capsys.readouterr().out == line + "\n"
    assert (ROOT / line.split("--config_file ")[1].split()[0]).exists()


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("OSError: [Errno 28] No space left on device", "free some disk"),
        ("THESE PACKAGES DO NOT MATCH THE HASHES", "not the one that was pinned"),
        ("NewConnectionError('[Errno -3] Temporary failure in name resolution')", "check the network"),
        ("ERROR: No matching distribution found for torch", "PYTHON=python3.11"),
        ("something new", "mend what they name"),
    ],
)
def test_a_failure_shows_its_last_lines_and_what_to_do(bootstrap, capsys, said, advice):
    noise = f"for i in range(100): print('line', i)\nprint({said!r})\nraise SystemExit(3)"
    with pytest.raises(bootstrap.SetupError, match=advice) as failure:
        bootstrap.phase("thing", [sys.executable, "-c", noise])
    shown = capsys.readouterr().out.splitlines()
    assert "thing: failed with exit code 3" in str(failure.value)
    assert said in shown and "line 61" in shown and "line 60" not in shown


def test_a_site_that_never_answers_costs_its_time_limit_at_most(bootstrap):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not bootstrap.answers(f"http://127.0.0.1:{silent.getsockname()[1]}/", seconds=0.3)  # pytest's limit: 60
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as site:
        threading.Thread(target=site.handle_request, daemon=True).start()
        assert bootstrap.answers(f"http://127.0.0.1:{site.server_port}/")


def test_an_old_python_without_a_newer_one_says_so(bootstrap, monkeypatch):
    monkeypatch.setattr(bootstrap, "OLDEST", (9, 0))
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: None)
    with pytest.raises(bootstrap.SetupError, match="make setup PYTHON="):
        bootstrap.check_python()
