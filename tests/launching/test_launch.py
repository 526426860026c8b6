"""The launcher: real ranks, labelled output, first causes, stacks of hung ranks, and nothing left running."""

import atexit
import datetime
import functools
import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import nbformat
import psutil
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from torch.distributed.rendezvous import rendezvous

from course_lib.errors import EXIT_HUNG, ConfigError, LaunchError
from course_lib.launching import forks, openmp, own_time, rank_process, supervisor
from course_lib.launching import launch as start
from course_lib.launching.launch import RankError, RanksHung, launch
from course_lib.launching.output import LabelledOutput
from course_lib.launching.rank_process import is_consequence
from tests.long_cases import some


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No process, descriptor or environment variable outlives a launch."""

    def servers():  # Python's resource tracker and fork server are one each for all ranks, and stay
        made = multiprocessing.resource_tracker._resource_tracker, multiprocessing.forkserver._forkserver
        return {made[0]._pid, made[1]._forkserver_pid} - {None}

    servers_before, before, open_before = servers(), environment(), len(os.listdir("/proc/self/fd"))
    yield
    below = [process for process in psutil.Process().children(recursive=True) if process.pid not in servers()]
    assert not psutil.wait_procs(below, timeout=240)[1]
    assert environment() == before
    # A process's first store keeps a pipe; a fork server and the tracker are held by one each.
    assert len(os.listdir("/proc/self/fd")) <= open_before + 2 + len(servers() - servers_before)


@pytest.fixture(params=some(["fork", "forkserver"], "fork"))
def either(request, monkeypatch):
    """The test runs with ranks that are forked from here, and with such from the fork server."""
    monkeypatch.setattr(forks, "default_start_method", lambda: request.param)
    if request.param == "fork":
        yield
        return
    forks.serve()
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import all that tests do
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def environment():
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def rank():
    return int(os.environ["RANK"])


def add_up(value):
    dist.init_process_group("gloo")
    tensor = torch.full((3,), float(rank() + value))
    dist.all_reduce(tensor)
    return rank(), tensor.tolist(), dist.get_world_size()


@pytest.mark.parametrize("number", [1, 2, 4])
def test_values_come_back_by_rank(number):
    total = sum(10.0 + rank for rank in range(number))
    wanted = [(rank, [total] * 3, number) for rank in range(number)]
    assert launch(add_up, 10, num_processes=number, timeout=240) == wanted


@pytest.mark.usefixtures("either")
def test_a_closure_and_the_callers_memory_after_it_used_its_cores():
    torch.randn(400, 400) @ torch.randn(400, 400)
    big = torch.arange(160_000).view(400, 400)
    assert launch(lambda scale: int(big.sum()) * scale, scale=2) == [int(big.sum()) * 2] * 2


def work_on_all_cores():
    torch.set_num_threads(2)
    return float((torch.ones(600, 600) @ torch.ones(600, 600)).mean())


def test_a_rank_looks_for_garbage_in_what_it_makes_itself_alone():
    ((kept, own),) = launch(lambda: (gc.get_freeze_count(), len(gc.get_objects())), num_processes=1)
    assert kept > 100_000 > own


@pytest.fixture
def own_threads():
    """The number of threads that torch uses here is as before, in the end."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("own_threads")
def test_ranks_may_use_several_cores_after_the_caller_did(monkeypatch):
    """Without ending OpenMP's workers first, a forked rank waits for workers that it does not have."""
    work_on_all_cores()
    assert launch(work_on_all_cores, num_processes=2, timeout=320) == [600.0, 600.0]
    work_on_all_cores()
    monkeypatch.setattr(openmp, "end_threads", lambda: None)
    with pytest.raises(RanksHung):
        launch(work_on_all_cores, num_processes=1, timeout=4)


def test_where_openmp_cannot_end_its_threads_ranks_come_from_a_clean_process(monkeypatch):
    """GCC's OpenMP before version 9, which torch 2.6 brings: ``make long`` has such a torch."""
    assert forks.default_start_method() == "fork" and not forks.why_not_fork("cpu")
    monkeypatch.setattr(openmp, "PAUSE", "omp_is_older")
    assert forks.default_start_method() == "forkserver"
    assert launch(work_on_all_cores, num_processes=2, timeout=320) == [600.0, 600.0]
    with pytest.raises(LaunchError, match=r"threads of (libgomp\S*\.so\S* )+cannot be ended before a fork"):
        launch(work_on_all_cores, start_method="fork")


