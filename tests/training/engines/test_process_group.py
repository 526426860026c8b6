"""How the process group is made: its time-out, its interface, a group of one."""

import contextlib
import datetime
import os
import types
from unittest import mock

import pytest
import torch

from course_lib.training.engines import process_group

TIMEOUT = datetime.timedelta(minutes=30)


@pytest.fixture
def network(monkeypatch):
    """A machine at 10.1.2.3 on `ens5`, with a bridge, whose own name Debian gives 127.0.1.1."""
    ways = {"head": "10.1.2.3", "itself": "127.0.1.1", "192.0.2.1": "10.1.2.3"}
    interfaces = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "ens5": "10.1.2.3"}

    class Probe(contextlib.nullcontext):
        def __init__(self, family, kind):
            super().__init__(self)

        def connect(self, address):
            self.own = ways[address[0]]

        def getsockname(self):
            return self.own, 1

    def resolve(name, port, type):
        if name not in ways:
            raise OSError(f"no {name}")
        return [(2, type, 0, "", (name, port))]

    monkeypatch.setattr(process_group.socket, "socket", Probe)
    monkeypatch.setattr(process_group.socket, "getaddrinfo", resolve)
    known = {name: [types.SimpleNamespace(address=address)] for name, address in interfaces.items()}
    monkeypatch.setattr(process_group.psutil, "net_if_addrs", lambda: known)
    return ways


def chosen(**environment):
    """The interface that ranks with these variables take."""
    given = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"} | environment
    others = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    with mock.patch.dict(os.environ, others | given, clear=True):
        process_group.choose_interface()
        return os.environ.get("GLOO_SOCKET_IFNAME")


def test_the_interface_is_the_one_towards_the_head(network):
    assert chosen(MASTER_ADDR="head") == "ens5"


def test_a_head_that_knows_itself_by_the_loopback_takes_the_one_towards_the_others(network):
    assert chosen(MASTER_ADDR="itself") == "ens5"
    del network["192.0.2.1"]  # no way out
    assert chosen(MASTER_ADDR="itself") is None


def test_on_one_machine_and_where_somebody_has_chosen_nothing_is_changed(network):
    assert chosen(WORLD_SIZE="2", MASTER_ADDR="head") is None
    assert chosen(MASTER_ADDR="head", GLOO_SOCKET_IFNAME="ib0") == "ib0"
    assert chosen() is None


def test_a_backend_waits_longer_than_the_watchdog_lets_a_rank_work():
    assert process_group.patience(0) == process_group.patience(60) == TIMEOUT
    assert process_group.patience(300) == datetime.timedelta(minutes=55)


def test_without_a_launcher_no_backend_is_named(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert process_group.process_group(torch.device("cuda"), 0).to_kwargs() == {"backend": None, "timeout": TIMEOUT}
    monkeypatch.setenv("LOCAL_RANK", "0")
    named = {kind: process_group.process_group(torch.device(kind), 0).backend for kind in ("cpu", "cuda", "mps")}
    assert named == {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "mps": None}


def test_a_group_of_one_leaves_the_environment_as_it_was(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    before = dict(os.environ)
    with process_group.group_of_one():
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")
    assert dict(os.environ) == before
    monkeypatch.setenv("RANK", "3")
    with process_group.group_of_one():
        assert os.environ["RANK"] == "3" and os.environ["MASTER_ADDR"] == "elsewhere"
