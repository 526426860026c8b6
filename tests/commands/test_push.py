"""`course push FOLDER` alone: what the repository is called."""

from pathlib import Path

import pytest

from course_lib.commands import push


@pytest.mark.parametrize(
    ("folder", "name"),
    [("runs/tweets/model", "tweets"), ("runs/tweets/model/", "tweets"), ("somewhere/my-bert", "my-bert")],
)
def test_the_repository_is_called_as_the_run(folder, name):
    assert push.repository(Path(folder)) == name


def test_here_too(tmp_path, monkeypatch):
    (tmp_path / "tweets" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "tweets" / "model")
    assert push.repository(Path(".")) == "tweets"
