"""`course push FOLDER` alone: what the repository is called."""

from pathlib import Path

import pytest

from course_lib.commands import push


@pytest.mark.parametrize(
    ("folder", "name"), [("tweets/model", "tweets"), ("tweets/model/", "tweets"), ("my-bert", "my-bert")]
)
def test_the_repository_is_called_as_the_run(tmp_path, monkeypatch, folder, name):
    assert push.repository(tmp_path / folder) == name
    (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / folder)
    assert push.repository(Path(".")) == name, "from within it, too"
