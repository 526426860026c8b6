"""A plan: how a model is laid over GPUs, and how a step is run. What memory, cost and search all speak of."""

from dataclasses import dataclass
from typing import Literal, get_args

from course_lib.errors import ConfigError

Engine = Literal["ddp", "deepspeed", "fsdp", "megatron"]
Checkpointing = Literal["none", "selective", "operators", "alternate", "full"]
Offload = Literal["none", "optimizer", "parameters"]
OPTIMIZERS = ("adamw", "adamw-8bit", "adafactor", "muon", "sgd-momentum", "sgd")
"""What optimizers.py counts the states of."""
WHOLE = ("adafactor", "muon")
"""Optimizers whose update of an element needs its whole matrix."""
Context = Literal["ring", "gather", "ulysses"]
Loss = Literal["plain", "chunked", "linear"]
LOSSES = get_args(Loss)
FAMILIES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP", "3-D")
"""Kinds of layouts that a search can be limited to: :func:`course_lib.planning.strategy.family`."""
Head = Literal["parallel", "gathered"]
COUNTS = (
    "sequence_length",
    "data",
    "tensor",
    "pipeline",
    "context",
    "replicas",
    "expert",
    "micro_batch",
    "accumulation",
    "virtual",
)
"""Fields of :class:`Plan` that are at least 1."""


@dataclass(frozen=True)
class Recipe:
    """Bytes per parameter of everything that training keeps between steps."""

    parameters: float
    """Weights that the matmuls read, or the fp32 ones where those are cast when used."""
    gradients: float
    master: float
    """fp32 copy that the optimizer updates; 0 where ``parameters`` are it."""
    moments: float
    """Adam's two."""
    accumulated: float = 0
    """A second, fp32 gradient that micro-batches are summed in."""

    @property
    def total(self) -> float:
        """Bytes per parameter with nothing sharded."""
        return self.parameters + self.gradients + self.master + self.moments + self.accumulated


MIXED = Recipe(2, 2, 4, 8)
"""16-bit weights and gradients, fp32 master and Adam: ZeRO's K = 12, arXiv 1910.02054 section 3.1."""
RECIPES = {
    "mixed": MIXED,
    "autocast": Recipe(4, 4, 0, 8),
    "mixed, fp32 gradients": Recipe(2, 4, 4, 8),
    "mixed, accumulating in fp32": Recipe(2, 2, 4, 8, accumulated=4),
    "Transformer Engine": Recipe(4, 4, 0, 8),
    "FP8-LM O3": Recipe(1, 1, 2, 3, accumulated=2),
    "DeepSeek-V3": Recipe(1, 2, 4, 4, accumulated=4),
    "nanotron FP8": Recipe(1, 1, 2, 2, accumulated=4),
}
"""Bytes per parameter by recipe; the sums are the Ultra-Scale Playbook's table of mixed-precision recipes."""
ENGINE_RECIPE: dict[Engine, str] = {
    "ddp": "autocast",
    "fsdp": "autocast",
    "deepspeed": "mixed",
    "megatron": "mixed, fp32 gradients",
}
"""DDP with autocast and FSDP2 with a mixed-precision policy keep fp32 weights; DeepSpeed and Megatron keep a copy."""


