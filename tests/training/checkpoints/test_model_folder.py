"""Writing the trained model takes no longer for an engine that did not train it."""

import json
import subprocess
import sys

import pytest

WRITE = """
import json, sys
from pathlib import Path
from accelerate import Accelerator
from transformers import AutoModelForCausalLM
from course_lib.modeling import presets
from course_lib.training.checkpoints.stored_state import StoredState
from course_lib.training.checkpoints.model_folder import write_model

config, tokenizer = presets.build("tiny-gpt2", ["some words to make a vocabulary of"], 16)
model = AutoModelForCausalLM.from_config(config)
folder = Path(sys.argv[1])
stored = StoredState(None, model)
stored.take(model, Accelerator(cpu=True).prepare(model), None)
assert stored.bare_model() is model
write_model(folder / "ours", stored.bare_model(), model.state_dict(), tokenizer, "# a card")
imported = ["deepspeed" in sys.modules]
model.save_pretrained(folder / "theirs")
imported.append("deepspeed" in sys.modules)
write_model(folder / "again", model, model.state_dict(), tokenizer, "# a card")
weights = {(folder / name / "model.safetensors").read_bytes() for name in ("ours", "theirs", "again")}
print(json.dumps([*imported, len(weights)]))
"""


@pytest.mark.long
def test_deepspeed_is_not_imported_to_write_a_model(tmp_path):
    done = subprocess.run([sys.executable, "-c", WRITE, str(tmp_path)], capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stderr
    ours, theirs, different = json.loads(done.stdout.splitlines()[-1])
    assert (ours, theirs, different) == (False, True, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "ours", "theirs"]
