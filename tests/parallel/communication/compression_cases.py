"""What each rank does in the tests of compressing communication hooks: it returns what came out, the tests judge."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from course_lib.metering.meter import Meter
from course_lib.parallel.communication.hierarchical import HierarchicalAllReduce, machine_groups
from course_lib.parallel.communication.power_sgd import PowerSGD
from course_lib.parallel.communication.quantized_all_reduce import QuantizedAllReduce
from course_lib.parallel.communication.top_k import TopK
from course_lib.parallel.ddp import DataParallel, sum_gradients

SHAPES = {"matrix": (20, 12), "kernel": (9, 3, 3, 2), "vector": (17,), "small": (3, 2)}
"""With a rank of 2 the first two are compressed."""
STEPS = 4


class Weights(nn.Module):
    """Parameters whose gradients are whatever one gives in."""

    def __init__(self, dtype):
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, gradients):
        return sum((getattr(self, name) * gradient).sum() for name, gradient in gradients.items())


def gradients(step, rank, dtype=torch.float64):
    """One rank's of one step, by name; of one low rank alike on all steps, and noise."""
    numbers = torch.Generator().manual_seed(1000 * step + rank)
    drawn = {name: torch.randn(shape, generator=numbers, dtype=torch.float64) for name, shape in SHAPES.items()}
    return {name: gradient.to(dtype) for name, gradient in drawn.items()}


def make(name):
    """A hook by its name here."""
    if name == "hierarchical":
        return HierarchicalAllReduce(*machine_groups(2))
    return {
        "plain": lambda: sum_gradients,
        "powersgd": lambda: PowerSGD(2, error_feedback=True),
        "powersgd without feedback": lambda: PowerSGD(2, error_feedback=False),
        "topk": lambda: TopK(0.1, error_feedback=True),
        "topk without feedback": lambda: TopK(0.1, error_feedback=False),
        "topk of all": lambda: TopK(1.0, error_feedback=True),
        "int8": lambda: QuantizedAllReduce(8, 16),
        "int4": lambda: QuantizedAllReduce(4, 16),
    }[name]()


def stream(engine, rank, dtype, steps):
    """The reduced gradients of some steps, by step and name."""
    reduced = []
    for step in steps:
        engine(gradients(step, rank, dtype)).backward()
        reduced.append({name: p.grad.clone() for name, p in engine.module.named_parameters()})
        engine.zero_grad()
    return reduced


def reductions(names, dtype=torch.float64, bucket_bytes=1200):
    """Of each hook: the reduced gradients of every step, what was left, bytes sent in the last step, and its calls."""
    dist.init_process_group("gloo")
    rank, results = dist.get_rank(), {}
    for name in names:
        hook = make(name)
        engine = DataParallel(
            Weights(dtype), communication_hook=hook, bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes
        )
        reduced = stream(engine, rank, dtype, range(STEPS - 1))
        with Meter() as meter:
            reduced += stream(engine, rank, dtype, [STEPS - 1])
        state = hook.state_dict() if hasattr(hook, "state_dict") else {}
        results[name] = (
            reduced,
            state,
            [list(bucket.views) for bucket in engine.buckets],
            [(record.name, record.bytes, record.sent, record.ranks) for record in meter.collectives],
        )
    return results


def resumed(names):
    """Reduced gradients of the last two steps: of one hook all along, of one that was loaded, and of a fresh one."""
    dist.init_process_group("gloo")
    rank, results = dist.get_rank(), {}
    for name in names:
        hook = make(name)
        engine = DataParallel(Weights(torch.float32), communication_hook=hook)
        stream(engine, rank, torch.float32, range(2))
        saved = {key: tensor.clone() for key, tensor in hook.state_dict().items()}
        loaded = make(name)
        loaded.load_state_dict(saved)
        results[name] = [stream(engine, rank, torch.float32, [2, 3])]
        for other in (loaded, make(name)):
            engine = DataParallel(Weights(torch.float32), communication_hook=other)
            results[name].append(stream(engine, rank, torch.float32, [2, 3]))
    return results


def beside_torchs_power_sgd(rank_of_matrices):
    """The same gradients through torch's hook and ours, from the same Q on: both, step by step."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    state = powerSGD_hook.PowerSGDState(None, rank_of_matrices, start_powerSGD_iter=2, min_compression_rate=1)
    theirs = DistributedDataParallel(Weights(torch.float64))
    theirs.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    stream(theirs, rank, torch.float64, [90, 91])  # until then they all-reduce, and form their buckets anew
    firsts, expected = {}, []
    compress = powerSGD_hook._orthogonalize

    def noted(matrices, epsilon=0):
        compress(matrices, epsilon)
        if len(firsts) < 2:  # the two Q, before the two P: in the order of their bucket
            firsts[matrices.shape[1]] = matrices[0].clone()

    powerSGD_hook._orthogonalize = noted
    try:
        expected += stream(theirs, rank, torch.float64, [0])
    finally:
        powerSGD_hook._orthogonalize = compress
    expected += stream(theirs, rank, torch.float64, range(1, STEPS))
    own = PowerSGD(rank_of_matrices, error_feedback=True)
    own.q = {name: firsts[columns] for name, columns in (("matrix", 12), ("kernel", 18))}
    return expected, stream(
        DataParallel(Weights(torch.float64), communication_hook=own), rank, torch.float64, range(STEPS)
    )
