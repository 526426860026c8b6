"""GPUs that cannot be had: each is named in a line, with what to do."""

import pytest
import torch

from course_lib.errors import LaunchError
from course_lib.launching import gpus
from course_lib.launching.launch_environment import check_loopback

SAID = {
    "CUDA error: all CUDA-capable devices are busy or unavailable\nCUDA kernel errors might be": "GPU 3 belongs to "
    "another process alone, or cannot be reached: `nvidia-smi` lists processes",
    "CUDA error: out of memory": "GPU 3 is full: `nvidia-smi` lists what runs there; end it, or choose another GPU",
    "CUDA error: operation not permitted\nCUDA kernel errors": "GPU 3 cannot be used (CUDA error: operation not "
    "permitted): see whether `nvidia-smi` shows it",
}


@pytest.mark.parametrize("said", SAID)
def test_what_cuda_says_becomes_a_line(monkeypatch, said):
    def refuse(index):
        raise RuntimeError(said)

    monkeypatch.setattr(torch.cuda, "set_device", refuse)
    with pytest.raises(LaunchError) as error:
        gpus.take(3)
    assert str(error.value).startswith(SAID[said]) and "\n" not in str(error.value)


def test_too_little_room_is_full(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (100 << 20, 80 << 30))
    with pytest.raises(LaunchError, match=r"^GPU 0 is full: 0\.1 of its 80\.0 GiB are free: "):
        gpus.take(0)


def test_ranks_that_could_not_reach_each_other_are_not_started(monkeypatch):
    check_loopback()

    def unreachable(*_):
        raise OSError(101, "Network is unreachable")

    def too_many(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("socket.create_connection", too_many)
    with pytest.raises(OSError, match="Too many open files"):
        check_loopback()
    monkeypatch.setattr("socket.create_connection", unreachable)
    with pytest.raises(LaunchError, match=r"127\.0\.0\.1 \(Network is unreachable\): switch .* on: ip link set lo up$"):
        check_loopback()
