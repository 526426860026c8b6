"""Records what the ranks of a lesson do, line by line, for the players of the book: `make notebooks` runs it too.

    python tools/recordings.py [07_one_f_one_b …]

Each goes into book/recordings/NAME.json, with times as they were on the machine that made it. The code is a lesson's
shortest form, or the textbook's where there is none; the models are tiny. `tests/tools/test_recordings.py` says which
have to be made anew because their code has changed.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from course_lib.lessons.faults import numerical_faults, scenarios  # noqa: E402
from course_lib.metering import recording  # noqa: E402
from course_lib.parallel import expert_dispatch, ring_attention  # noqa: E402
from course_lib.parallel.minimal import data_parallel, fsdp, gpipe, one_f_one_b, tensor_parallel, zero1  # noqa: E402
from course_lib.parallel.sequence_layout import SequenceLayout  # noqa: E402

FOLDER = ROOT / "book" / "recordings"
Play = Callable[[], Any]


@dataclass(frozen=True)
class Scene:
    """What is recorded.

    Attributes:
        title: of the player.
        says: what to look for, in a sentence or two.
        prepare: runs on each rank; returns what is recorded.
        functions: whose lines are followed.
        variables: that are followed.
        ranks: how many.
        paint: by kind of work what the source lines of that kind begin with; F forward, B backward, O the
            optimizer's update, C what stands for computing. All other lines are plain.
        timeout: seconds until ranks that hang are ended.
    """

    title: str
    says: str
    prepare: Callable[[], Play]
    functions: Sequence[Callable[..., Any]]
    variables: Sequence[str] = ()
    ranks: int = 2
    paint: Mapping[str, Sequence[str]] = field(default_factory=dict)
    timeout: float = 60.0


class Block(nn.Module):
    """A residual block of a width that makes a forward take about a millisecond."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """A few blocks between two linear layers."""

    def __init__(self, blocks: int = 2, width: int = 128, hidden: int = 256):
        super().__init__()
        self.embed, self.head = nn.Linear(16, width), nn.Linear(width, 1)
        self.layers = nn.ModuleList(Block(width, hidden) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def second_time(step: Play) -> Play:
    """A step that has been made once: connections stand, and the optimizer has its states."""
    step()
    return step


def rows(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs (count, 16) and targets (count, 1)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, generator=generator)
    return x, x.sum(1, keepdim=True)


# --- lessons ----------------------------------------------------------------------------------------------------------


def train_step(model: nn.Module, optimizer: Any, inputs: Tensor, targets: Tensor) -> None:
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def data_parallel_step(model: nn.Module, optimizer: Any, inputs: Tensor, targets: Tensor) -> None:
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    data_parallel.average_gradients(model)
    optimizer.step()
    optimizer.zero_grad()


def prepare_data_parallel() -> Play:
    torch.manual_seed(dist.get_rank())
    model = Net()
    data_parallel.broadcast_model(model)
    optimizer, (x, y) = torch.optim.AdamW(model.parameters()), rows(256, dist.get_rank())
    return second_time(lambda: data_parallel_step(model, optimizer, x, y))


def prepare_zero1() -> Play:
    torch.manual_seed(0)
    model = Net()
    engine, (x, y) = zero1.TinyZeRO1(model, list(model.layers), torch.optim.AdamW), rows(256, dist.get_rank())
    return second_time(lambda: train_step(model, engine, x, y))


def prepare_fsdp() -> Play:
    torch.manual_seed(0)
    model = Net(3)
    units = fsdp.TinyFSDP(model, list(model.layers), fsdp.Unit).units
    optimizer = torch.optim.SGD([unit.shard for unit in units])  # plain SGD: memory is weights
    x, y = rows(32, dist.get_rank())
    return second_time(lambda: train_step(model, optimizer, x, y))


def prepare_one_f_one_b() -> Play:
    torch.manual_seed(0)
    rank, ranks, width, microbatches = dist.get_rank(), dist.get_world_size(), 128, 6
    layers = [nn.Linear(16, width), *(Block(width, 512) for _ in range(2 * ranks)), nn.Linear(width, 1)]
    first = rank * 2 + (rank > 0)
    stage = nn.Sequential(*layers[first : rank * 2 + 3 + (rank == ranks - 1)])
    pipeline = one_f_one_b.TinyOneFOneB(stage, F.mse_loss, torch.empty(128, width))
    x, y = rows(128 * microbatches, 0)
    return second_time(lambda: pipeline.step(x.chunk(microbatches), y.chunk(microbatches)))


def prepare_tensor_parallel() -> Play:
    torch.manual_seed(0)
    model = Net(2, hidden=512)
    for layer in model.layers:
        assert isinstance(layer, Block)
        layer.set_submodule("up", tensor_parallel.TinyColumns(layer.up))
        layer.set_submodule("down", tensor_parallel.TinyRows(layer.down))
    optimizer, (x, y) = torch.optim.AdamW(model.parameters()), rows(256, 0)
    return second_time(lambda: train_step(model, optimizer, x, y))


def ring_step(query: Tensor, key: Tensor, value: Tensor, sight: ring_attention.Sight) -> None:
    output = ring_attention.ring_attention(query, key, value, sight)
    output.square().mean().backward()


def prepare_ring_attention() -> Play:
    torch.manual_seed(dist.get_rank())
    ranks, tokens = dist.get_world_size(), 128
    sight = ring_attention.Sight(SequenceLayout(tokens * ranks, ranks), causal=True)
    query, key, value = (torch.randn(1, 4, tokens, 32, requires_grad=True) for _ in range(3))
    return second_time(lambda: ring_step(query, key, value, sight))


def expert_step(tokens: Tensor, chosen: Tensor, weights: Tensor, experts: nn.ModuleList, all_experts: int) -> Tensor:
    """Tokens to their experts, through them, and back; `experts` are this rank's."""
    dispatch = expert_dispatch.plan(chosen, all_experts)
    copies = dispatch.to_experts(tokens)
    outputs = torch.cat([expert(rows) for expert, rows in zip(experts, copies.split(dispatch.per_expert), strict=True)])
    result = dispatch.to_tokens(outputs, weights)
    result.square().mean().backward()
    return result


