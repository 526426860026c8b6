"""A trained model goes to a Hub on loopback by the real client, and every failure is one line that loses nothing."""

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants, hf_hub_download
from transformers import AutoModelForSequenceClassification

from tests.cloud.stand_in_hub import LIMITED, TOKEN, Hub
from tests.forked_process import run_course
from tests.long_cases import some

COURSE = Path(sys.executable).parent / "course"
TINY = shlex.split(
    "--model tiny-bert --max_train_samples 32 --max_eval_samples 16 --max_steps 2 --max_length 32 --baselines false "
    "--progress_bar false --device cpu --save_steps 1"
)


def run(*arguments, url, home, code, token=TOKEN):
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env |= {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    env |= {"HF_TOKEN": token} if token else {}
    done = subprocess.run([str(COURSE), *map(str, arguments)], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module", params=some(["regular", "lfs"], "regular"))
def pushed(request, tmp_path_factory):
    """A run that trains and pushes to a private repository, in one of the two upload modes."""
    folder = tmp_path_factory.mktemp(request.param)
    with Hub(request.param) as hub:
        line = ("train", *TINY, "--output_dir", folder / "run", "--push_to_hub", "tweets-bert", "--hub_private")
        yield hub, folder, run(*line, url=hub.url, home=folder / "home", code=0)


def test_the_model_is_there_with_its_card(pushed):
    hub, folder, done = pushed
    files = hub.repos["learner/tweets-bert"]
    model = folder / "run" / "model"
    assert {"config.json", "model.safetensors", "README.md", "tokenizer.json"} <= files.keys()
    assert [name for name in files if files[name] != (model / name).read_bytes()] in ([], ["README.md"])
    assert hub.private == {"learner/tweets-bert"}
    card = files["README.md"].decode()
    assert "learner/tweets-bert" in card and str(folder) not in card
    assert "model-index" in card and "accuracy" in card and "tweets" in card
    assert len(hub.uploads) == (1 if hub.mode == "lfs" else 0)
    assert f"pushed: {hub.url}/learner/tweets-bert/commit/" in done.stdout
    paths = [path for method, path in hub.asked if method == "POST"]  # asked for before training, and sent once
    assert paths[0] == "/api/repos/create" and sum("/commit/" in path for path in paths) == 1


def test_the_model_comes_back(pushed, tmp_path, monkeypatch):
    """By the client that `from_pretrained` asks."""
    hub, folder, _ = pushed
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    config, _ = (
        hf_hub_download("learner/tweets-bert", name, endpoint=hub.url, token=TOKEN, cache_dir=tmp_path)
        for name in ("config.json", "model.safetensors")
    )
    back, kept = (
        AutoModelForSequenceClassification.from_pretrained(path).state_dict()
        for path in (Path(config).parent, folder / "run" / "model")
    )
    torch.testing.assert_close(back, kept, rtol=0, atol=0)


def test_the_token_is_written_nowhere(pushed):
    hub, folder, done = pushed
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} | hub.repos["learner/tweets-bert"]
    assert len(files) > 15 and [path for path, content in files.items() if TOKEN.encode() in content] == []
    assert TOKEN not in done.stdout + done.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A trained model's folder."""
    folder = tmp_path_factory.mktemp("trained")
    done = run_course("train", *TINY, "--output_dir", folder / "run")
    assert done.returncode == 0, done.stderr
    return folder / "run" / "model"


def snapshot(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_push_that_breaks_off_goes_on_without_sending_twice(model, tmp_path):
    second = model / "extra.safetensors"
    second.write_bytes(b"x" * 1000)
    before = snapshot(model)
    line = ("push", model, "--push_to_hub", "learner/again")
    with Hub("lfs") as hub:
        hub.break_after = 1
        broken = run(*line, url=hub.url, home=tmp_path, code=1)
        assert "cannot push to learner/again" in broken.stderr and f"go on with `course push {model}" in broken.stderr
        assert len(hub.uploads) == 1 and hub.repos["learner/again"] == {}
        hub.break_after = None
        run(*line, url=hub.url, home=tmp_path, code=0)
        assert len(hub.uploads) == 2 == len(set(hub.uploads))
        assert hub.repos["learner/again"].keys() >= {"model.safetensors", "extra.safetensors"} and not hub.private
    assert snapshot(model) == before
    second.unlink()


@pytest.mark.parametrize(
    ("token", "told"),
    [
        (None, "push_to_hub needs a token of the Hub, and there is none: set HF_TOKEN"),
        ("hf_unknownTOKEN0123456789", "the Hub does not know the token"),
        (LIMITED, "the token has no right to write there"),
    ],
    ids=["none", "unknown", "read-only"],
)
def test_a_token_that_will_not_do_is_refused_before_training(tmp_path, token, told):
    line = ("train", *TINY, "--output_dir", tmp_path / "run", "--push_to_hub", "x")
    with Hub() as hub:
        done = run(*line, url=hub.url, token=token, home=tmp_path, code=1)
    assert told in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists() and not (token and token in done.stderr)


def test_no_network_is_one_line_and_the_model_stays(model, tmp_path):
    before = snapshot(model)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # bound and not listening: refused, and nobody else can take the port
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        done = run("push", model, "--push_to_hub", "x", url=url, home=tmp_path, code=1)
    assert "cannot be reached" in done.stderr and "the model is whole" in done.stderr
    assert snapshot(model) == before


def test_a_folder_without_a_model_and_a_name_that_is_none(model, tmp_path):
    with Hub() as hub:
        empty = run("push", tmp_path, "--push_to_hub", "x", url=hub.url, home=tmp_path, code=1)
        wrong = run("push", model, "--push_to_hub", "a/b/c", url=hub.url, home=tmp_path, code=1)
    assert "holds no model" in empty.stderr and "is no name of a repository" in wrong.stderr
    assert hub.repos == {}
