"""Planted wrong answers of lesson 00: the solution with one thing wrong, and the property that shows it."""

from course_lib.grading.selftest import Planted

PLANTED = (
    Planted("start.environment", "each machine counts from 0", "numbers", "machine * per_machine + local", "local"),
    Planted(
        "start.environment",
        "the local rank is the rank",
        "numbers",
        '"LOCAL_RANK": local,',
        '"LOCAL_RANK": machine * per_machine + local,',
    ),
    Planted("start.environment", "the world is one machine", "numbers", "machines * per_machine", "per_machine"),
    Planted(
        "start.environment",
        "ranks dealt to the machines in turn",
        "numbers",
        "machine * per_machine + local",
        "local * machines + machine",
    ),
    Planted("start.environment", "numbers instead of text", "numbers", "str(value)", "value"),
    Planted(
        "start.environment",
        "a port of its own for each process",
        "address",
        '"MASTER_PORT": port',
        '"MASTER_PORT": port + local',
    ),
    Planted(
        "start.environment",
        "every machine is its own master",
        "address",
        '"MASTER_ADDR": address',
        '"MASTER_ADDR": address if machine == 0 else "127.0.0.1"',
    ),
    Planted("start.broadcast", "the sum of all", "value", "    if dist.get_rank() != 0:\n        tensor.zero_()\n", ""),
    Planted("start.broadcast", "times zero", "value", "tensor.zero_()", "tensor.mul_(0)"),
    Planted("start.broadcast", "the mean", "value", "return tensor", "return tensor / dist.get_world_size()"),
    Planted(
        "start.broadcast",
        "the largest",
        "value",
        "dist.all_reduce(tensor)",
        "dist.all_reduce(tensor, op=dist.ReduceOp.MAX)",
    ),
    Planted("start.broadcast", "zeros on rank 0", "value", "dist.get_rank() != 0", "dist.get_rank() == 0"),
    Planted("start.broadcast", "nobody talks", "one all-reduce", "    dist.all_reduce(tensor)\n", ""),
    Planted(
        "start.broadcast",
        "by a real broadcast",
        "one all-reduce",
        "dist.all_reduce(tensor)",
        "dist.broadcast(tensor, src=0)",
    ),
    Planted(
        "start.broadcast",
        "twice, to be sure",
        "one all-reduce",
        "    dist.all_reduce(tensor)\n",
        "    dist.all_reduce(tensor)\n    dist.all_reduce(tensor.clone())\n",
    ),
    Planted(
        "start.one_model",
        "by the sum of the weights",
        "verdict",
        "hashlib.sha256(weights.numpy().tobytes()).digest()[:7]",
        "int(abs(weights.double().sum().item()) * 1000).to_bytes(7)",
    ),
    Planted("start.one_model", "close is enough", "verdict", "weights.numpy()", "weights.round(decimals=2).numpy()"),
    Planted(
        "start.one_model",
        "only the rank that differs knows",
        "verdict",
        "    dist.all_reduce(both, op=dist.ReduceOp.MAX)\n    return bool(both[0] == -both[1])",
        "    first = both.clone()\n    dist.broadcast(first, src=0)\n    return bool(first[0] == both[0])",
    ),
    Planted("start.one_model", "looks at itself", "few bytes", "    dist.all_reduce(both, op=dist.ReduceOp.MAX)\n", ""),
    Planted(
        "start.one_model",
        "the first number only",
        "verdict",
        "weights.numpy().tobytes()",
        "weights[:1].numpy().tobytes()",
    ),
    Planted(
        "start.one_model",
        "a tensor, not a bool",
        "verdict",
        "return bool(both[0] == -both[1])",
        "return both[0] == -both[1]",
    ),
    Planted(
        "start.one_model",
        "sends the whole model",
        "few bytes",
        "    digest = ",
        "    dist.all_reduce(weights.clone())\n    digest = ",
    ),
    Planted("start.one_model", "adds the digests", "verdict", "op=dist.ReduceOp.MAX", "op=dist.ReduceOp.SUM"),
    Planted(
        "start.broadcast",
        "clears infinities alone",
        "value",
        "        tensor.zero_()\n",
        "        tensor[tensor.isinf()] = 0\n        tensor *= 0\n",
    ),
    Planted(
        "start.broadcast",
        "takes whole numbers for float32",
        "value",
        "    dist.all_reduce(tensor)\n",
        "    tensor = tensor.float()\n    dist.all_reduce(tensor)\n",
    ),
    Planted(
        "start.one_model",
        "Python's own hash",
        "verdict",
        "int.from_bytes(hashlib.sha256(weights.numpy().tobytes()).digest()[:7])",
        "hash(weights.numpy().tobytes()) // 2",
    ),
    Planted(
        "start.one_model", "compares the numbers, not the bits", "verdict", "weights.numpy()", "(weights + 0.0).numpy()"
    ),
    Planted(
        "start.one_model",
        "the largest equals the smallest, number by number",
        "verdict",
        "",
        """import torch
import torch.distributed as dist


def one_model(weights):
    sums = torch.stack([weights.double() @ torch.arange(1.0, len(weights) + 1).double(), weights.double().sum()])
    both = torch.cat([sums, -sums])
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return bool((both[:2] == -both[2:]).all())
""",
    ),
)
