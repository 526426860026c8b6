"""The rooms: tests lie as the package does, four rooms need torch alone, and nobody reaches into a library unlisted."""

import ast
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

# --- tests/ mirrors the package

OTHER_ROOMS = {"book": ROOT / "book", "notebooks": ROOT / "notebooks", "tools": ROOT / "tools"}
MACHINES = {"gpu", "gpu_sim"}  # whole runs on GPUs, simulated or real, and the simulation
OF_THE_COMMAND_LINE = "commands"  # there files are named for what a user does with `course train`
OF_ALL = {
    "test_counted.py": "what no test may demand",
    "test_fuzz.py": "random command lines and configurations, through everything",
    "test_names.py": "names of classes and of values, in all rooms",
    "test_packaging.py": "pins, layers, commands and configurations",
    "test_promises.py": "what is promised, and which test would notice",
    "test_references.py": "what docstrings refer to, in all rooms",
    "test_rooms.py": "this one",
    "test_slices.py": "which tests a part of them has",
    "test_types.py": "the whole library, by mypy",
    "test_shown_commands.py": "what README and lessons tell users to type",
    "training/engines/test_combinations.py": "every pair of options that the table lets pass",
    "book/test_every_page.py": "the book that was built",
    "book/test_in_a_browser.py": "the same in a browser",
    "book/test_pictures.py": "how the pages look",
    "notebooks/test_all_lessons.py": "what holds for every lesson",
    "notebooks/test_claims.py": "what every page says of its numbers",
    "notebooks/test_in_a_browser.py": "lessons in JupyterLab, in a real browser",
    "notebooks/test_lab.py": "what `make lab` opens",
    "notebooks/test_named_code.py": "what every page names in code",
    "notebooks/test_world_sizes.py": "every lesson at other numbers of ranks",
    "planning/test_measured.py": "plans beside measurements on the machine",
    "training/test_load.py": "long runs of every kind, for leaks",
    "training/checkpoints/test_exact_resume.py": "resumed runs, by `course train`, beside undisturbed ones",
    "training/engines/test_compiled.py": "torch.compile under every engine",
    "training/engines/test_context.py": "shared rows under every engine",
    "training/engines/test_packed.py": "texts that share rows under every engine",
    "training/engines/test_tensor.py": "split layers under every engine",
}


def rooms_of_tests():
    """Test files by the folder that they lie in, from tests/."""
    return [(path, path.parent.relative_to(ROOT / "tests")) for path in sorted((ROOT / "tests").rglob("test_*.py"))]


def test_each_folder_of_tests_is_a_room_and_each_file_is_of_its_room():
    looked_at = 0
    for path, room in rooms_of_tests():
        if room.parts[:1] and room.parts[0] in MACHINES:
            continue
        looked_at += 1
        subjects = OTHER_ROOMS.get(str(room), LIBRARY / room)
        assert subjects.is_dir(), f"{path.relative_to(ROOT)}: there is no course_lib/{room}"
        if str(room) == OF_THE_COMMAND_LINE or str(path.relative_to(ROOT / "tests")) in OF_ALL:
            continue
        stem = path.stem.removeprefix("test_")
        named = any(stem == each.stem or stem.startswith(f"{each.stem}_") for each in subjects.iterdir())
        dotted = ".".join(room.parts)
        helpers = "".join(each.read_text(encoding="utf-8") for each in path.parent.glob("*_cases.py"))
        imported = re.search(rf"\bcourse_lib\.{re.escape(dotted)}\b", helpers + path.read_text("utf-8"))
        assert named or imported, f"{path.relative_to(ROOT)} neither names nor imports a module of course_lib/{room}"
    assert looked_at > 100
    for each in OF_ALL:
        assert (ROOT / "tests" / each).is_file(), f"{each} is gone: take it out of the list"


def test_each_room_has_tests():
    rooms = {path.name for path in LIBRARY.iterdir() if (path / "__init__.py").is_file()}
    tested = {room.parts[0] for _, room in rooms_of_tests() if room.parts}
    assert len(rooms) > 15 and rooms - tested == set()


# --- four rooms stand alone

ALONE = ("parallel", "launching", "metering", "hangs")
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
count = 0
for room in {rooms!r}:
    package = importlib.import_module("course_lib." + room)
    for each in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(each.name)
        count += 1
