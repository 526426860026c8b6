"""Memory of training by formula, each term with its source. Bytes everywhere.

Model states: ZeRO, arXiv 1910.02054 sections 3 and 5. Activations: activations.py. Logits: vocabulary.py.
"""

from dataclasses import dataclass

from course_lib.planning import activations, adapters, optimizers, vocabulary
from course_lib.planning.models import Model
from course_lib.planning.pipeline_ranks import PipelineRank, distinct, in_flight, pipeline_ranks
from course_lib.planning.plan import Checkpointing, Plan

RUNTIME = int(1.5 * 2**30)
"""Bytes that are gone before the first tensor: CUDA context, cuBLAS workspaces, NCCL channels. An assumption."""
USABLE = 0.84
"""Share of the rest that a planned peak may take: up to it the plan fits in half of cases or more, by the errors of
published runs and what allocators reserve besides (:func:`course_lib.planning.intervals.chance_that_it_fits`)."""
HOST_USABLE = 0.95
"""Share of host memory that offloaded states may take. An assumption."""
TRAVELLING = 2
"""Copies of a token's hidden state for each expert that it chose: in the order of the experts where they are worked on,
and as they come back (course_lib/parallel/expert_dispatch.py)."""
DEEPSPEED_BUCKET = 500_000_000
"""Elements of DeepSpeed's all-gather and reduce buckets, its default."""
DEEPSPEED_LIVE = 1_000_000_000
"""Parameters that ZeRO-3 keeps gathered, its default ``stage3_max_live_parameters``."""


