"""What every lesson has to be: ordered, complete, committed with outputs, small, free of errors."""

import ast
import re
import types
from collections import Counter

import nbformat
import pytest
import torch

from course_lib.lessons import listing
from course_lib.lessons.notebook import MIME, QUESTION
from tests.notebooks.conftest import NOTEBOOKS

LESSONS = (
    "00_start_here",
    "01_basic_loop",
    "02_data_parallel",
    "03_accelerate",
    "04_distributed_evaluation",
    "05_zero_stages",
    "06_fsdp",
    "07_pipeline_schedules",
    "08_tensor_and_hybrid",
    "09_plan_and_simulate",
    "10_faults_and_hangs",
    "11_wandb",
    "12_sagemaker",
    "13_capstone",
    "14_long_contexts",
    "15_experts",
    "16_gradient_audit",
    "17_where_the_time_goes",
    "18_talking_less",
    "19_too_large_to_fine_tune",
)
SECTIONS = (
    "You will be able to",
    "Time",
    "You need",
    "On your own cluster",
    "When it goes wrong",
    "Exercises",
    "Questions",
    "Read next",
)


SUBJECTS = {
    "02_data_parallel": ("class TinyDDP:", 'SCRIPT = """'),
    "03_accelerate": ("class TinyAccelerator:", "def every_day(folder, batches=8, resume=False):"),
    "05_zero_stages": (
        "class TinyBucket:",
        "class TinyZeRO1:",
        "class TinyZeRO2(TinyZeRO1):",
        "class TinyZeRO3(TinyZeRO2):",
    ),
    "06_fsdp": ("class Unit:", "class TinyFSDP:", "def at_work(dtype, steps, folder):"),
    "07_pipeline_schedules": ("class TinyStage:", "class TinyOneFOneB(TinyStage):", "class TinyZBH1(TinyOneFOneB):"),
    "08_tensor_and_hybrid": (
        "class CopyToRanks(torch.autograd.Function):  # f",
        "def hybrid_step(stage, x, here, groups):",
        "def on_three_axes(plan, **how):",
        "def over_links(tries):",
    ),
    "09_plan_and_simulate": ("def seconds_of_a_step(m, plan, cluster):",),
    "10_faults_and_hangs": ("class Recorder:",),
    "11_wandb": ("def tracked_run(rate, seed, group=None, save=False):",),
    "14_long_contexts": (
        "class Block(nn.Module):",
        "class Ring(torch.autograd.Function):",
    ),
    "15_experts": ("class AllToAll(torch.autograd.Function):",),
    "16_gradient_audit": (
        "def explain(parts, right, sizes, small):  # parts: (ranks, *shape), what each rank has in place of `right`",
    ),
    "17_where_the_time_goes": (
        "class TinyCounter(TorchDispatchMode):",
        "class ChunkedCrossEntropy(torch.autograd.Function):",
        "class TinyFlash(torch.autograd.Function):",
        "class Product8(torch.autograd.Function):",
    ),
    "18_talking_less": (
        "class EveryStep:  # data parallelism",
        "class TinyLocalSGD(EveryStep):",
        "class TinyTopK(EveryStep):",
        "class TinyPowerSGD(EveryStep):",
    ),
    "19_too_large_to_fine_tune": (
        "class TinyLora(nn.Module):",
        "class TinyOffload(torch.autograd.graph.saved_tensors_hooks):",
    ),
}
"""First lines of the cells that hold a lesson's subject whole: up to 40 lines, all others up to 20."""


def test_every_notebook_is_in_the_list():
    assert sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")) == sorted(LESSONS) and len(LESSONS) == 20


@pytest.fixture(params=LESSONS)
def lesson(request):
    return nbformat.read(NOTEBOOKS / f"{request.param}.ipynb", as_version=4), NOTEBOOKS / f"{request.param}.ipynb"


def test_shape(lesson):
    notebook, path = lesson
    nbformat.validate(notebook)
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for section in SECTIONS:
        assert section in prose, f"{path.name} has no “{section}”"
    everything = prose + "\n".join(cell.source for cell in code)
    assert everything.count("predict(") >= 2 and everything.count("measure(") >= 2
    assert len(re.findall(r"Takeaway|takeaway\(", everything)) >= 3
    assert prose.count("<details>") >= 3, "questions need folded answers"
    parameters = [cell for cell in code if "parameters" in cell.metadata.get("tags", [])]
    assert len(parameters) == 1
    long = [cell.source for cell in code if cell.source.count("\n") + 1 > 20]
    subject = SUBJECTS.get(path.stem, ())
    assert [text.split("\n", 1)[0] for text in long] == list(subject), "what is longer lives in course_lib"
    assert all(text.count("\n") + 1 <= 40 for text in long)
    words = len(re.sub(r"<[^>]+>|`[^`]*`", " ", prose).split())
    code_words = sum(len(cell.source.split()) for cell in code if cell.source.split("\n", 1)[0] not in subject)
    assert 1.25 <= words / code_words <= 9.5, f"{words / code_words:.1f} words of prose per word of code"


def test_committed_with_outputs(lesson):
    notebook, path = lesson
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    assert all(cell.execution_count for cell in code), "run `make notebooks`"
    assert not [o for cell in code for o in cell.outputs if o.output_type == "error"]
    assert path.stat().st_size < 360_000
    assert (
        sum(
            "image/png" in o.get("data", {}) or "image/svg+xml" in o.get("data", {})
            for cell in code
            for o in cell.outputs
        )
        >= 1
    ), "a lesson has a figure"
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"/(home|Users|root|work)/", text), "an output tells of somebody's machine"


def entries(cell, mime):
    return [output["data"][mime] for output in cell.get("outputs", []) if mime in output.get("data", {})]


