"""Accelerators and clusters to plan for, each figure with its source in ``catalogue/hardware.yaml``.

Bytes and FLOPs per second throughout; memory in bytes.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from course_lib.errors import ConfigError, nearest
from course_lib.planning import catalogue_files

MEMORY_EFFICIENCY = 0.83
"""Share of the datasheet's memory bandwidth that a streaming kernel reaches: the median of copy and triad over
datasheet on A100, H100, H200 and MI300X (Azure AI-benchmarking-guide, 2024-25)."""
LINK_EFFICIENCY = 0.77
"""Share of a link's datasheet rate that NCCL's large collectives reach, where it was not measured: A100's 231 of 300
GB/s (Azure AI-benchmarking-guide, ND A100 v4)."""
NETWORK_EFFICIENCY = 0.9
"""Share of the network cards' rate that collectives reach: an assumption (InfiniBand's and RoCE's headers and
congestion), to be measured on your cluster."""
NETWORK_LATENCY = 20e-6
"""Seconds for one hop of a collective between nodes: an assumption, the order of NCCL's ring step over RDMA."""
LINK_STEP = 3.4e-6
"""Seconds for one hop of a ring inside a node: NCCL's own model of its ring over NVLink (NVIDIA/nccl,
src/graph/tuning.cc, ``hwLat``, Simple protocol). A node's first ring is in the latency that was measured there."""
LINK_LATENCY = 100e-6
"""Seconds of a collective in a node beyond volume / bus, where it was not measured: between A100's and H100's."""
ATTENTION_SHARE = (0.5, 0.43)
"""Share of peak of a fused attention kernel, forward and backward, where it was not measured: the lower end of
FlashAttention-2's 50 to 73 % on A100, its backward slower by the same paper's 63 to 73 (arXiv 2307.08691)."""
MATMUL_SHARE = 0.5
"""Share of peak for accelerators of which no training step is known; see ``catalogue/calibration.yaml``."""
LAUNCH = 25e-6
"""Seconds of the host for one operation in PyTorch: Python, autograd, dispatcher, driver. With
:data:`course_lib.planning.work.MEGATRON_OPERATIONS` as every second of 1,440 runs of small models on a node of A100
says (arXiv 2312.12391; benchmarks/planner-sweep.md has the others); how the two share what those runs say is an
assumption. `course plan --calibrate` measures it on this host."""