@dataclass(frozen=True)
class Memory:
    """Peak bytes of one GPU by kind, and bytes of host memory for each GPU."""

    parameters: float
    gradients: float
    optimizer: float
    """Moments and fp32 master weights."""
    activations: float
    logits: float
    buffers: float
    """Gathered parameters, communication buckets, the block that is being recomputed."""
    host: float = 0.0
    gradients_wait: bool = True
    """Gradients stand while activations are kept; False: they come as those go, and only the larger counts."""

    @property
    def states(self) -> float:
        """Parameters, gradients and optimizer."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """Everything on the GPU at the peak."""
        return sum(self.at_peak().values())

    def at_peak(self) -> dict[str, float]:
        """The kinds that stand at the same time, in the order of a stacked bar; their sum is the peak."""
        held = {
            kind: getattr(self, kind)
            for kind in ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")
        }
        if not self.gradients_wait:
            before = self.gradients < self.activations + self.logits
            held |= {"gradients": 0.0} if before else {"activations": 0.0, "logits": 0.0}
        return held

    def fits(self, capacity: float, host: float = float("inf")) -> bool:
        """Whether a GPU with ``capacity`` bytes holds it, and ``host`` bytes of host memory what is offloaded."""
        return self.total <= (capacity - RUNTIME) * USABLE and self.host <= host * HOST_USABLE


def zero_model_states(parameters: float, shards: int, stage: int, optimizer_bytes: float = 12) -> float:
    """Bytes per GPU of 16-bit weights and gradients and a mixed-precision optimizer.

    Args:
        parameters: of the model, Psi.
        shards: degree of data parallelism, N_d.
        stage: 0 to 3.
        optimizer_bytes: K; 12 for Adam.

    Source: arXiv 1910.02054 sections 5.1 to 5.3 and table 1.
    """
    return parameters * (
        2 / (shards if stage >= 3 else 1)
        + 2 / (shards if stage >= 2 else 1)
        + optimizer_bytes / (shards if stage >= 1 else 1)
    )


def estimate(model: Model, plan: Plan) -> Memory:
    """Peak memory of the GPU that needs most, of all pipeline ranks, and what it keeps in host memory.

    The peak is where the backward pass begins: all states, all activations in flight, the logits, and what the
    engine gathers; or where it ends, with the gradients in the activations' place. Sharded gradients live whole only
    block by block. DDP's buckets are counted as views of the
    gradients (``gradient_as_bucket_view=True``).

    Args:
        model: the model.
        plan: the layout; its ``accumulation`` micro-batches fill the pipeline.
    """
    return max(
        (of_rank(model, plan, rank) for rank in distinct(pipeline_ranks(plan, model.layers))),
        key=lambda memory: memory.total,
    )


def of_rank(model: Model, plan: Plan, rank: PipelineRank) -> Memory:
    """Peak memory of the GPUs of one pipeline rank."""
    return _RankMemory(model, plan, rank).count()


class _RankMemory:
    """The terms of a pipeline rank's memory, each in a method."""

    def __init__(self, model: Model, plan: Plan, rank: PipelineRank):
        self.model, self.plan, self.rank = model, plan, rank
        self.layers, self.width, self.tensor = rank.blocks, plan.width, plan.tensor
        self.block = (model.attention + model.mlp) / plan.tensor + model.norms  # parameters of a block
        self.cross = model.extra * self.layers / model.layers / plan.tensor
        self.ends = vocabulary.ends(model, plan, rank)
        self.elsewhere = self.layers * experts_elsewhere(model, plan)
        self.padding = expert_padding(model, plan)  # of a block
        self.local = self.layers * self.block + self.cross + self.ends - self.elsewhere
        shared = vocabulary.ranks_of_vocabulary(model, plan)
        self.head = model.vocab * model.hidden / shared if rank.predicts and model.has_head else 0
        self.sequence = plan.sequence_length // plan.context
        self.tokens = plan.micro_batch * self.sequence
        self.depth = 1.0  # micro-batches in flight
        if plan.pipeline > 1:
            self.depth = in_flight(plan.schedule, plan.pipeline, plan.accumulation, plan.virtual, rank.rank)

    def count(self) -> Memory:
        """All terms together."""
        parameters, gradients, optimizer, host = self._offloaded(*self._states())
        logits = vocabulary.logits(self.model, self.plan, self.tokens, self.width) if self.rank.predicts else 0.0
        return Memory(
            parameters, gradients, optimizer, self._kept(), logits, self._buffers(logits), host, self._gradients_wait()
        )

    # --- states ---

    def _trained(self) -> tuple[float, float]:
        """Parameters that are trained, and bytes of those that are not."""
        model, plan = self.model, self.plan
        if not plan.lora_rank:
            return self.local, 0.0
        frozen = self.layers * adapters.frozen_bytes(model, plan.base_bits == 4, self.width) / self.tensor
        return (
            self.layers * adapters.of_a_block(model, plan.lora_rank) / self.tensor,
            frozen + self.width * (self.cross + self.ends),
        )

    def _moments(self) -> float:
        """Bytes of optimizer state per trained parameter, without its fp32 copy."""
        if self.plan.optimizer == "adamw":
            return self.plan.bytes.moments
        of_block, outside = optimizers.bytes_per_parameter(self.plan.optimizer, self.model)
        if self.plan.lora_rank:
            return of_block
        return (of_block * (self.local - self.ends) + outside * self.ends) / self.local

    def _states(self) -> tuple[float, float, float]:
        """Bytes of parameters, gradients and optimizer, before any of it is offloaded."""
        recipe, stage, shards = self.plan.bytes, self.plan.stage, self.plan.shards
        trained, frozen = self._trained()
        # an expert is on fewer ranks, and shared by those alone
        own = (trained + self.layers * self.padding + self.elsewhere) / shards
        parameters = recipe.parameters * (own if stage >= 3 else trained) + frozen / (shards if stage >= 3 else 1)
        gradients = (recipe.gradients + recipe.accumulated) * (own if stage >= 2 else trained)
        optimizer = (recipe.master + self._moments()) * (own if stage >= 1 else trained)
        return parameters, gradients, optimizer

    def _offloaded(self, parameters: float, gradients: float, optimizer: float) -> tuple[float, float, float, float]:
        """Bytes of the three states that stay on the GPU, and of all that go to the host."""
        plan = self.plan
        if plan.offload == "none":
            return parameters, gradients, optimizer, 0.0
        host = optimizer + gradients
        gradients /= 1 if plan.stage < 2 else max(self.layers, 1)  # sharded ones leave block by block
        if plan.offload == "parameters":
            return 0.0, gradients, 0.0, host + parameters
        return parameters, gradients, 0.0, host

    # --- activations ---

    def _of_block(self, checkpointing: Checkpointing) -> float:
        """Bytes that an average block keeps of one micro-batch, and the copies of its key heads."""
        model, plan = self.model, self.plan
        if checkpointing == "alternate":
            return (self._of_block("none") + self._of_block("full")) / 2
        copies = activations.key_copies(model, plan) - 1
        copied = copies * 2 * model.kv_heads * model.head_dim * self.width / self.tensor
        more = 0.0 if checkpointing == "full" else self.tokens * copied
        return more + activations.of_block(
            model,
            plan.micro_batch,
            self.sequence,
            tensor=self.tensor,
            width=self.width,
            flash=plan.flash,
            fused=plan.compiled,
            sequence_parallel=plan.sequence_parallel,
            checkpointing=checkpointing,
            autocast=plan.autocasts,
        )

    def _kept(self) -> float:
        """Bytes that all blocks keep, and what is kept outside them."""
        model, plan, layers = self.model, self.plan, self.layers
        kept = layers * self._of_block(plan.checkpointing) * self.depth
        if plan.expert > 1 and plan.checkpointing != "full":  # copies on their way there and back, one for each choice
            kept += layers * self.tokens * model.experts_per_token * TRAVELLING * self.width * model.hidden
        if plan.lora_rank and plan.checkpointing != "full":
            kept += layers * self.depth * adapters.kept(model, plan.lora_rank, self.tokens, self.width)
        return kept + _outside(model, plan, self.rank, self.tokens, self.depth)

    # --- buffers ---

    def _buffers(self, logits: float) -> float:
        """Bytes of the block that is recomputed, of what the engine gathers, and of weights out of 4 bits."""
        plan = self.plan
        buffers = self._of_block("none") if plan.checkpointing in ("operators", "alternate", "full") else 0.0
        if plan.base_bits == 4:
            buffers += self.width * adapters.dequantized(self.model) / self.tensor
        partitions = plan.shards > 1 or plan.offload != "none"
        if plan.engine == "fsdp" and plan.pipeline > 1:
            # gathered, and summed whole, from first micro-batch to last
            gathered = (self.width + plan.bytes.gradients) * self.local
            return buffers + gathered + self.width * self.layers * self.padding
        if plan.engine == "fsdp" and partitions:
            return buffers + self._gathered_by_fsdp(logits)
        if plan.engine == "deepspeed" and partitions:
            live = min(DEEPSPEED_LIVE, self.local) if plan.stage >= 3 else 0
            return buffers + self.width * (2 * min(DEEPSPEED_BUCKET, self.local) + live)
        return buffers + (self._autocast_copies() if plan.autocasts else 0.0)

    def _gathered_by_fsdp(self, logits: float) -> float:
        """Bytes of gathered weights at the loss, and by how much backward's exceed them once the logits have gone.

        At the loss the root's ends are gathered, and the last block, prefetched. In that block's backward pass there
        are the block before it, its whole gradient, that gradient in fp32 to be reduced, and the head's, which waits
        for the embedding's.
        """
        plan, width, block = self.plan, self.width, self.block + self.padding
        gathered = width * block
        whole = gathered + width * self.block + 4 * block + width * self.head
        if plan.lora_rank:  # no gradients of what is gathered
            gathered = whole = adapters.frozen_bytes(self.model, plan.base_bits == 4, width) / self.tensor
        cast = plan.bytes.parameters * block / plan.shards if plan.offload != "none" else 0.0  # a shard from the host
        return width * self.ends + gathered + max(0.0, whole - logits) + cast

    def _autocast_copies(self) -> float:
        """Bytes of the 16-bit weights that autocast makes in each forward pass, and backward's matmuls have to find.

        Recomputed blocks let go of them when the forward pass ends.
        """
        copies = {"full": 1.0, "alternate": (1 + self.depth) / 2}.get(self.plan.checkpointing, self.depth)
        return self.width * (self.layers * self.block - self.elsewhere + self.head) * copies

    def _gradients_wait(self) -> bool:
        """Whether gradients stand while activations are kept.

        FSDP makes a gradient when it is reduced, autograd when it is computed, and zero_grad() gives it back; engines
        that reduce whole gradients, and DeepSpeed, keep buckets for them.
        """
        plan = self.plan
        made_late = plan.engine == "fsdp" or (plan.shards == 1 and plan.engine != "deepspeed")
        return not made_late or plan.accumulation > 1 or plan.pipeline > 1 or plan.offload != "none"