@pytest.mark.usefixtures("own_threads")
def test_a_ranks_threads_find_a_pool_though_all_of_them_ask_at_once(monkeypatch):
    """What gloo's thread and the backward do in a rank that is told how many threads it has."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    losses, all_are_there = [torch.ones(2**16, requires_grad=True).exp().sum() for _ in range(8)], threading.Barrier(8)

    def backward(loss):
        all_are_there.wait()
        loss.backward()

    def on_rank():
        with ThreadPoolExecutor(len(losses)) as threads:
            return len(list(threads.map(backward, losses)))

    torch.set_num_threads(2)  # new threads are told of a number that was set
    assert [launch(on_rank, num_processes=3) for _ in range(3)] == [[8] * 3] * 3


@pytest.mark.usefixtures("either")
def test_accelerate_finds_the_ranks():
    def look():
        accelerator, state = Accelerator(), PartialState()
        return state.num_processes, accelerator.num_processes, accelerator.process_index, str(accelerator.device.type)

    Accelerator()  # one in the notebook itself does not stand in the way
    try:
        assert launch(look) == [(2, 2, 0, "cpu"), (2, 2, 1, "cpu")]
        assert PartialState._shared_state  # and stays
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("either")
def test_cores_are_shared_out(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launch(torch.get_num_threads) == [max(1, len(os.sched_getaffinity(0)) // 2)] * 2


@pytest.mark.usefixtures("either")
def test_the_ranks_store_is_not_on_one_of_them():
    def look_for_the_store():
        """Rank 1 never looks, and rank 0 does not wait for it."""
        if rank() == 0:
            store, _, _ = next(rendezvous("env://", timeout=datetime.timedelta(seconds=300)))
            store.set("key", "found")
            return store.get("key")

    assert launch(look_for_the_store) == [b"found", None]


def talk():
    for i in range(20):
        print("line", i, "of", rank(), flush=True)
        time.sleep(0.002)
    sys.stderr.write("a warning\n")
    os.system("echo from a shell")
    print("no newline", end="")


@pytest.mark.usefixtures("either")
def test_output_is_labelled_line_by_line(capsys):
    launch(talk)
    lines = capsys.readouterr().out.splitlines()
    for r in (0, 1):
        mine = [line.removeprefix(f"[rank {r}] ") for line in lines if line.startswith(f"[rank {r}] ")]
        assert [line for line in mine if line.startswith("line")] == [f"line {i} of {r}" for i in range(20)]
        assert {"a warning", "from a shell", "no newline"} <= set(mine)
    assert all(re.match(r"\[rank [01]\] ", line) for line in lines), "something came without its label"


def say_why_and_die():
    if rank() == 1:
        os.system("echo libgomp: Thread creation failed >&2")
        os._exit(1)
    time.sleep(60)


@pytest.mark.parametrize("stream", [False, True])
def test_a_death_without_a_word_tells_what_was_printed_last_where_it_was_not_shown(capsys, stream):
    with pytest.raises(RankError, match="rank 1 exited with code 1 before the function returned") as raised:
        launch(say_why_and_die, stream=stream)
    last = "libgomp: Thread creation failed"
    assert str(raised.value).count(last) == (0 if stream else 1)
    assert capsys.readouterr().out.count(last) == (1 if stream else 0)


def test_a_character_may_come_in_parts_and_of_a_rewritten_line_the_last_state_counts(capsys):
    shown = LabelledOutput(2)
    parts = [(0, b"\xc3"), (1, b"\xe2\x82"), (0, b"\xa4\n"), (1, b"\xac\n"), (0, b" 10 %\r 55 %"), (0, b"\r100 %\r\n")]
    for number, part in parts:
        shown.feed(number, part)
    assert capsys.readouterr().out.splitlines() == ["[rank 0] ä", "[rank 1] €", "[rank 0] 100 %"]


def fail_on_one():
    dist.init_process_group("gloo")
    if rank() == 1:
        raise ValueError("bad luck on this rank")
    dist.all_reduce(torch.zeros(1))


@pytest.mark.usefixtures("either")
def test_the_first_cause_is_raised_at_once_with_its_traceback():
    """At once: the other rank waits until the launch's time is over, and would then be told as hanging."""
    with pytest.raises(RankError, match=r"rank 1 raised ValueError: bad luck on this(.|\n)*in fail_on_one") as error:
        launch(fail_on_one, timeout=320)
    assert error.value.rank == 1 and isinstance(error.value.cause, ValueError)


