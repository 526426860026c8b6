"""What the machine is said to be, against other sources for the same facts and against planted machines."""

import dataclasses
import http.server
import importlib.metadata
import itertools
import json
import mmap
import os
import socket
import subprocess
import sys
import threading

import huggingface_hub.constants
import numpy as np
import psutil
import pytest
import torch

from course_lib.launching.cores import usable_cores
from course_lib.system import hub_reachable, machine


@pytest.fixture
def endpoint(monkeypatch):
    """Set where the Hub is said to be; what the shell says about being offline does not count."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    return lambda url: monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)


class _Answers(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_HEAD(self):
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("status", [200, 503])
def test_any_answer_means_that_the_hub_is_there(endpoint, monkeypatch, status):
    monkeypatch.setattr(_Answers, "status", status)
    with http.server.HTTPServer(("127.0.0.1", 0), _Answers) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        endpoint(f"http://127.0.0.1:{server.server_port}")
        assert hub_reachable.problem() is None
        server.shutdown()


def test_a_refused_connection_is_named_and_a_silent_hub_costs_no_more_than_the_timeout(endpoint):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # bound and not listening: refused, and nobody else can take the port
        endpoint(f"http://127.0.0.1:{bound.getsockname()[1]}")
        assert "refused" in hub_reachable.problem()
        bound.listen()  # and never answers: without a limit the call would not return, and pytest would end it
        assert hub_reachable.problem(timeout=0.3)


def test_a_name_server_that_hangs_costs_no_more_than_the_timeout(endpoint, monkeypatch):
    endpoint("http://hub.invalid")
    told = threading.Event()

    def hangs(*_, **__):
        told.wait()  # it hangs until the answer has been given without it
        raise socket.gaierror("no answer")

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    assert "within 0.2 s" in hub_reachable.problem(timeout=0.2)
    told.set()


def test_offline_mode_asks_nobody(endpoint, monkeypatch):
    endpoint("http://127.0.0.1:1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert hub_reachable.problem() == "HF_HUB_OFFLINE is set"


def test_describe_agrees_with_other_sources(endpoint):
    endpoint("http://127.0.0.1:1")
    found = machine.describe()
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert 1 <= found.cores <= allowed
    assert 0 < found.memory_available_bytes <= found.memory_bytes <= psutil.virtual_memory().total
    assert found.cpu and found.python == ".".join(map(str, sys.version_info[:3]))
    assert len(found.gpus) == torch.cuda.device_count() and "gloo" in found.backends and found.hub_problem
    assert found.engines["torch"] == importlib.metadata.version("torch")
    assert machine.version("no-such-distribution") is None
    assert json.loads(json.dumps(dataclasses.asdict(found)))["cores"] == found.cores


def printed(code):
    """What a new interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="macOS has no affinity to count")
def test_affinity_is_counted():
    own = "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    code = f"import os; from course_lib.launching.cores import usable_cores; {own}; print(usable_cores())"
    assert printed(code) == "1\n"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "20000 100000"}, 1),
        ({"cpu.max": "max 100000"}, 64),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
    ],
)
def test_a_containers_share_of_the_cpu_is_counted(tmp_path, monkeypatch, files, quota):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    assert usable_cores(tmp_path) == quota


@pytest.mark.parametrize(
    ("line", "files", "limit"),
    [
        ("0::/box/inner", {"box/memory.max": "3000", "box/inner/memory.max": "max"}, 3000),
        ("0::/box/inner", {"box/memory.max": "3000", "box/inner/memory.max": "2000"}, 2000),
        ("0::/box", {"box/memory.max": "max"}, None),
        ("4:memory:/job", {"memory/job/memory.limit_in_bytes": "4000"}, 4000),
        ("9:cpu,memory:/", {"memory/memory.limit_in_bytes": "5000"}, 5000),
        ("2:cpu:/job", {"memory/job/memory.limit_in_bytes": "4000"}, None),
    ],
)
def test_memory_limits_of_containers(tmp_path, line, files, limit):
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    proc.write_text(line + "\n")
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    assert machine.cgroup_memory_limit(proc, root) == limit
    assert machine.cgroup_memory_limit(tmp_path / "absent", root) is None


@pytest.mark.parametrize(
    ("features", "native"),
    [
        ({"avx512_f": True, "avx512_bf16": False}, False),  # converts, slower than fp32
        ({"avx512_f": True, "avx512_bf16": True}, True),
        ({"amx_bf16": True}, True),
        ({"neon": True, "bf16": True}, True),
    ],
)
def test_bf16_is_native_only_with_the_instructions(monkeypatch, features, native):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    monkeypatch.setattr(sys, "platform", "linux")
    assert machine.native_bf16("cpu") is native
    monkeypatch.setattr(sys, "platform", "darwin")
    assert machine.native_bf16("cpu") is machine.native_bf16("mps") is False


def test_matmul_rate_counts_two_operations_a_product_term_and_takes_the_fastest(monkeypatch):
    """By a clock that moves in products alone: 20, 10 and 30 ms, again and again."""
    now, took, multiply = [0.0], itertools.cycle([0.02, 0.01, 0.03]), torch.mm

    def product(*args, **kwargs):
        now[0] += next(took)
        return multiply(*args, **kwargs)

    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(machine.time, "perf_counter", lambda: now[0])
    assert machine.matmul_rate(torch.float32, size=32, seconds=0.1) == pytest.approx(2 * 32**3 / 0.01)
    assert now[0] == pytest.approx(0.12), "six products: the sixth begins within the time"
    assert machine.matmul_rate(torch.bfloat16, size=16, seconds=0) > 0, "at least one"


def fresh_pages(size):
    """Memory written to that no allocator had kept, whatever ran before in this process."""
    pages = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)
    pages[:] = 1
    return pages


def test_peak_memory_grows_with_what_is_held():
    before = machine.peak_memory_bytes("cpu")
    size = max(0, before - psutil.Process().memory_info().rss) + 200_000_000
    block = fresh_pages(size)
    grown = machine.peak_memory_bytes("cpu") - before
    del block
    assert 190_000_000 < grown < 260_000_000
    assert machine.peak_memory_bytes("cpu") - before > 190_000_000  # a peak does not fall


def test_peak_memory_is_the_process_own_and_not_its_launcher_s():
    block = fresh_pages(psutil.Process().memory_info().rss // 2 + 600_000_000)
    code = "from course_lib.system import hub_reachable as hub, machine; print(machine.peak_memory_bytes('cpu'))"
    assert int(printed(code)) < 600_000_000 < block.size