print("imported", count)
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
    allowed = of_torch() | {"course_lib", CARRIER}
    assert "torch" in allowed
    assert not allowed & {"transformers", "accelerate", "datasets", "pydantic", "numpy", "psutil"}
    allowed |= set(also)
    return subprocess.run(
        [sys.executable, "-c", IMPORT_ALL.format(allowed=allowed, rooms=rooms, then=then)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=480,
    )


def test_four_rooms_are_imported_where_there_is_torch_alone():
    done = imports()
    assert done.returncode == 0, done.stderr
    assert int(re.search(r"imported (\d+)", done.stdout)[1]) > 60


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


# --- nothing of a library is replaced unlisted

REPLACED = {
    ("launching/forks.py", "get_preparation_data"): "multiprocessing runs the caller's script again in each process, "
    "unasked",
    ("metering/storages.py", "resize_"): "no operator: no dispatch mode and no hook sees a storage resized",
    ("metering/allocation_log.py", "derive.__name__"): "DTensor works out shapes on tensors of global size, which are "
    "no memory",
    ("metering/collective_hooks.py", "name"): "Work.wait, coalescing and graph capture have no hook",
    ("planning/simulate.py", "find_packed_sequence_indices"): "looks at values, which fake tensors have not",
    ("planning/alone.py", "scaled_dot_product_attention"): "keeps the scores on CPUs where it draws a dropout, and on "
    "GPUs does not",
    ("tracking/trackio_tracker.py", "_get_default_namespace"): "trackio asks the Hub for the user's name",
    ("training/unwrapping.py", "is_deepspeed_available"): "save_pretrained imports DeepSpeed to ask whether it wrapped",
}


def test_what_is_replaced_is_a_librarys_and_is_listed():
    found, modules = set(), 0
    for path in sorted(LIBRARY.rglob("*.py")):
        modules += 1
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "replaced":
                name = node.args[1]
                found.add(
                    (
                        str(path.relative_to(LIBRARY)),
                        name.value if isinstance(name, ast.Constant) else ast.unparse(name),
                    )
                )
    assert modules > 200
    assert found == set(REPLACED)


# --- where code stands decides nothing

SHOWN = {
    "config/run.py": "the docstrings of fields, for --help",
    "grading/own_code.py": "the line of a learner's own code that an exception or a hang is told with",
    "hangs/flight_recorder.py": "where a call was issued, for the report",
    "hangs/user_frames.py": "where a rank is, for the report; a name in <> is no file to show",
    "lessons/listing.py": "shows a function's source in a lesson",
    "metering/recorder.py": "the line that a rank is in, for a recording",
    "metering/recording.py": "the source of what was recorded",
}
PLACES = re.compile(
    r"co_filename|f_lineno|co_firstlineno|tb_lineno|getsource|getsourcelines|linecache|getsourcefile|"
    r"inspect\.stack|currentframe"
)


def test_no_file_name_or_source_line_is_program_logic():
    users = {
        str(path.relative_to(LIBRARY))
        for path in LIBRARY.rglob("*.py")
        if PLACES.search(path.read_text(encoding="utf-8"))
    }
    assert users == set(SHOWN)
    # In a package that is zipped or frozen there is no __file__ to compare with: it only finds what lies beside it.
    compared = [
        path
        for path in LIBRARY.rglob("*.py")
        if re.search(r"__file__[^\n]*(==| in )|(==| in )[^\n]*__file__", path.read_text(encoding="utf-8"))
    ]
    assert compared == []


# --- what the pages say of the rooms is so


def test_each_function_that_the_architecture_names_is_there():
    page = ROOT / "docs/architecture.md"
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\[`([\w.]+)`\]\(([^)]+)\)", text)
    assert len(links) > 20
    for name, link in links:
        path = (page.parent / link).resolve()
        assert path.is_relative_to(LIBRARY) and name in walk.statements(str(path.relative_to(LIBRARY))), (name, link)
    others = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r"`([\w/.]+/[\w/.]*)`", text)
    assert not [each for each in others if not ((page.parent / each).exists() or (ROOT / each).exists())]


def test_the_seven_files_of_the_walk_are_all_followed():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    followed = set(re.findall(r"course_lib/((?:training|parallel)/[\w/]+\.py)\)", text))
    assert followed >= {
        "training/trainer.py",
        "training/loss.py",
        "training/engines/from_scratch.py",
        "parallel/sharded_module.py",
        "parallel/sharded_unit.py",
        "parallel/zero3.py",
        "parallel/clipping.py",
    }


def test_no_files_import_each_other_in_a_circle():
    """Nor for the sake of a type."""
    graph = grimp.build_graph("course_lib")
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()  # a CycleError names the circle


def test_the_picture_of_the_rooms_is_that_of_the_contract():
    assert rooms.PICTURE.read_text(encoding="utf-8") == rooms.drawing(), "run `python tools/rooms.py`"
    drawn = {room for row in rooms.layers() for room in row}
    assert drawn == {
        path.stem for path in LIBRARY.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()
    } - {"__init__"}


def test_the_trees_are_true_to_the_folders():
    packages = {f"{path.name}/" for path in LIBRARY.iterdir() if (path / "__init__.py").is_file()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    top = {line.partition("/")[0] + "/" for line in tracked.stdout.splitlines() if "/" in line and line[0] != "."}
    page = "docs/architecture.md"
    for wanted, told in ((packages, "parallel/"), (top, "Makefile")):
        tree = next(
            block
            for block in re.findall(r"^```\w*\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.M | re.S)
            if "config" in block and told in block
        )
        named = set(re.findall(r"\b(\w+/)(?=[\w/]*(?:[\s:;,)]|$))", tree))
        assert wanted - named == set(), f"{page} leaves them out"
        below = {f"{path.name}/" for path in LIBRARY.rglob("*") if path.is_dir()}
        gone = named - packages - top - below - {"gpu_sim/", "hardware/", "pictures/"}
        assert gone == set(), f"{page} names what is not there"
