"""Keys stay out of what is written."""

import subprocess
import sys

import pytest

from course_lib.cli import main
from course_lib.errors import ConfigError
from course_lib.tracking.redact import HIDDEN, is_secret, read_env_file, redact, redacted

KEYS = {
    "hub": "hf_" + "a1B2" * 8,
    "wandb": "wandb_v1_" + "k3Y_" * 8,
    "github": "ghp_" + "Z9y8" * 9,
    "aws": "AKIA" + "ABCDEFGH12345678",
    "in an address": "https://user:pa55word@example.org/x",
    "in a header": "Authorization: Bearer abcdefgh12345678",
    "in a query": "https://example.org/?token=abcdefgh12345678",
}


@pytest.mark.parametrize("text", KEYS.values(), ids=KEYS)
def test_what_has_the_shape_of_a_key_is_hidden(text):
    shown = redact(f"the service said: {text} was refused")
    assert HIDDEN in shown and shown.startswith("the service said: ") and shown.endswith(" was refused")
    assert not any(secret in shown for secret in ("a1B2", "k3Y_", "Z9y8", "ABCDEFGH1", "pa55word", "abcdefgh"))


def test_a_key_of_any_shape_is_hidden_once_it_is_in_the_environment(monkeypatch):
    key = "0123456789abcdef" * 2
    assert redact(f"key {key}") == f"key {key}"
    monkeypatch.setenv("WANDB_API_KEY", key)
    assert redact(f"key {key}") == f"key {HIDDEN}"
    given = {"note": [f"a {key}"], "depth": {"hf_token": "plain", "max_steps": 3}}
    assert redacted(given) == {"note": [f"a {HIDDEN}"], "depth": {"hf_token": HIDDEN, "max_steps": 3}}


def test_ordinary_words_stay(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "sometimes")
    assert redact("sometimes the loss_weighting is token") == "sometimes the loss_weighting is token"
    config = {"loss_weighting": "token", "model": "minilm", "revision": "0" * 40, "password": None}
    assert redacted(config) == config
    names = ["HF_TOKEN", "api_key", "AWS_SECRET_ACCESS_KEY", "tokens", "monkey"]
    assert [name for name in names if is_secret(name)] == names[:3]


def test_an_env_file_is_read_and_a_wrong_line_is_named_but_not_shown(tmp_path):
    path = tmp_path / ".env"
    path.write_text("# keys\nexport WANDB_API_KEY='abc=def'\n\nHF_TOKEN = x\n")
    assert read_env_file(path) == {"WANDB_API_KEY": "abc=def", "HF_TOKEN": "x"}
    path.write_text("A=1\nsecretvalue\n")
    with pytest.raises(ConfigError, match="line 2 of env_file .* is not NAME=value") as error:
        read_env_file(path)
    assert "secretvalue" not in str(error.value)
    with pytest.raises(ConfigError, match="cannot read env_file"):
        read_env_file(tmp_path / "none")


def test_no_error_of_the_command_line_shows_a_key(monkeypatch, capsys, tmp_path):
    key = "0123456789abcdef" * 2
    monkeypatch.setenv("WANDB_API_KEY", key)
    assert main(["train", "--config", f"{tmp_path}/{key}.yaml"]) == ConfigError.exit_code
    told = capsys.readouterr().err
    assert key not in told and f"no config file {tmp_path}/{HIDDEN}.yaml" in told
    program = (
        f"import sys\nfrom course_lib import cli\ndef fail(*_):\n    raise ValueError('refused {key}')\n"
        "cli.COMMANDS[0].run = fail\nsys.exit(cli.main(['train']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.returncode == 1 and f"ValueError: refused {HIDDEN}" in done.stderr and key not in done.stderr
    assert "Traceback" in done.stderr
