"""Frames of a stack that are the user's code, not torch's or ours: the place that a report names.

Nothing here imports torch.
"""

import os
import sys
import threading
from types import FrameType

_FOREIGN = {"torch", "accelerate", "deepspeed", "transformers", *sys.stdlib_module_names}
"""Packages whose code is not the user's."""
_OURS = {
    "course_lib.hangs.flight_recorder",
    "course_lib.hangs.startup_watch",
    "course_lib.hangs.watchdog",
    "course_lib.metering.collective_hooks",
    "course_lib.attach.inside",
}
"""Modules of the course through which every call goes."""
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
"""Folders of packages that the user's code calls; a line of theirs is told only where none of the user's is there."""

Place = tuple[str | None, int | None]
"""File and line."""


class _Nearness(dict[str, int]):
    """Distance of a module from the user: 0 torch's and ours, 1 of an installed package, 2 the user's; cached."""

    def __missing__(self, module: str) -> int:
        package = module.partition(".")[0]
        if package in _FOREIGN or module in _OURS:
            nearness = 0
        else:
            file = getattr(sys.modules.get(module), "__file__", None) or ""
            nearness = 1 if package != "course_lib" and any(folder in file for folder in _INSTALLED) else 2
        self[module] = nearness
        return nearness


_nearness = _Nearness()


def nearness(frame: FrameType) -> int:
    """Distance of a frame's code from the user's, from 0 to 2; 0 where it is in no file that can be shown."""
    return 0 if frame.f_code.co_filename.startswith("<") else _nearness[frame.f_globals.get("__name__", "")]


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's; where there is none, of an installed package that is not torch's."""
    installed = None
    while frame is not None and (near := nearness(frame)) < 2:
        if near and installed is None:
            installed = frame
        frame = frame.f_back
    return frame or installed


def frame_of(thread: threading.Thread) -> FrameType | None:
    """The innermost frame of a thread."""
    return sys._current_frames().get(thread.ident or 0)


def shown(file: str, folder: str) -> str:
    """A file's path, relative to a folder where it lies below it."""
    return file.removeprefix(folder + os.sep)


def main_place(folder: str) -> Place:
    """File and line of the user's code that the main thread is in."""
    frame = user_frame(frame_of(threading.main_thread()))
    return (shown(frame.f_code.co_filename, folder), frame.f_lineno) if frame else (None, None)
