"""The rooms: six need torch alone, no files import each other in a circle, and the pages tell what is there."""

import graphlib
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import grimp
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import rooms, walk

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "course_lib"

# --- six rooms stand alone

ALONE = ("parallel", "launching", "metering", "hangs", "audit", "attach")
CARRIER = "cloudpickle"  # for functions of a notebook; depends on nothing

IMPORT_ALL = """
import importlib, pkgutil, sys, sysconfig
allowed = {allowed!r} | set(sys.stdlib_module_names) | {{sysconfig._get_sysconfigdata_name()}}

class Only:  # what others find, but of these packages alone
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return self.finder.find_spec(name, path, target) if name.partition(".")[0] in allowed else None

sys.meta_path[:] = map(Only, sys.meta_path)
for room in {rooms!r}:
    package = importlib.import_module("course_lib." + room)
    for each in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(each.name)
{then}
"""


def of_torch():
    """Top-level modules of torch, and of what torch itself requires."""
    waiting, seen = ["torch"], set()
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in seen:
            seen.add(name)
            requirements = map(Requirement, importlib.metadata.requires(name) or ())
            waiting += [each.name for each in requirements if not each.marker or each.marker.evaluate({"extra": ""})]
    by_module = importlib.metadata.packages_distributions()
    return {module for module, owners in by_module.items() if {canonicalize_name(each) for each in owners} & seen}


def imports(then="", rooms=ALONE, also=()):
    """The rooms' modules, in a fresh interpreter where nothing but torch's own packages can be imported."""
    allowed = of_torch() | {"course_lib", CARRIER, *also}
    return subprocess.run(
        [sys.executable, "-c", IMPORT_ALL.format(allowed=allowed, rooms=rooms, then=then)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=480,
    )


def test_six_rooms_are_imported_where_there_is_torch_alone():
    done = imports()
    assert done.returncode == 0, done.stderr


def test_and_they_work_there():
    # torch itself sends Python objects from rank to rank by way of NumPy, which it does not require.
    done = imports(
        rooms=(),
        also=("numpy",),
        then="""
import torch, torch.distributed as dist
from course_lib.metering.meter import Meter
from course_lib.parallel.ddp import DataParallel
model = torch.nn.Linear(2, 2)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
engine = DataParallel(model)
with Meter(model) as meter:
    engine(torch.ones(1, 2)).sum().backward()
print("gradient", model.bias.grad.tolist(), meter.table())
dist.destroy_process_group()
""",
    )
    assert done.returncode == 0, done.stderr
    assert "gradient [1.0, 1.0]" in done.stdout and "all_reduce" in done.stdout


def test_another_room_is_refused_there():
    done = imports(rooms=("modeling",))
    assert done.returncode == 1 and "ModuleNotFoundError: No module named 'safetensors'" in done.stderr


# --- what the pages say of the rooms is so


def test_each_function_that_the_architecture_names_is_there():
    page = ROOT / "docs/architecture.md"
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\[`([\w.]+)`\]\(([^)]+)\)", text)
    for name, link in links:
        path = (page.parent / link).resolve()
        assert path.is_relative_to(LIBRARY) and name in walk.statements(str(path.relative_to(LIBRARY))), (name, link)
    others = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r"`([\w/.]+/[\w/.]*)`", text)
    assert not [each for each in others if not ((page.parent / each).exists() or (ROOT / each).exists())]


def test_no_files_import_each_other_in_a_circle():
    """Nor for the sake of a type."""
    graph = grimp.build_graph("course_lib")
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()  # a CycleError names the circle


def test_the_picture_of_the_rooms_is_that_of_the_contract():
    assert rooms.PICTURE.read_text(encoding="utf-8") == rooms.drawing(), "run `python tools/rooms.py`"
