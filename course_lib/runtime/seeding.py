"""Random streams: one seed for what all ranks must agree on, a stream a rank for the rest."""

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


def rng_state() -> dict[str, Any]:
    """The state of every stream, as plain values and tensors that can be stored without pickle."""
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    key = torch.from_numpy(numpy["state"]["key"].astype(np.int64))
    return {
        "python": random.getstate(),
        "numpy": {**numpy, "state": {**numpy["state"], "key": key}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Put back what :func:`rng_state` gave."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy = state["numpy"]
    key = numpy["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": key}})
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