def prepare_experts() -> Play:
    torch.manual_seed(dist.get_rank())
    ranks, per_rank, count, width = dist.get_world_size(), 2, 192, 64
    experts = nn.ModuleList(Block(width, 256) for _ in range(per_rank))
    tokens = torch.randn(count, width, requires_grad=True)
    # Uneven on purpose: of three tokens one goes to the first rank's experts.
    likely = torch.ones(count, ranks * per_rank)
    likely[: count // 3, per_rank:] = 0
    chosen, weights = likely.multinomial(2), torch.full((count, 2), 0.5)
    return second_time(lambda: expert_step(tokens, chosen, weights, experts, ranks * per_rank))


# --- lesson 10's faults -----------------------------------------------------------------------------------------------


def fault(function: Callable[[Path], Any]) -> Callable[[], Play]:
    """A scenario of lesson 10, without the time-outs that it has there."""

    def prepare() -> Play:
        one = torch.ones(1)
        for source in range(dist.get_world_size()):  # connections stand
            dist.broadcast(one, source)
        return lambda: function(Path())

    return prepare


SCENES = {
    "02_data_parallel": Scene(
        "Data parallelism, naive",
        "Each rank computes the gradient of its own rows; only then it is sent, one "
        "all-reduce for each parameter. The first of them waits for the slowest rank.",
        prepare_data_parallel,
        (data_parallel_step, data_parallel.average_gradients),
        ("inputs", "loss", "weight.shape", "weight.grad"),
        3,
        {"F": ["loss = F.mse_loss("], "B": ["loss.backward()"], "O": ["optimizer.step()"]},
    ),
    "05_zero1": Scene(
        "ZeRO stage 1: reduce-scatter, update, all-gather",
        "Each rank gets the mean gradient of its own slice, updates that slice, and receives the others'.",
        prepare_zero1,
        (train_step, zero1.TinyZeRO1.step, zero1.TinyBucket.reduce, zero1.TinyBucket.gather),
        ("loss", "whole", "total", "self.mine", "self.flat"),
        4,
        {"F": ["loss = F.mse_loss("], "B": ["loss.backward()"], "O": ["self.optimizer.step()"]},
    ),
    "06_fsdp": Scene(
        "FSDP: gather before use, free after use",
        "The line of memory rises where a unit's weights are gathered "
        "and falls where they are freed, forward and again backward.",
        prepare_fsdp,
        (train_step, fsdp.Unit.gather, fsdp.Unit.free, fsdp.Unit.reduce),
        ("loss", "self.flat", "self.shard", "mine"),
        2,
        {"F": ["loss = F.mse_loss("], "B": ["loss.backward()"], "O": ["optimizer.step()"]},
    ),
    "07_one_f_one_b": Scene(
        "A pipeline by 1F1B",
        "After a warm-up each rank goes forward and backward in turn; activations go down "
        "the ranks, gradients up. Where a rank waits is the bubble.",
        prepare_one_f_one_b,
        (
            one_f_one_b.TinyOneFOneB.step,
            one_f_one_b.TinyOneFOneB.exchange,
            gpipe.TinyStage.forward,
            gpipe.TinyStage.backward,
            gpipe.TinyStage.send,
            gpipe.TinyStage.receive,
        ),
        ("i", "self.held", "output", "gradient"),
        4,
        {"F": ["output = self.stage(x)", "output = self.loss_of("], "B": ["output.backward(gradient)"]},
    ),
    "08_tensor_parallel": Scene(
        "Two layers, cut by columns and by rows",
        "Both ranks see the same rows. A pair of layers costs one all-reduce "
        "forward and one backward, and nobody computes meanwhile.",
        prepare_tensor_parallel,
        (
            train_step,
            tensor_parallel.TinyColumns.forward,
            tensor_parallel.TinyRows.forward,
            tensor_parallel.CopyToRanks.backward,
            tensor_parallel.SumOverRanks.forward,
        ),
        ("loss", "x", "y", "total", "gradient"),
        2,
        {
            "F": ["loss = F.mse_loss(", "return F.linear(", "return self.leave("],
            "B": ["loss.backward()"],
            "O": ["optimizer.step()"],
        },
    ),
    "14_ring_attention": Scene(
        "Ring attention under a causal mask",
        "Keys and values go round; the next block sets out before this one is "
        "computed with. The first rank sees least, and the last one works longest.",
        prepare_ring_attention,
        (
            ring_step,
            ring_attention._RingAttention.forward,
            ring_attention._RingAttention.backward,
            ring_attention.Ring.pass_on,
            ring_attention.Coming.arrived,
        ),
        ("step", "owner", "block", "share"),
        4,
        {"F": ["attention.add(block[0]"], "B": ["share = gradients.add("]},
    ),
    "15_experts": Scene(
        "Tokens to their experts and back",
        "An uneven all-to-all: the first rank's experts get more tokens than the "
        "others', and everybody waits for them on the way back.",
        prepare_experts,
        (
            expert_step,
            expert_dispatch.plan,
            expert_dispatch.Dispatch.to_experts,
            expert_dispatch.Dispatch.to_tokens,
            expert_dispatch._moved,
        ),
        ("tokens", "sent", "received", "copies", "outputs", "moved"),
        4,
        {"F": ["outputs = torch.cat(["], "B": ["result.square().mean().backward()"]},
    ),
    "10_leaves_the_loop": Scene(
        "A rank leaves the loop",
        "Rank 1 has one batch less, and returns. The others' next sum never ends.",
        fault(scenarios.shorter_loader),
        (scenarios.shorter_loader,),
        ("steps", "batch", "gradient"),
        3,
        timeout=3.0,
    ),
    "10_mismatched_collectives": Scene(
        "Collectives that do not fit together",
        "Rank 1 calls broadcast where the others call all_reduce. Each waits in its own call.",
        fault(scenarios.mismatched_collectives),
        (scenarios.mismatched_collectives,),
        ("norm",),
        3,
        timeout=3.0,
    ),
    "10_deadlocked_pipeline": Scene(
        "Both send first",
        "Neighbours send to each other, and would receive afterwards. No send ends before somebody receives.",
        fault(scenarios.deadlocked_pipeline),
        (scenarios.deadlocked_pipeline,),
        ("rank", "neighbours", "neighbour", "received"),
        3,
        timeout=3.0,
    ),
    "10_exception": Scene(
        "An exception on one rank",
        "Rank 1 has no memory for its long batch. The others wait for its part of "
        "the sum until the launcher ends them.",
        fault(numerical_faults.out_of_memory),
        (numerical_faults.out_of_memory,),
        ("activations", "total"),
        3,
    ),
    "10_straggler": Scene(
        "A rank that is slow",
        "Rank 1 has all the long texts; sleeping stands for work. The others' steps are as "
        "long as its own, and only here it can be seen who waits for whom.",
        fault(numerical_faults.straggler),
        (numerical_faults._timed_steps,),
        ("texts", "total"),
        3,
        {"C": ["time.sleep("]},
    ),
}


def made(name: str) -> dict[str, Any]:
    """Record a scene on real ranks."""
    scene = SCENES[name]
    entry = recording.record(
        scene.prepare, scene.functions, variables=scene.variables, num_processes=scene.ranks, timeout=scene.timeout
    )
    return {
        "name": name,
        "title": scene.title,
        "says": scene.says,
        "torch": torch.__version__,
        "paint": painted(scene, entry["code"]),
    } | entry


def painted(scene: Scene, code: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """[place in code, line number, kind of work] of the lines that a scene paints.

    Raises:
        ValueError: no line begins so.
    """
    lines = []
    for kind, beginnings in scene.paint.items():
        for beginning in beginnings:
            of_it = [
                [place, part["first"] + at, kind]
                for place, part in enumerate(code)
                for at, line in enumerate(part["lines"])
                if line.strip().startswith(beginning)
            ]
            if not of_it:
                raise ValueError(f"no line of {scene.title!r} begins with {beginning!r}")
            lines += of_it
    return lines


def refresh(name: str) -> None:
    """Make one recording and put it in place."""
    entry = made(name)
    size = recording.write(entry, FOLDER / f"{name}.json")
    events = sum(len(rank["lines"]) + len(rank["calls"]) for rank in entry["ranks"])
    print(
        f"{name}: {len(entry['ranks'])} ranks, {events} lines and calls, {entry['until'] / 1000:.1f} ms, "
        f"{size / 1000:.0f} kB",
        flush=True,
    )


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for chosen in sys.argv[1:] or SCENES:
        if chosen not in SCENES:
            sys.exit(f"no recording {chosen!r}: choose from {', '.join(SCENES)}")
        refresh(chosen)