@dataclass(frozen=True)
class Accelerator:
    """One GPU, or what stands in for it."""

    name: str
    memory: int
    """Bytes, as the driver reports them."""
    bandwidth: float
    """Bytes/s of its memory, by the datasheet."""
    peak: Mapping[str, float]
    """FLOP/s by data type (fp32, tf32, fp16, bf16, fp8), dense, by the datasheet."""
    link: float
    """Bytes/s in one direction to the GPUs of the same node."""
    bus: float
    """Bytes/s of a large collective on that link, by NCCL's bus-bandwidth convention."""
    latency: float
    """Seconds of a collective in the node beyond volume / bus."""
    pcie: float
    """Bytes/s to the host's memory in one direction."""
    matmul: Mapping[str, float]
    """Share of ``peak`` that the matmuls of a training step reach, by data type."""
    attention: tuple[float, float]
    """FLOP/s of the fused attention kernel, forward and backward."""
    year: int
    source: str

    @property
    def has_host(self) -> bool:
        """Whether there is another memory beside its own, to offload to."""
        return self.name != "CPU"

    @property
    def memory_rate(self) -> float:
        """Bytes/s that a streaming kernel reaches."""
        return self.bandwidth * MEMORY_EFFICIENCY

    def half_precision(self) -> str:
        """The 16-bit data type to train in: bf16 where the matrix units have it, else fp16, else fp32."""
        return next((dtype for dtype in ("bf16", "fp16") if dtype in self.peak), "fp32")

    def matmul_rate(self, dtype: str) -> float:
        """FLOP/s of a training step's matmuls.

        Raises:
            ConfigError: the accelerator has no such data type.
        """
        if dtype not in self.peak:
            raise ConfigError(f"{self.name} has no {dtype}", "choose from " + ", ".join(self.peak))
        return self.peak[dtype] * self.matmul[dtype]


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal accelerators."""

    accelerator: Accelerator
    gpus: int
    gpus_per_node: int
    network: float
    """Bytes/s of one node's network cards together, in one direction."""
    host_bandwidth: float
    """Bytes/s of one node's host memory: what an optimizer on the CPU works with."""
    host_memory: float
    """Bytes of host memory for each GPU: its share of a whole node's."""
    dollars_per_gpu_hour: float | None = None
    instance: str | None = None
    """SageMaker's name, where the cluster was given by it."""
    launch: float = LAUNCH
    """Seconds of the host for one operation."""

    @property
    def nodes(self) -> int:
        """Nodes, the last one perhaps not full."""
        return -(-self.gpus // self.gpus_per_node)

    def bus(self, members: int, stride: int) -> float:
        """Bus bandwidth of a collective over ``members`` ranks that lie ``stride`` apart.

        Inside a node it is the link's. Across nodes a group can use the cards of as many GPUs of a node as it has
        members there; the ring passes every node's border once.
        """
        if members * stride <= self.gpus_per_node:
            return self.accelerator.bus
        here = max(1, self.gpus_per_node // stride)
        cards = self.network * NETWORK_EFFICIENCY * here / self.gpus_per_node
        return min(cards, self.accelerator.bus) if here > 1 else cards

    def latency(self, members: int, stride: int) -> float:
        """Latency of such a collective, in seconds: a ring has a hop for each member but one.

        Hops over a border of nodes are the network's, those inside a node the link's; the first node's are in what was
        measured there.
        """
        here = min(members, max(1, self.gpus_per_node // stride))
        borders = -(-members // here) - 1
        inside = members - 1 - borders - (here - 1)
        return (self.accelerator.latency if here > 1 else 0) + NETWORK_LATENCY * borders + LINK_STEP * inside


def _catalogue() -> dict[str, Any]:
    return catalogue_files.read("hardware")


OWN_FORM = ("memory_mib", "matmul", "attention")
"""Figures of the catalogue that are no fields of :class:`Accelerator` as they stand."""


@functools.cache
def accelerators() -> dict[str, Accelerator]:
    """The catalogue, by name."""
    known = {}
    for name, figures in _catalogue()["accelerators"].items():
        peak, shares = figures["peak"], figures.get("matmul", {})
        half = next(peak[dtype] for dtype in ("bf16", "fp16", "fp32") if dtype in peak)
        guessed = {"bus": figures["link"] * LINK_EFFICIENCY, "latency": LINK_LATENCY}
        forward, backward = figures.get("attention", [share * half for share in ATTENTION_SHARE])
        known[name] = Accelerator(
            name=name,
            memory=figures["memory_mib"] * 2**20,
            matmul={dtype: shares.get(dtype, MATMUL_SHARE) for dtype in peak},
            attention=(forward, backward),
            **{key: value for key, value in (guessed | figures).items() if key not in OWN_FORM},
        )
    return known


def names() -> list[str]:
    """Names of the accelerators, then of the SageMaker instances."""
    return [*accelerators(), *_catalogue()["instances"]]


def _resolve(name: str) -> str:
    """A catalogue name from the way people write it: ``a100-80gb``, ``NVIDIA H100 80GB HBM3``, ``4090``."""
    plain = name.lower().removeprefix("nvidia ").replace("geforce ", "").replace("_", "-").replace(" ", "-")
    known = {key.lower(): key for key in names()} | _catalogue()["also"]
    if plain in known:
        return known[plain]
    raise ConfigError(
        f"accelerator `{name}` is not in the catalogue",
        nearest(plain, known) or "choose from " + ", ".join(accelerators()),
    )


def of_device(name: str) -> Accelerator | None:
    """The accelerator that a driver calls so, as ``torch.cuda.get_device_name`` has it; None where none is known.

    Unlike :func:`accelerator`, no nearest one: an H100 PCIe has another peak than the H100 of the catalogue, and an
    A10 than the A10G.
    """
    known_as = _catalogue()["device_names"].get(name.removeprefix("NVIDIA "))
    return accelerators()[known_as] if known_as else None


def accelerator(name: str) -> Accelerator:
    """An accelerator by name, or that of a SageMaker instance.

    Raises:
        ConfigError: it is not in the catalogue; the message names the nearest.
    """
    resolved = _resolve(name)
    return accelerators()[_catalogue()["instances"].get(resolved, {}).get("accelerator", resolved)]


def instance(name: str, gpus: int) -> str | None:
    """The cheapest SageMaker instance with just so many of an accelerator; None where there is none."""
    chip = accelerator(name).name
    fitting = {
        kind: row["dollars"]
        for kind, row in _catalogue()["instances"].items()
        if (row["accelerator"], row["gpus"]) == (chip, gpus)
    }
    return min(fitting, key=fitting.__getitem__, default=None)


def lowest_price(name: str) -> float | None:
    """Dollars per hour of one such GPU in the SageMaker instance that has it cheapest; None where none has it."""
    chip = accelerator(name).name
    return min(
        (row["dollars"] / row["gpus"] for row in _catalogue()["instances"].values() if row["accelerator"] == chip),
        default=None,
    )


def cluster(
    name: str,
    gpus: int | None = None,
    *,
    gpus_per_node: int | None = None,
    network: float | None = None,
    memory_gb: float | None = None,
) -> Cluster:
    """A cluster of one kind of accelerator or SageMaker instance.

    Args:
        name: an accelerator or an instance type.
        gpus: GPUs in all; default: one node.
        gpus_per_node: GPUs in a node; default: as the node is usually sold, or as the instance has.
        network: bytes/s of one node's network cards together; default: the catalogue's.
        memory_gb: plan with no more than so many GiB per GPU.

    Raises:
        ConfigError: an unknown name, no GPU, or more memory than the accelerator has.
    """
    resolved = _resolve(name)
    instance = _catalogue()["instances"].get(resolved)
    chip = accelerator(name)
    node = _catalogue()["nodes"][chip.name]
    per_node = gpus_per_node or (instance or node)["gpus"]
    count = per_node if gpus is None else gpus
    if count < 1 or per_node < 1:
        raise ConfigError(f"a cluster of {count} GPUs, {per_node} in a node", "give at least one GPU")
    if memory_gb is not None:
        if not 0 < memory_gb * 2**30 <= chip.memory:
            raise ConfigError(
                f"{memory_gb} GiB per GPU, and {chip.name} has {chip.memory / 2**30:.1f}",
                "give less, or another accelerator",
            )
        chip = replace(chip, memory=int(memory_gb * 2**30))
    return Cluster(
        chip,
        count,
        min(per_node, count),
        network or (instance or node)["network"],
        node["host_bandwidth"],
        2**30 * (instance or node)["host_gib"] / (instance or node)["gpus"],
        instance["dollars"] / instance["gpus"] if instance else None,
        resolved if instance else None,
    )
