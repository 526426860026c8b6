"""Benchmark plans."""

import json

from course_lib import cli
from course_lib.planning import benchmark, models


def test_a_plan_of_runs_as_the_document_asks_for_it():
    plan = benchmark.generate("bert-base-uncased", ["cuda", "rocm"], distributed=True, max_gpus=4)
    assert json.loads(json.dumps(plan)) == plan
    assert {(run["accelerator"], run["gpus"]) for run in plan["runs"]} == {
        (chip, gpus) for chip in ("A100-80", "MI300X") for gpus in (1, 2, 4)
    }
    assert any(run["strategy"] == "DDP" and "torchrun" in run["command"] for run in plan["runs"])
    assert all(run["predicted"]["tokens_per_second"] > 0 for run in plan["runs"])
    alone = benchmark.generate("bert-base-uncased", max_gpus=4)
    assert {run["gpus"] for run in alone["runs"]} == {1}


def test_what_does_not_fit_is_left_out_with_the_reason():
    plan = benchmark.generate("llama-70b", ["T4"], max_gpus=1)
    assert not plan["runs"] and "T4" in str(plan["left_out"])


def test_the_command_lists_and_writes(tmp_path, capsys):
    assert cli.main(["bench", "--list_models"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(models.names())
    file = tmp_path / "bert.json"
    assert cli.main(f"bench --model bert-base-uncased --distributed --max_gpus 4 --output {file}".split()) == 0
    assert json.loads(file.read_text(encoding="utf-8"))["model"] == "google-bert/bert-base-uncased"
