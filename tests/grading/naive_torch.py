"""The naive grader for tensors: every answer in a fork of the checker's own process, and compared with torch itself.

    python naive_torch.py ANSWER.py ...

Prints PASS or FAIL and the file, a line each; HANGS for one that is not done after a second.
"""

import os
import signal
import sys
from pathlib import Path

import torch

PUBLIC = [[864.0, 394.0, 776.0, 911.0], [430.0, 41.0, 265.0, 988.0]]


def check(function):
    wanted = (torch.tensor(PUBLIC[0], dtype=torch.float64) + torch.tensor(PUBLIC[1], dtype=torch.float64)) / 2
    answer = function(torch.tensor(PUBLIC[0], dtype=torch.float64))
    assert torch.allclose(answer, wanted)


def main(path):
    signal.signal(signal.SIGALRM, lambda *_: (os.write(1, f"HANGS {path}\n".encode()), os._exit(0)))
    signal.alarm(1)
    scope = {"__name__": "answer"}
    try:
        exec(Path(path).read_text(), scope)
        check(scope["mean"])
    except Exception:
        os.write(1, f"FAIL {path}\n".encode())
    else:
        os.write(1, f"PASS {path}\n".encode())


if __name__ == "__main__":
    torch.set_num_threads(1)
    for path in sys.argv[1:]:
        if os.fork() == 0:
            main(path)
            os._exit(0)
        os.wait()