def experts_elsewhere(model: Model, plan: Plan) -> float:
    """Parameters of a block's experts that other ranks keep, where ranks share them."""
    return model.experts * model.expert * (1 - 1 / plan.expert)


def expert_padding(model: Model, plan: Plan) -> float:
    """Parameters by which FSDP2 fills a block up before it cuts it: those of experts that ranks have no more of.

    It cuts along the first dimension, which of the experts' weights is their number, into equal shards: of 8 experts
    8 of 64 ranks have one each, and 64 shards are gathered and reduced (torch/distributed/fsdp/_fully_shard/
    _fsdp_param.py, ``_init_sharded_param``). Frozen experts beside adapters are counted as if they were cut evenly.
    """
    if plan.engine != "fsdp" or model.experts == 1 or plan.lora_rank:
        return 0.0
    shards = -(-model.experts // plan.shards) * plan.shards
    return (shards - model.experts) * model.expert / plan.tensor


def _outside(model: Model, plan: Plan, rank: PipelineRank, tokens: int, depth: float) -> float:
    """Bytes that are kept outside the blocks: masks of the embedding's dropout, inputs of last norm and output layer.

    Where sequences are not split over the tensor ranks these are whole on each; where logits are gathered the output
    layer has taken all tokens.
    """
    split = plan.tensor if plan.sequence_parallel else 1
    kept = depth * model.hidden / split if rank.embeds and model.dropout else 0.0
    if rank.predicts:
        norm = 4 if plan.autocasts else plan.width
        kept += model.hidden * (norm / split + plan.width / (split if plan.head == "parallel" else 1))
    return tokens * kept