LOST = {
    "upload: connection reset by peer": False,  # a tracking server's or a pipe's says nothing of other ranks
    "[gloo/transport/tcp/pair.cc:554] Connection closed by peer": True,
}


@pytest.mark.parametrize("told", LOST)
def test_a_connection_that_is_not_the_ranks_own_is_the_first_cause_itself(told):
    try:
        raise RuntimeError(told)
    except Exception as error:
        assert is_consequence(error) is LOST[told]


def test_who_lost_a_peer_is_not_the_first_cause_though_it_is_the_first_to_fail(monkeypatch, tmp_path):
    def lose():
        if rank() == 0:
            (tmp_path / "lost").touch()
            raise RuntimeError("[gloo/transport/tcp/pair.cc:554] Connection closed by peer")
        while not (tmp_path / "lost").exists():
            time.sleep(0.01)
        time.sleep(0.1)
        raise ValueError("bad row")

    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 300.0)  # it ends when both have told
    with pytest.raises(RankError, match=r"rank 1 raised ValueError: bad row(.|\n)*then rank 0 raised RuntimeError"):
        launch(lose, timeout=320)


@pytest.mark.usefixtures("either")
def test_a_users_mistake_is_raised_as_it_was():
    def wrong():
        raise ConfigError("batch_size is 0", "use 1")

    with pytest.raises(ConfigError, match="batch_size is 0: use 1"):
        launch(wrong)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize(
    ("end", "told"),
    [
        (lambda: os._exit(7), "rank 1 exited with code 7"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1 was killed by SIGKILL"),
    ],
)
def test_a_rank_that_dies_is_named(end, told):
    def die():
        if rank() == 1:
            end()
        time.sleep(300)  # were the death not seen at once, the launch's time would be over before

    with pytest.raises(RankError, match=told):
        launch(die, timeout=320)


def test_an_attribute_that_is_called_as_a_module_of_torch_is_sent(either):
    """cloudpickle takes `.classes` and `.ops` in a function that uses torch for torch's own, which have no pickle."""
    namespace = {"torch": torch}
    exec("def count(them):\n    return torch.tensor(them.classes + them.ops).item()", namespace)
    assert launch(namespace["count"], types.SimpleNamespace(classes=3, ops=1), num_processes=1) == [4]


def test_torchs_operators_are_sent_by_their_names():
    """A notebook may hold some beside its functions; they have no pickle of their own."""
    operators = torch.ops.aten, torch.ops.aten.add, torch.ops.aten.add.Tensor
    sent = forks.Parcel.of(functools.partial(print, *operators)).open()
    assert [id(each) for each in sent.args] == [id(each) for each in operators]


def test_a_watchdog_that_ended_its_rank_is_the_consequence_of_a_death_that_comes_later(monkeypatch, tmp_path):
    def ends():
        if rank() == 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (tmp_path / "deaf").touch()
            time.sleep(0.3)
            os._exit(143)
        while not (tmp_path / "deaf").exists():
            time.sleep(0.01)
        os._exit(EXIT_HUNG)

    monkeypatch.setattr(supervisor, "DEATH_GRACE_SECONDS", 300.0)  # it ends when both have
    with pytest.raises(RankError, match="rank 1 exited with code 143"):
        launch(ends, timeout=320)


def wait_for_the_other(folder):
    def all_reduce(tensor):
        (folder / "there0").touch()
        dist.all_reduce(tensor)

    dist.init_process_group("gloo")
    subprocess.Popen(["sleep", "300"])  # a child of the rank, which has to go with it
    if rank() == 0:
        all_reduce(torch.zeros(1))
    (folder / "there1").touch()
    time.sleep(300)


@pytest.mark.usefixtures("either")
def test_a_hang_ends_with_every_ranks_stack(tmp_path, time_is_over_once):
    time_is_over_once(own_time, tmp_path / "there0", tmp_path / "there1")
    with pytest.raises(RanksHung) as error:
        launch(wait_for_the_other, tmp_path, timeout=0.2)
    assert set(error.value.stacks) == {0, 1}
    assert all("wait_for_the_other" in stack for stack in error.value.stacks.values())
    assert "all_reduce" in error.value.stacks[0] and "all_reduce" not in error.value.stacks[1]
    assert "rank_process.py" not in str(error.value)
    assert str(error.value).splitlines()[1].endswith("launch(…, timeout=0.4)"), "what to do if they were only slow"


def test_ranks_that_hang_before_they_have_started_are_ended_too(monkeypatch, tmp_path, time_is_over_once):
    leave, take = rank_process.leave_caller, supervisor.RankSupervisor._take

    def hang():
        if rank() == 1:
            (tmp_path / "there1").touch()
            time.sleep(300)
        leave()

    def started(watch, number, message):
        take(watch, number, message)
        (tmp_path / f"there{number}").touch()

    monkeypatch.setattr(rank_process, "leave_caller", hang)
    monkeypatch.setattr(supervisor.RankSupervisor, "_take", started)
    time_is_over_once(own_time, tmp_path / "there0", tmp_path / "there1")
    with pytest.raises(RanksHung) as error:
        launch(rank, timeout=0.2)
    assert [number for number, stack in error.value.stacks.items() if "it had not started" in stack] == [1]


def test_ranks_that_have_returned_and_do_not_end_are_ended_and_told(monkeypatch):
    monkeypatch.setattr(supervisor, "EXIT_SECONDS", 3.0)

    def linger():
        atexit.register(time.sleep, 300) if rank() == 1 else None
        return rank()

    with pytest.warns(RuntimeWarning, match=r"rank 1 returned, did not end within 3 s(.|\n)*rank_process.py"):
        assert launch(linger, timeout=240) == [0, 1]


def test_a_reader_that_goes_away_ends_the_ranks():
    code = (
        "from course_lib.launching.launch import launch\ndef talk():\n    while True: print('x' * 1000)\n"
        "launch(talk, timeout=2400)"
    )
    shell = f"{sys.executable} -c {shlex.quote(code)} | head -n 3"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=320, check=False)
    assert done.stdout.count("\n") == 3 and "BrokenPipeError" in done.stderr


