"""GPUs that cannot be had: each is named in a line, with what to do."""

from unittest.mock import Mock

import pytest
import torch

from course_lib.errors import LaunchError
from course_lib.launching import gpus
from course_lib.launching.launch_environment import check_loopback

SAID = {
    "CUDA error: all CUDA-capable devices are busy or unavailable": "GPU 3 belongs to another process alone, or cannot",
    "CUDA error: out of memory": "GPU 3 is full: `nvidia-smi` lists what runs there; end it, or choose another GPU",
    "CUDA error: operation not permitted": r"GPU 3 cannot be used \(CUDA error: operation not permitted\): see whether",
}


@pytest.mark.parametrize("said", SAID)
def test_what_cuda_says_becomes_a_line(monkeypatch, said):
    refuses = Mock(side_effect=RuntimeError(said + "\nCUDA kernel errors might be"))
    monkeypatch.setattr(torch.cuda, "set_device", refuses)
    with pytest.raises(LaunchError, match=f"^{SAID[said]}.*$"):
        gpus.take(3)


def test_too_little_room_is_full(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (100 << 20, 80 << 30))
    with pytest.raises(LaunchError, match=r"^GPU 0 is full: 0\.1 of its 80\.0 GiB are free: "):
        gpus.take(0)


def test_ranks_that_could_not_reach_each_other_are_not_started(monkeypatch):
    check_loopback()

    monkeypatch.setattr("socket.create_connection", Mock(side_effect=OSError(24, "Too many open files")))
    with pytest.raises(OSError, match="Too many open files"):
        check_loopback()
    monkeypatch.setattr("socket.create_connection", Mock(side_effect=OSError(101, "Network is unreachable")))
    with pytest.raises(LaunchError, match=r"127\.0\.0\.1 \(Network is unreachable\): switch .* on: ip link set lo up$"):
        check_loopback()
