"""Data sets on the Hub: loaded over HTTP from one on this machine, from the cache, and not at all."""

import hashlib
import http.server
import io
import json
import socket
import threading
import urllib.parse

import datasets
import huggingface_hub.constants
import pandas as pd
import pytest

from course_lib.config import DataConfig
from course_lib.data import DataConnector, sources
from course_lib.errors import DataError

COMMIT = "c0ffee" + "0" * 34
NAMES = ["sadness", "joy", "love", "anger", "fear", "surprise"]
FEATURES = "\n".join(
    [
        "dataset_info:",
        "  features:",
        "  - {name: text, dtype: string}",
        "  - name: label",
        "    dtype: {class_label: {names: {" + ", ".join(f"'{i}': {name}" for i, name in enumerate(NAMES)) + "}}}",
    ]
)
ONE = (
    "configs:\n- config_name: default\n  data_files:\n  - {split: train, path: split/train-*}\n"
    "  - {split: test, path: split/test-*}"
)
TWO = "configs:\n- {config_name: split, data_files: split/train-*}\n- {config_name: other, data_files: other/*}"


def parquet(size):
    out = io.BytesIO()
    pd.DataFrame({"text": [f"row {row}" for row in range(size)], "label": [row % 6 for row in range(size)]}).to_parquet(
        out
    )
    return out.getvalue()


def repository(*card):
    return {
        "README.md": "\n".join(["---", *card, "---", ""]).encode(),
        "split/train-00000-of-00001.parquet": parquet(120),
        "split/test-00000-of-00001.parquet": parquet(24),
        "other/train.parquet": parquet(60),
    }


REPOSITORIES = {"dair-ai/emotion": repository("license: other", FEATURES, ONE), "acme/several": repository(TWO)}


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
            self.answer(
                json.dumps(
                    [
                        {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                        for file, content in files.items()
                        if file.rpartition("/")[0] == here
                    ]
                    + (
                        [{"type": "directory", "path": name, "oid": "0" * 40} for name in ("split", "other")]
                        if not here
                        else []
                    )
                ).encode()
            )
        else:
            self.answer(
                json.dumps(
                    {
                        "id": name,
                        "sha": COMMIT,
                        "private": False,
                        "tags": [],
                        "downloads": 0,
                        "likes": 0,
                        "cardData": {"license": "other"},
                        "siblings": [{"rfilename": file} for file in files],
                    }
                ).encode()
            )

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


@pytest.fixture
def caches(monkeypatch, tmp_path):
    """Empty caches, and no proxy."""
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))


@pytest.fixture
def hub(caches, monkeypatch):
    """A Hub on this machine."""
    for module in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", here)
        monkeypatch.setattr(
            huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", here + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", here)
        yield
        server.shutdown()


def load(name, **options):
    return DataConnector(DataConfig(dataset=name, **options)).load()


def test_a_data_set_on_the_hub_loads_and_then_loads_offline(hub, monkeypatch):
    online = load("dair-ai/emotion")
    assert online.label_names == tuple(NAMES)
    assert {split: len(rows) for split, rows in online.splits.items()} == {"train": 108, "validation": 12, "test": 24}
    assert online.name == "dair-ai/emotion"
    assert online.source == (
        "dair-ai/emotion at c0ffee000000 from the Hub; Saravia et al., CARER, EMNLP 2018; licence other"
    )
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
        (
            "acme/gated",
            "data set `acme/gated` is gated: accept its terms at http.*/datasets/acme/gated, then run `hf auth",
        ),
        (
            "acme/absent",
            "is not bundled, no local file or folder, and not on the Hub: choose from `tweets`, `pydocs`, ",
        ),
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
        (
            "imbd",
            r"not in the local cache, and the Hub cannot be reached \(HF_HUB_OFFLINE is set\): did you mean `imdb`",
        ),
        ("ag_news", r"HF_HUB_OFFLINE is set\): tweets, pydocs and local files work offline$"),
    ],
)
def test_offline_it_says_what_works(caches, name, said):
    with pytest.raises(DataError, match=said):
        load(name)


def test_without_a_network_an_unknown_name_is_asked_for_once(caches, monkeypatch):
    """The Hub's client would try again for 23 seconds."""
    for module in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://192.0.2.1")  # reserved: nobody answers
    asked = []

    def nobody(address, *_, **__):
        asked.append(address)
        raise OSError("no route to host")

    monkeypatch.setattr(socket, "create_connection", nobody)
    with pytest.raises(DataError, match="the Hub cannot be reached"):
        load("acme/thing")
    assert asked == [("192.0.2.1", 80)]


def test_the_names_that_users_know_lead_to_their_repositories():
    assert {name: known.repository for name, known in sources.KNOWN.items()} == {
        "dair-ai/emotion": "dair-ai/emotion",
        "imdb": "stanfordnlp/imdb",
        "ag_news": "fancyzhx/ag_news",
        "yelp_polarity": "fancyzhx/yelp_polarity",
    }
    assert all(sources.BY_NAME[known.repository] is known for known in sources.KNOWN.values())