@pytest.mark.parametrize(
    ("function", "options", "told"),
    [
        (rank, {"num_processes": 0}, "num_processes is 0"),
        (rank, {"device": "cuda"}, "asked for 2 ranks on GPUs, and there are 0"),
        (rank, {"start_method": "thread"}, "unknown start_method 'thread': leave it out, or use"),
        (rank, {"num_processes": 81, "start_method": "forkserver"}, "81 ranks, and a fork server starts 80 at most"),
        (threading.Lock().acquire, {"start_method": "forkserver"}, r"cannot be sent to a new process \(cannot pickle"),
        (lambda: launch(rank), {}, r"this process is rank \d of a launch already"),
        (lambda: (i for i in range(3)), {}, r"rank \d returned a generator"),
    ],
)
def test_what_cannot_be_started_sent_or_returned_is_refused(function, options, told):
    with pytest.raises(LaunchError, match=told):
        launch(function, **options)


def test_windows_is_told_of_wsl(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(LaunchError, match="WSL"):
        launch(rank)


# A script without `if __name__ == "__main__"`, whose ranks get a class of its own.
CALLER = """
import os, sys, time
from course_lib.launching.launch import launch

class Mine:
    pass

def talk(mine):
    return isinstance(mine, Mine), os.environ["TOLD"], os.getcwd(), Mine()

def wait():
    print("waits", flush=True)
    time.sleep(200)

if sys.argv[2:]:
    for folder in sys.argv[2:]:
        os.environ["TOLD"] = folder
        os.chdir(folder)
        for mine, told, here, back in launch(talk, Mine(), start_method=sys.argv[1], timeout=240):
            assert mine and told == here == folder and type(back) is Mine
    print("done")
else:
    launch(wait, start_method=sys.argv[1], timeout=800)
"""


def test_a_script_and_what_it_changes_between_launches(tmp_path):
    script, folders = tmp_path / "script.py", [tmp_path / "a", tmp_path / "b"]
    script.write_text(CALLER)
    for folder in folders:
        folder.mkdir()
    done = subprocess.run(
        [sys.executable, str(script), "forkserver", *map(str, folders)], capture_output=True, text=True, timeout=320
    )
    assert done.stdout == "done\n", done.stderr


def ended(number):
    """Exit code of a caller that gets a signal while its ranks wait, and what of its processes is left."""
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, "forkserver"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for _ in range(2):
        assert caller.stdout.readline().startswith("[rank")
    below = psutil.Process(caller.pid).children(recursive=True)
    assert len(below) == 4, "two ranks, the fork server and Python's resource tracker"
    caller.send_signal(number)
    told = caller.communicate(timeout=240)[1]
    _, left = psutil.wait_procs(below, timeout=240)
    for process in left:
        process.kill()
    return caller.returncode, left, "KeyboardInterrupt" in told


def test_nothing_outlives_a_caller_that_is_killed_or_interrupted():
    signals = [signal.SIGKILL, signal.SIGINT]
    with ThreadPoolExecutor(2) as side_by_side:
        found = dict(zip(signals, side_by_side.map(ended, signals), strict=True))
    assert found == {number: (-number, [], number == signal.SIGINT) for number in signals}


def test_where_the_fork_server_cannot_serve_ranks_are_spawned_and_a_line_says_so(monkeypatch, capsys):
    """As where something that it imports has used a GPU."""
    monkeypatch.setattr(forks, "_proven", set())
    monkeypatch.setattr(forks, "accelerators", lambda: 1)
    monkeypatch.setattr(forks, "_prove", os.close)  # fails, with a Connection for an argument
    assert forks.default_start_method() == "spawn"
    assert capsys.readouterr().out == (
        "a process of the fork server cannot train (it died): the ranks are spawned, which takes some seconds each\n"
    )


@pytest.mark.parametrize(
    ("kind", "said"),
    [("xpu", "the course does not know devices of type xpu: the ranks run on the CPU\n"), ("mps", "")],
)
def test_an_accelerator_that_the_course_does_not_use_is_named(monkeypatch, capsys, kind, said):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    assert start._check(2, "auto", "spawn") == ("cpu", "spawn")
    assert capsys.readouterr().out == said


def random_numbers():
    return torch.rand(2).tolist(), torch.get_num_threads()


@pytest.mark.usefixtures("either", "own_threads")
def test_ranks_begin_with_the_callers_random_state_and_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    torch.set_num_threads(3)
    with torch.random.fork_rng():
        torch.manual_seed(11)
        assert launch(random_numbers) == [random_numbers()] * 2


def test_spawned_ranks():
    assert [number for number, *_ in launch(add_up, 1, start_method="spawn", timeout=320)] == [0, 1]


def test_from_a_notebook_cell(tmp_path):
    cells = [
        "import os\nfrom course_lib.launching.launch import launch\nimport torch",
        "factor = 3\ndef work(x):\n    print('working')\n    return int(os.environ['RANK']) + factor * x",
        "print(launch(work, 2))",
        "def bad():\n    raise KeyError('missing')\ntry:\n    launch(bad)\nexcept Exception as error:\n"
        "    print(type(error).__name__, error)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, tmp_path / "in.ipynb")
    subprocess.run([sys.executable, "-m", "papermill", tmp_path / "in.ipynb", tmp_path / "out.ipynb"], check=True)
    cells = nbformat.read(tmp_path / "out.ipynb", as_version=4).cells
    text = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    assert "[rank 0] working\n" in text and "[rank 1] working\n" in text and "[6, 7]" in text
    assert "RankError rank" in text and "KeyError: 'missing'" in text
    assert "CUDA" not in text and "Launching" not in text