def test_a_question_can_be_answered_before_its_result_is_seen(lesson):
    """Question and measurement stand in cells of their own, in this order, and each question is taken up."""
    notebook, _ = lesson
    asked, measured = {}, {}
    for position, cell in enumerate(notebook.cells):
        asked |= {entry["name"]: position for entry in entries(cell, QUESTION)}
        measured |= {entry["name"]: position for entry in entries(cell, MIME)}
    source = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert len(asked) >= max(3, len(re.findall(r"\bask=", source))), "each `ask=` left its name on the stored page"
    assert {name: (asked[name], measured.get(name)) for name in asked if measured.get(name, -1) <= asked[name]} == {}


def test_a_listing_is_the_source_as_it_is(lesson):
    """Text, link and lines, also where no HTML is shown; `python tools/notebooks.py --listings` renews them."""
    notebook, _ = lesson
    shown = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    stored = [data for data in shown if re.search("href='../course_lib/.*<pre", data.get("text/html", ""), re.S)]
    assert all(listing.MIME in data for data in stored)
    stale = [
        data[listing.MIME]["name"]
        for data in stored
        if not listing.Listing.named(**data[listing.MIME]).as_stored().items() <= data.items()
    ]
    assert not stale, "python tools/notebooks.py --listings"


def outside_of_comprehensions(node):
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.comprehension, ast.Lambda)):
            yield from outside_of_comprehensions(child)


def test_no_cell_rebinds_what_a_learner_may_run_again(lesson):
    """A function, class or module keeps its name, so that its cell's callers can be run a second time."""
    notebook, _ = lesson
    given, rebound = {}, []
    for cell in notebook.cells:
        if cell.cell_type != "code" or cell.source.startswith("%"):
            continue
        tree = ast.parse(cell.source)
        top = [
            node
            for line in tree.body
            if not isinstance(line, (ast.FunctionDef, ast.ClassDef))
            for node in outside_of_comprehensions(line)
        ]
        stored = {node.id for node in top if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        rebound += sorted(stored & given.keys())
        for node in tree.body:
            names = (
                [node.name]
                if isinstance(node, (ast.FunctionDef, ast.ClassDef))
                else [alias.asname or alias.name for alias in getattr(node, "names", []) if hasattr(alias, "asname")]
            )
            rebound += [name for name in names if given.setdefault(name, type(node)) is not type(node)]
    assert rebound == []


LAUNCHERS = {"launch", "launch_privately"}
ON_THE_CPU = {
    "00_start_here": 1,
    "03_accelerate": 1,
    "04_distributed_evaluation": 1,
    "07_pipeline_schedules": 1,
    "08_tensor_and_hybrid": 2,
    "14_long_contexts": 1,
    "15_experts": 3,
    "16_gradient_audit": 1,
    "17_where_the_time_goes": 1,
    "18_talking_less": 1,
    "19_too_large_to_fine_tune": 1,
}
"""Launches whose ranks compute on the CPU whatever the lesson's device is: one would need more GPUs than ranks have."""


def launches_of(source):
    """Keyword arguments of each call of a launcher, by itself or through functools.partial, as they are written."""
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        called = call.args[0] if call.args and ast.unparse(call.func) == "functools.partial" else call.func
        if getattr(called, "attr", getattr(called, "id", None)) in LAUNCHERS:
            given = {k.arg: ast.unparse(k.value) for k in call.keywords}
            for keyword in call.keywords:  # launch(**{"device": "cpu", **options})
                if keyword.arg is None and isinstance(keyword.value, ast.Dict):
                    given |= {
                        ast.literal_eval(key): ast.unparse(value)
                        for key, value in zip(keyword.value.keys, keyword.value.values, strict=True)
                        if key
                    }
            yield given


def launches():
    """Those of all lessons, by lesson."""
    return {
        name: [
            given
            for cell in nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells
            if cell.cell_type == "code" and "%" not in cell.source[:1]
            for given in launches_of(cell.source)
        ]
        for name in LESSONS
    }


def test_a_slow_machine_has_the_librarys_time():
    """No launch has a limit of its own, but the one that shows a hang."""
    limits = {
        name: [given["timeout"] for given in of_lesson if "timeout" in given] for name, of_lesson in launches().items()
    }
    assert {name: given for name, given in limits.items() if given} == {"07_pipeline_schedules": ["8"]}


def test_ranks_take_the_lessons_device():
    devices = {name: Counter(given.get("device") for given in of_lesson) for name, of_lesson in launches().items()}
    assert sum(counts.total() for counts in devices.values()) > 40
    others = {name: counts.total() - counts["device"] for name, counts in devices.items() if set(counts) - {"device"}}
    assert others == ON_THE_CPU
    assert {device for counts in devices.values() for device in counts} == {"device", "'cpu'"}


def test_no_page_names_a_function_that_torch_deprecates():
    """What a learner types from a hint, a solution or a lesson warns of nothing; planted answers neither."""
    old = {
        name
        for name, thing in vars(torch.distributed).items()
        if type(thing) is types.FunctionType and hasattr(thing, "__deprecated__")
    }
    assert {"reduce_scatter_tensor", "all_gather_into_tensor"} <= old
    name = re.compile(rf"\b({'|'.join(sorted(old, key=len, reverse=True))})\b")
    root = NOTEBOOKS.parent
    pages = {
        path: "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)
        for folder in ("notebooks", "exercises", "solutions")
        for path in sorted((root / folder).glob("*.ipynb"))
    }
    pages |= {path: path.read_text(encoding="utf-8") for path in sorted((root / "solutions/planted").glob("*.py"))}
    assert len(pages) > 40
    assert not {f"{path.relative_to(root)}: {found}" for path, text in pages.items() for found in name.findall(text)}
