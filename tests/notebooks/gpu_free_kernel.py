"""Runs in a lesson's kernel before its first cell: stops a lesson that would fail where there are GPUs.

A process that has used a GPU cannot fork ranks that use one. Where a lesson says `device="auto"`, its kernel has to
leave the device to the ranks, at least until it launches none any more.
"""

import os

from accelerate import PartialState

from course_lib.runtime import launch as launching
from course_lib.training import basic
from course_lib.training.engines import base

_kernel, _used = os.getpid(), []


def _noting(function, takes_a_gpu):
    def noting(*args, **kwargs):
        if os.getpid() == _kernel and takes_a_gpu(*args, **kwargs):
            _used.append(function.__qualname__)
        return function(*args, **kwargs)

    return noting


def _checked(num_processes, device, start_method, check=launching._check):
    assert device == "cpu" or not _used, f"{_used[0]} took a GPU in the kernel, and now ranks shall use GPUs"
    return check(num_processes, device, start_method)


for module in (basic, base):
    module.pick_device = _noting(module.pick_device, lambda name: name != "cpu")
PartialState.__init__ = _noting(PartialState.__init__,
                                lambda self, cpu=False, **kwargs: not (cpu or PartialState._shared_state))
launching._check = _checked
