"""Random streams: one seed for what all ranks must agree on, a stream a rank or worker for the rest.

| what is drawn | its stream depends on |
|---|---|
| new weights | seed |
| rows held out where a split is missing | seed |
| order of an epoch, the same on every rank | seed, epoch |
| masks of masked language modelling | seed, epoch, row |
| dropout, and all else that a rank draws | seed, rank |
| what a user's own code draws in a loader's worker | seed, rank, worker, epoch |

So neither the number of ranks nor that of workers changes which rows are learnt from, or what is masked in them. A
rank's own stream runs on through the epochs, and a checkpoint holds where it stands; a worker's begins anew each epoch,
and also where a run goes on in the middle of one.

torch's generator on the CPU takes a seed of 32 bits, so that two of n streams fall together with odds of n²/2³³: one
in a thousand for 3,000 of them. In a worker, those of Python and NumPy are told apart by 128 bits.
"""

import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed Python, NumPy and torch (the CPU and every GPU).

    Rank 0 takes the plain seed, which is also what every rank uses to initialise a model. Another
    rank takes the first word of NumPy's ``SeedSequence([seed, rank])``, so that dropout differs
    between ranks and no two pairs of seed and rank share a stream by accident.
    """
    if rank:
        seed = int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_worker(seed: int, rank: int, worker: int, epoch: int) -> None:
    """Seed Python, NumPy and torch in a loader's worker process, a stream for each (seed, rank, worker, epoch).

    The last three are a ``spawn_key``: as plain entropy NumPy would fill up short ones with zeros, and the first
    worker's first epoch would repeat the rank's own stream.
    """
    words = np.random.SeedSequence(seed, spawn_key=(rank, worker, epoch)).generate_state(4)
    random.seed(words.tobytes())
    np.random.seed(words)
    torch.manual_seed(int(words[0]))


def rng_state(device: torch.device) -> dict[str, Any]:
    """The state of every stream, as plain values and tensors that can be stored without pickle.

    Args:
        device: of the run. Of the GPUs only this one's stream is in it, since a rank draws from no other and the next
            run may see fewer; a run on the CPU asks CUDA nothing, which would take memory on GPU 0.
    """
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    key = torch.from_numpy(numpy["state"]["key"].astype(np.int64))
    return {
        "python": random.getstate(),
        "numpy": {**numpy, "state": {**numpy["state"], "key": key}},
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device)] if device.type == "cuda" else [],
    }


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Put back what :func:`rng_state` gave, on the same device or another.

    A state saved on a GPU serves a CPU, and the reverse, without the stream that the other has not. Older versions
    saved the streams of all GPUs that the rank saw, by their number: the one of this number counts, or, where those
    machines had fewer, of the place that this rank had there.
    """
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy = state["numpy"]
    key = numpy["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": key}})
    torch.set_rng_state(state["torch"])
    if state["cuda"] and device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.set_rng_state(state["cuda"][index % len(state["cuda"])], device)
