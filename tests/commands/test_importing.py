"""A command's imports: which they are; nothing is collected meanwhile, and what they made is set aside for good."""

import gc
import subprocess
import sys

import pytest

from course_lib.commands.options import importing

MADE = "class Loop:\n    def __init__(self):\n        self.own = self\nheld = [Loop() for _ in range(20_000)]\n"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of many objects, not yet imported."""
    (tmp_path / "of_many_objects.py").write_text(MADE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "of_many_objects"
    sys.modules.pop("of_many_objects", None)


@pytest.fixture
def collections():
    """How often garbage was looked for so far, as a list that grows."""
    seen = []
    gc.callbacks.append(lambda phase, _: seen.append(phase))
    yield seen
    gc.callbacks.pop()


def test_without_it_an_import_is_interrupted(module, collections):
    __import__(module)
    assert len(collections) > 10


def test_nothing_is_collected_and_what_is_new_is_set_aside(module, collections):
    gc.collect()  # or its turn might come before the import begins
    collections.clear()
    before = gc.get_freeze_count()
    with importing():
        __import__(module)
    assert collections == [] and gc.isenabled()
    after = gc.get_freeze_count()
    assert after > before + 20_000
    with importing():
        __import__(module)
    assert gc.get_freeze_count() <= after  # what was set aside earlier may be freed at any time


def test_off_stays_off():
    gc.disable()
    try:
        with pytest.raises(ImportError), importing():
            __import__("no_such_module_of_ours")
        assert not gc.isenabled()
    finally:
        gc.enable()


NOT_FOR_TRAINING = (
    "evaluate scipy.stats sklearn requests deepspeed matplotlib IPython wandb trackio torch.distributed.pipelining"
)
USED = "torch transformers accelerate datasets"
HEAVY = f"{USED} numpy pandas pyarrow pydantic yaml huggingface_hub boto3 {NOT_FOR_TRAINING}".split()
LIGHT_COMMANDS = {  # what each brings in when it runs, of what is heavy
    "schedule --schedule 1f1b --ranks 4 --microbatches 8": "",
    "plan --model facebook/opt-6.7b --gpu A100-80 --gpus 8": "yaml",
    "bench --list_models": "yaml",
    "runs {folder}": "numpy pandas pyarrow",
    "train --dataset": "",
    "train --help": "",
    "doctor --help": "",
}
BROUGHT_IN = """
import sys
from course_lib import cli
try:
    cli.main({arguments})
except SystemExit:
    pass
print(*[name for name in {heavy} if name in sys.modules])
"""


def brought_in(program):
    """The heavy packages that a new interpreter has imported when a program ends."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("line", LIGHT_COMMANDS)
def test_a_command_without_a_model_imports_no_torch(tmp_path, line):
    arguments = line.format(folder=tmp_path).split()
    assert brought_in(BROUGHT_IN.format(arguments=arguments, heavy=HEAVY)) == set(LIGHT_COMMANDS[line].split())


def test_a_training_imports_what_it_uses_and_no_more():
    """What the planner, the tracker, the metric of lesson 04, DeepSpeed and the figures need, a plain run does not."""
    program = f"import sys, course_lib.training.run\nprint(*[name for name in {HEAVY} if name in sys.modules])"
    used = brought_in(program)
    assert used >= set(USED.split()) and used & set(NOT_FOR_TRAINING.split()) == set()
