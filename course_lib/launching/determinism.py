"""The same bits in every run: what torch has to be told, and what cannot be had.

On a CPU two runs give the same bits where they have the same software, number of ranks and number of threads. A GPU
adds its own model, driver and libraries to that list: a kernel for another one adds up in another order.

Source: pytorch.org/docs/stable/notes/randomness.html.
"""

import contextlib
import os
import re
from collections.abc import Iterator

import torch

from course_lib.errors import ConfigError

PROMISE = {
    "cpu": "deterministic: on this CPU, with as many ranks and threads, the next run gives the same bits",
    "cuda": "deterministic: on this model of GPU, with this driver, software and as many ranks, the next run gives the "
    "same bits; no other kind of GPU does, and no other number of ranks",
    "mps": "deterministic: operators that are not are refused where torch knows them; for this GPU it promises no more",
}
"""What is said of a run, by kind of device."""

_REFUSAL = re.compile(r"(?P<operator>\S+) does not have a deterministic implementation")


@contextlib.contextmanager
def deterministic(wanted: bool = True) -> Iterator[None]:
    """Let torch take operators that give the same bits in every run, and refuse those that have no such form.

    Best entered before the first use of a GPU, because cuBLAS looks at the environment once. All is put back at the
    end but that variable of the environment.

    Args:
        wanted: False to leave everything as it is.
    Raises:
        ConfigError: an operator has no deterministic form; it is named.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else two streams share a workspace, in any order
    cudnn = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    before_cudnn = cudnn.deterministic, cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False  # a benchmark may choose another algorithm next time
    try:
        yield
    except RuntimeError as error:
        if refused := _REFUSAL.search(str(error)):
            raise ConfigError(
                f"{refused['operator']} has no deterministic form on this device",
                "leave out --deterministic, or use a model that does without it",
            ) from error
        raise
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.deterministic, cudnn.benchmark = before_cudnn
