"""Data sets on the Hub: loaded over HTTP from one on this machine, from the cache, and not at all."""

import hashlib
import http.server
import json
import socket
import threading
import urllib.parse

import datasets
import huggingface_hub.constants
import pytest
import yaml

from course_lib.errors import DataError
from tests.data.local_cases import load, sizes_of, table

COMMIT = "c0ffee" + "0" * 34
NAMES = ["sadness", "joy", "love", "anger", "fear", "surprise"]
LABEL = {"name": "label", "dtype": {"class_label": {"names": {str(i): name for i, name in enumerate(NAMES)}}}}
SPLITS = [{"split": split, "path": f"split/{split}-*"} for split in ("train", "test")]
ONE = {
    "dataset_info": {"features": [{"name": "text", "dtype": "string"}, LABEL]},
    "configs": [{"config_name": "default", "data_files": SPLITS}],
}
TWO = {"configs": [{"config_name": name, "data_files": f"{name}/train*"} for name in ("split", "other")]}


def repository(card):
    """Files by name."""
    return {
        "README.md": f"---\n{yaml.safe_dump(card)}---\n".encode(),
        "split/train-00000-of-00001.parquet": table(120, 6).to_parquet(),
        "split/test-00000-of-00001.parquet": table(24, 6).to_parquet(),
        "other/train.parquet": table(60, 6).to_parquet(),
    }


REPOSITORIES = {"dair-ai/emotion": repository({"license": "other"} | ONE), "acme/several": repository(TWO)}


class Hub(http.server.BaseHTTPRequestHandler):
    """The part of the Hub's API that `datasets` uses, for the files above."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path = urllib.parse.unquote(urllib.parse.urlparse(self.path).path).strip("/").split("/")
        api = path[:1] == ["api"]
        path = path[1:] if api else path
        name, rest = "/".join(path[1:3]), path[3:]
        files = REPOSITORIES.get(name)
        if path == [""]:
            self.answer(b"")
        elif "gated" in name:
            self.answer(b"", 403, "GatedRepo")
        elif files is None:
            self.answer(b"", 404, "RepoNotFound")
        elif rest[:1] in (["revision"], ["resolve"]) and rest[1] not in ("main", COMMIT):
            self.answer(b"", 404, "RevisionNotFound")
        elif not api:
            content = files.get("/".join(rest[2:]))
            self.answer(content or b"", *((200, "") if content else (404, "EntryNotFound")))
        elif rest[:1] == ["tree"]:
            here = "/".join(rest[2:])
            folders = () if here else ("split", "other")
            listed = [{"type": "directory", "path": folder, "oid": "0" * 40} for folder in folders]
            for file, content in files.items():
                if file.rpartition("/")[0] == here:
                    oid = hashlib.sha1(content).hexdigest()
                    listed.append({"type": "file", "path": file, "size": len(content), "oid": oid})
            self.answer(json.dumps(listed).encode())
        else:
            known = {"id": name, "sha": COMMIT, "private": False, "tags": [], "downloads": 0, "likes": 0}
            siblings = [{"rfilename": file} for file in files]
            self.answer(json.dumps(known | {"cardData": {"license": "other"}, "siblings": siblings}).encode())

    do_HEAD = do_GET

    def answer(self, body, status=200, error=""):
        self.send_response(status)
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(autouse=True)
def empty_caches(cache, monkeypatch, tmp_path):
    """And no proxy."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def online(monkeypatch):
    """A function that tells both clients where the Hub is."""
    for module in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)

    def at(address):
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", address)

    return at


@pytest.fixture
def hub(online):
    """A Hub on this machine."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        online(f"http://127.0.0.1:{server.server_port}")
        yield
        server.shutdown()


def test_a_data_set_on_the_hub_loads_and_then_loads_offline(hub, monkeypatch):
    online = load("dair-ai/emotion")
    assert online.label_names == tuple(NAMES)
    assert sizes_of(online) == {"train": 108, "validation": 12, "test": 24} and online.name == "dair-ai/emotion"
    cited = "Saravia et al., CARER, EMNLP 2018; licence other"
    assert online.source == f"dair-ai/emotion at c0ffee000000 from the Hub; {cited}"
    assert load(f"emotion@{COMMIT}").fingerprint == load("dair-ai/emotion@main").fingerprint == online.fingerprint
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    offline = load("dair-ai/emotion")
    assert offline.fingerprint == online.fingerprint and "from the Hub's local cache" in offline.source
    with pytest.raises(DataError, match=r"revision `main` of `emotion` needs the Hub, .*HF_HUB_OFFLINE is set"):
        load("emotion@main")


def test_a_configuration_is_taken_or_asked_for(hub):
    assert len(load("acme/several", dataset_config="other").splits["train"]) == 48
    with pytest.raises(DataError, match=r"configurations \['split', 'other'\]: choose one with --dataset_config"):
        load("acme/several")
    with pytest.raises(DataError, match=r"has the configurations \['split', 'other'\]"):
        load("acme/several", dataset_config="spilt")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("acme/gated", "`acme/gated` is gated: accept its terms at http.*/datasets/acme/gated, then run `hf auth"),
        ("acme/absent", "not bundled, no local file or folder, and not on the Hub: choose from `tweets`, `pydocs`, "),
        ("dair-ai/emotions", "not on the Hub: did you mean `dair-ai/emotion`.; a private one needs `hf auth login`"),
        ("dair-ai/emotion@v9", "data set `dair-ai/emotion` has no revision `v9`"),
        ("no such name!", "and not on the Hub"),
    ],
)
def test_what_the_hub_says_arrives_in_one_line(hub, name, said):
    with pytest.raises(DataError, match=said):
        load(name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("imbd", r"not in the local cache, .*cannot be reached \(HF_HUB_OFFLINE is set\): did you mean `imdb`"),
        ("ag_news", r"HF_HUB_OFFLINE is set\): tweets, pydocs and local files work offline$"),
    ],
)
def test_offline_it_says_what_works(name, said):
    with pytest.raises(DataError, match=said):
        load(name)


def test_without_a_network_an_unknown_name_is_asked_for_once(online, monkeypatch):
    """The Hub's client would try again for 23 seconds."""
    online("http://192.0.2.1")  # reserved: nobody answers
    asked = []

    def nobody(address, *_, **__):
        asked.append(address)
        raise OSError("no route to host")

    monkeypatch.setattr(socket, "create_connection", nobody)
    with pytest.raises(DataError, match="the Hub cannot be reached"):
        load("acme/thing")
    assert asked == [("192.0.2.1", 80)]
