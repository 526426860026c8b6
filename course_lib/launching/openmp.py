"""Threads of GNU OpenMP, which have to end before their process is forked.

A forked process inherits OpenMP's belief that its workers are there, and waits for them for ever in its first parallel
region (gcc.gnu.org/bugzilla, 58378).
"""

import ctypes
from pathlib import Path

PAUSE = "omp_pause_resource_all"
"""Function of OpenMP 5.0 (section 3.2.44) that ends threads. GCC's libraries have it since version 9."""
HARD = 2
"""Its argument ``omp_pause_hard``."""


def end_threads() -> None:
    """End this thread's OpenMP workers where that can be done; they are started again when they are next needed."""
    for library in _loaded():
        if hasattr(loaded := ctypes.CDLL(library), PAUSE):
            getattr(loaded, PAUSE)(HARD)


def unending() -> list[str]:
    """Names of loaded libraries whose threads cannot be ended: torch 2.6 brings one, and scikit-learn up to 1.7."""
    return sorted(Path(library).name for library in _loaded() if not hasattr(ctypes.CDLL(library), PAUSE))


def _loaded() -> set[str]:
    """Paths of GNU OpenMP as this process has it loaded; none where the system does not say, as macOS."""
    maps = Path("/proc/self/maps")
    return {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line} if maps.exists() else set()