@dataclass(frozen=True)
class Plan:
    """One way to train. Ranks are laid tensor first, then context, data, pipeline: the first stays inside a node."""

    sequence_length: int
    engine: Engine = "ddp"
    stage: int = 0
    """ZeRO stage: 0 nothing sharded, 1 optimizer, 2 and gradients, 3 and parameters; FSDP is 3."""
    data: int = 1
    """Replicas, or ranks that share one sharded copy."""
    tensor: int = 1
    pipeline: int = 1
    replicas: int = 1
    """Copies of the model that FSDP keeps, each sharded over neighbouring ranks (HSDP); the ranks divide into them."""
    expert: int = 1
    """Data-parallel ranks, neighbours, that share a mixture's experts: each keeps a part, and tokens travel to theirs
    (arXiv 2006.16668)."""
    context: int = 1
    """Ranks that share one sequence."""
    context_by: Context = "ring"
    """How they attend to each other's keys and values: these go round, block by block (ring: arXiv 2310.01889); are
    gathered first (gather: arXiv 2407.21783 section 3.3.2); or every rank has whole sequences of some heads (ulysses:
    arXiv 2309.14509)."""
    micro_batch: int = 1
    """Sequences a replica takes at once."""
    accumulation: int = 1
    """Micro-batches of one step."""
    checkpointing: Checkpointing = "none"
    """Recomputed in the backward pass: nothing, attention's scores (selective: arXiv 2205.05198 section 5), all but
    attention and every second matmul (operators: torchtitan's "selective op"), every second block (alternate), or
    whole blocks (full)."""
    offload: Offload = "none"
    """What lives in host memory: nothing, the optimizer, or the parameters too; FSDP2 has the last alone."""
    precision: str = "bf16"
    """Data type of the matmuls: fp32, tf32, fp16, bf16, fp8."""
    recipe: str = ""
    """A key of ``RECIPES``; empty: the engine's."""
    flash: bool = True
    """Fused attention, which never writes the scores to memory."""
    compiled: bool = False
    """Norms, activations and rotary positions run as one kernel each (torch.compile, Apex, Transformer Engine)."""
    sequence_parallel: bool = True
    """Split over the tensor ranks what tensor parallelism leaves whole (arXiv 2205.05198 section 4.2)."""
    loss: Loss = "plain"
    """Cross-entropy of the logits in plain PyTorch operations; in fp32 a chunk of rows at a time, as `course train` has
    it (chunked); or together with the output layer, so that there are never all logits (linear: arXiv 2410.10989)."""
    head: Head = "parallel"
    """Each tensor rank's logits: those of its part of the vocabulary, from which the loss is taken (parallel:
    Megatron-LM, PyTorch's ``loss_parallel``), or all, gathered, as `course train` has them (gathered)."""
    optimizer: str = "adamw"
    """One of :data:`OPTIMIZERS`."""
    lora_rank: int = 0
    """Only adapters of this rank beside the blocks' matrices are trained (arXiv 2106.09685); 0: all parameters are."""
    base_bits: int = 16
    """In which the matrices beside adapters are kept: 16, or 4 (QLoRA, arXiv 2305.14314)."""
    schedule: str = "1f1b"
    """gpipe, 1f1b, interleaved, zb_h1, zb_h2 or zbv."""
    virtual: int = 1
    """Stages a pipeline rank has (interleaved)."""
    overlap: bool = True
    """Gradients and parameters of data parallelism move while something is computed."""
    overlap_tensor: bool = False
    """The collectives of tensor parallelism move while matmuls run (Transformer Engine's userbuffers, async TP)."""

    def __post_init__(self) -> None:
        for name in COUNTS:
            if getattr(self, name) < 1:
                raise ConfigError(f"a plan with {name} {getattr(self, name)}", "give at least 1")
        if self.recipe and self.recipe not in RECIPES:
            raise ConfigError(f"recipe `{self.recipe}` is unknown", "choose from " + ", ".join(RECIPES))
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(f"optimizer `{self.optimizer}` is unknown", "choose from " + ", ".join(OPTIMIZERS))
        if self.lora_rank < 0 or self.base_bits not in (4, 16) or (self.base_bits == 4 and not self.lora_rank):
            raise ConfigError(
                f"adapters of rank {self.lora_rank} beside {self.base_bits} bits",
                "give a rank from 1 on, and 16 or 4 bits; without adapters nothing is kept in 4",
            )
        if self.optimizer in WHOLE and (self.tensor > 1 or self.stage > 0 or self.lora_rank):
            raise ConfigError(
                f"{self.optimizer} with sharding, tensor ranks or adapters: it needs whole matrices",
                "plan it with DDP, or another optimizer",
            )
        if not 0 <= self.stage <= 3 or (self.engine == "fsdp") != (self.stage == 3 and self.engine != "deepspeed"):
            raise ConfigError(
                f"{self.engine} at ZeRO stage {self.stage}",
                "FSDP is stage 3; DDP is 0, Megatron 0 or 1, DeepSpeed 1 to 3",
            )
        if self.replicas > 1 and (self.engine != "fsdp" or self.data * self.context % self.replicas):
            raise ConfigError(
                f"{self.replicas} copies of the model over {self.data * self.context} ranks of {self.engine}",
                "copies are FSDP's, and divide its ranks",
            )
        if self.expert > 1 and (
            self.engine != "megatron" or self.data % self.expert or self.tensor * self.pipeline * self.context > 1
        ):
            raise ConfigError(
                f"experts over {self.expert} of {self.data} data-parallel ranks of {self.engine}, beside "
                f"{self.tensor * self.pipeline * self.context - 1} others",
                "plan experts with Megatron's engine, data ranks that they divide, and no others",
            )
        if self.engine == "fsdp" and self.offload == "optimizer":
            raise ConfigError(
                "fsdp with offload optimizer, and FSDP2 keeps parameters with their optimizer",
                "plan with offload parameters, or with ZeRO",
            )

    @property
    def gpus(self) -> int:
        """GPUs that the plan takes."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def global_batch(self) -> int:
        """Sequences of one step."""
        return self.data * self.micro_batch * self.accumulation

    @property
    def shards(self) -> int:
        """Ranks that one copy of the model's states is sharded over."""
        return self.data * self.context // self.replicas

    @property
    def bytes(self) -> Recipe:
        """Bytes per parameter by kind, for the plan's precision."""
        if self.precision in ("fp32", "tf32") or self.lora_rank:  # of adapters, which PEFT keeps in fp32
            return RECIPES["autocast"]
        return RECIPES[self.recipe or ENGINE_RECIPE[self.engine]]

    @property
    def autocasts(self) -> bool:
        """Weights in fp32 that autocast casts as they are used, and with them fp32 between the blocks; FSDP2's
        mixed-precision policy casts what goes into a block too."""
        low = self.precision not in ("fp32", "tf32")
        return low and not self.lora_rank and self.engine != "fsdp" and self.bytes == RECIPES["autocast"]

    @property
    def width(self) -> int:
        """Bytes of an activation, and of a weight as the matmuls read it."""
        return 4 if self.precision in ("fp32", "tf32") else 2

    @property
    def strategy(self) -> str:
        """The name that people use: DDP, FSDP, ZeRO-2, with what is added to it."""
        base = {
            "ddp": "DDP",
            "fsdp": f"HSDP over {self.shards}" if self.replicas > 1 else "FSDP",
            "deepspeed": f"ZeRO-{self.stage}",
            "megatron": f"Megatron, ZeRO-{self.stage}" if self.stage else "Megatron",
        }[self.engine]
        if self.expert > 1:
            base = f"ZeRO-{self.stage}" if self.stage else "DDP"
        degrees = (
            ("EP", self.expert),
            ("TP", self.tensor),
            ("PP", self.pipeline),
            ("Ulysses" if self.context_by == "ulysses" else "CP", self.context),
        )
        extra = [f"{name}={degree}" for name, degree in degrees if degree > 1]
        if self.offload != "none":
            everything = self.engine == "deepspeed" and self.offload == "parameters"
            extra.append("parameters offloaded" if everything else "CPU offload")
        if self.lora_rank:
            extra.append(f"{'QLoRA' if self.base_bits == 4 else 'LoRA'} {self.lora_rank}")
        if self.checkpointing != "none":
            extra.append(f"{self.checkpointing} checkpointing")
        if self.loss == "linear":
            extra.append("linear loss")
        return " + ".join([base, *extra])
