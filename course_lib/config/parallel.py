"""Config sections of parallelism: strategy, engine, pipeline, and what data-parallel ranks say to each other."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt, Le

from course_lib.config.axes import ENGINES
from course_lib.config.fields import Fraction, Positive, Strict

BUCKET_MB = 25.0
"""Of torch's DDP, and of what the course has built itself."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Strict):
    """Distribution of one model's state and work over the ranks."""

    strategy: Literal["ddp", "zero1", "zero2", "zero3", "fsdp"] = "ddp"
    """Every rank holds all state (ddp), or each a part: of optimizer states (zero1), gradients too (zero2), \
parameters too (zero3, fsdp)."""
    engine: Literal["deepspeed", "torch", "scratch", "accelerate"] | None = None
    """Whose code does it: DeepSpeed, torch, this course's own, or Accelerate's plugin (fsdp, GPUs); default: \
deepspeed for zero, else torch; in pipelines, beside shared layers or experts and for less communication scratch, if \
that has the strategy."""
    bucket_mb: Annotated[float, Gt(0)] | None = None
    """Gradients that travel together, in MiB; default: 25, and for DeepSpeed its own 500 million elements, or an \
eighth of a smaller model."""
    ddp_find_unused_parameters: bool | None = None
    """Let DDP look for parameters that the loss does not use, and leave them alone: a walk over the graph and a \
small message per backward. Default: where a forward of a few tokens leaves some out (XLNet, RoFormer), and for \
experts and dropped layers; the Hugging Face Trainer always does, except under activation checkpointing."""
    lean_buffers: bool = False
    """Let DeepSpeed hold and send what the formulas of lesson 05 count: buckets of 25 MiB, no parameter whole on \
every rank, nothing kept for its next use. By default it takes memory for speed."""
    tensor_parallel_size: Positive = 1
    """Ranks that share the matrices of each layer, neighbours in the order of ranks; the others are data parallel."""
    sequence_parallel: bool = False
    """Let those ranks share the tokens between the matrices, too, where they otherwise all do the same."""
    context_parallel_size: Positive = 1
    """Ranks that share the tokens of each row, and exchange keys and values in attention: for long texts."""
    context_parallel: Literal["zigzag", "ring", "ulysses", "allgather"] = "zigzag"
    """How they do: keys and values travel round (ring; zigzag deals the tokens so that causal attention is as much \
work for each), are gathered (allgather), or heads are exchanged for tokens (ulysses)."""
    expert_parallel_size: Positive = 1
    """Data parallel ranks that share the experts of a mixture of experts, neighbours in the order of ranks: each \
keeps a part of them, and tokens travel to theirs."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """State kept in the host's memory rather than the GPU's (deepspeed and torch)."""
    shard_group_size: Positive | None = None
    """Ranks over which fsdp shards, the groups replicating each other (HSDP); default: all."""

    @property
    def chosen_engine(self) -> str:
        """The engine named, or the strategy's default."""
        return self.engine or ENGINES[self.strategy][0]

    @property
    def bucket_bytes(self) -> int:
        """``bucket_mb`` in bytes."""
        return round((self.bucket_mb or BUCKET_MB) * 2**20)


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(Strict):
    """Stages of a model, and the order in which they work (training_type pipeline)."""

    schedule: Literal[
        "gpipe",
        "1f1b",
        "interleaved",
        "looped_bfs",
        "zb_h1",
        "zb_h2",
        "interleaved_zero_bubble",
        "zbv",
        "dualpipev",
        "zb_auto",
        "zbv_auto",
        "v_half",
        "v_min",
    ] = "1f1b"
    """Order of the ranks' forwards and backwards. The last four are fitted, for F, I and W that take equally long."""
    pipeline_parallel_size: Positive | None = None
    """Ranks of a pipeline; default: all that data_parallel_size leaves."""
    data_parallel_size: Positive | None = None
    """Pipelines side by side, each on its own rows; default: all that pipeline_parallel_size leaves, or 1."""
    stages_per_rank: Positive | None = None
    """Stages that a rank holds; default: what the schedule prescribes, or 2 where it takes any."""
    pipeline_chunks: Positive | None = None
    """Micro-batches that batch_size is cut into on its way through the pipeline; default: 2 per rank."""
    split_spec: str | None = None
    """Blocks to cut at, as in `transformer.h.5:end,transformer.h.8:beginning`; default: cut by split_by."""
    split_by: Literal["flops", "parameters", "blocks"] = "flops"
    """What to even out between the stages where there is no split_spec; `blocks`: as `course plan` counts."""


LOCAL = ("local_sgd", "diloco")
"""Ways in which ranks train by themselves between two agreements."""


@dataclass(frozen=True, kw_only=True)
class CommunicationConfig(Strict):
    """Less communication between the ranks of --strategy ddp --engine scratch, for slow links (lesson 18)."""

    communication: Literal["all_reduce", "local_sgd", "diloco", "powersgd", "topk", "int8", "int4"] = "all_reduce"
    """What travels: each step's whole gradient (all_reduce), its matrices in low rank (powersgd), its largest \
elements (topk), or all of it in 8 or 4 bits (int8, int4); or every sync_every steps the weights (local_sgd), or their \
change, for an outer optimizer (diloco)."""
    sync_every: Positive = 32
    """Optimizer steps that each rank makes by itself between two agreements (local_sgd, diloco)."""
    outer_lr: Annotated[float, Gt(0)] = 0.7
    """Learning rate of diloco's outer optimizer, SGD with Nesterov's momentum."""
    outer_momentum: Fraction = 0.9
    """Momentum of diloco's outer optimizer."""
    powersgd_rank: Positive = 4
    """Rank of the matrices that PowerSGD sends."""
    topk_density: Annotated[float, Gt(0), Le(1)] = 0.01
    """Share of a bucket's elements that topk sends."""
    error_feedback: bool = True
    """Add what powersgd or topk left out to the next step's gradient, rather than lose it."""
