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
    layers, predicts = rank.blocks, rank.predicts
    recipe, shards, t = plan.bytes, plan.shards, plan.tensor
    cross = model.extra * layers / model.layers
    block = (model.attention + model.mlp) / t + model.norms
    ends = vocabulary.ends(model, plan, rank)
    elsewhere = layers * experts_elsewhere(model, plan)
    local = layers * block + cross / t + ends - elsewhere

    trained, frozen, moments = local, 0.0, recipe.moments
    if plan.lora_rank:
        trained = layers * adapters.of_a_block(model, plan.lora_rank) / t
        frozen = layers * adapters.frozen_bytes(model, plan.base_bits == 4, plan.width) / t + plan.width * (
            cross / t + ends
        )
    if plan.optimizer != "adamw":
        of_block_state, outside = optimizers.bytes_per_parameter(plan.optimizer, model)
        moments = of_block_state if plan.lora_rank else (of_block_state * (local - ends) + outside * ends) / local

    padding = expert_padding(model, plan)  # of a block
    own = (trained + layers * padding + elsewhere) / shards  # an expert is on fewer ranks, and shared by those alone
    parameters = recipe.parameters * (own if plan.stage >= 3 else trained) + frozen / (shards if plan.stage >= 3 else 1)
    gradients = (recipe.gradients + recipe.accumulated) * (own if plan.stage >= 2 else trained)
    optimizer = (recipe.master + moments) * (own if plan.stage >= 1 else trained)
    host = 0.0
    if plan.offload != "none":
        host += optimizer + gradients
        optimizer = 0.0
        gradients /= 1 if plan.stage < 2 else max(layers, 1)  # sharded ones leave block by block
        if plan.offload == "parameters":
            host += parameters
            parameters = 0.0

    width = plan.width
    sequence = plan.sequence_length // plan.context

    copied = (activations.key_copies(model, plan) - 1) * 2 * model.kv_heads * model.head_dim * width / t

    def of_block(checkpointing: Checkpointing) -> float:
        more = {"full": 0.0, "alternate": 0.5}.get(checkpointing, 1.0) * plan.micro_batch * sequence * copied
        return more + activations.of_block(
            model,
            plan.micro_batch,
            sequence,
            tensor=t,
            width=width,
            flash=plan.flash,
            fused=plan.compiled,
            sequence_parallel=plan.sequence_parallel,
            checkpointing=checkpointing,
            autocast=plan.autocasts,
        )

    depth = 1.0
    if plan.pipeline > 1:
        depth = in_flight(plan.schedule, plan.pipeline, plan.accumulation, plan.virtual, rank.rank)
    tokens = plan.micro_batch * sequence
    kept = layers * of_block(plan.checkpointing) * depth
    if plan.expert > 1 and plan.checkpointing != "full":  # copies on their way there and back, one for each choice
        kept += layers * tokens * model.experts_per_token * TRAVELLING * width * model.hidden
    if plan.lora_rank and plan.checkpointing != "full":
        kept += layers * depth * adapters.kept(model, plan.lora_rank, tokens, width)
    kept += _outside(model, plan, rank, tokens, depth)
    logits = vocabulary.logits(model, plan, tokens, width) if predicts else 0.0

    buffers = 0.0
    if plan.checkpointing in ("operators", "alternate", "full"):  # the block that is being recomputed
        buffers += of_block("none")
    if plan.engine == "fsdp" and plan.pipeline > 1:
        # gathered, and summed whole, from first micro-batch to last
        buffers += (width + recipe.gradients) * local + width * layers * padding
    elif plan.engine == "fsdp" and (shards > 1 or plan.offload != "none"):
        # At the loss the root's ends are gathered, and the last block, prefetched. Where that block's backward pass
        # takes more than the logits that have gone by then: the block before it, its whole gradient, that gradient
        # in fp32 to be reduced, and the head's, which waits for the embedding's.
        shared = vocabulary.ranks_of_vocabulary(model, plan)
        head = model.vocab * model.hidden / shared if predicts and model.has_head else 0
        gathered = width * (block + padding)
        whole = gathered + width * block + 4 * (block + padding) + width * head
        if plan.lora_rank:
            gathered = whole = adapters.frozen_bytes(model, plan.base_bits == 4, width) / t  # and no gradients of it
        buffers += width * ends + gathered + max(0.0, whole - logits)
        if plan.offload != "none":
            buffers += recipe.parameters * (block + padding) / shards  # a piece comes from the host, to be cast
    elif plan.engine == "deepspeed" and (shards > 1 or plan.offload != "none"):
        buffers += 2 * width * min(DEEPSPEED_BUCKET, local)
        if plan.stage >= 3:
            buffers += width * min(DEEPSPEED_LIVE, local)
    elif plan.autocasts:
        # autocast makes the 16-bit weights anew in each forward pass, in whose backward pass matmuls have to find them;
        # recomputed blocks let go of them when the forward pass ends
        copies = {"full": 1.0, "alternate": (1 + depth) / 2}.get(plan.checkpointing, depth)
        cast = (
            layers * block
            - elsewhere
            + (
                model.vocab * model.hidden / vocabulary.ranks_of_vocabulary(model, plan)
                if predicts and model.has_head
                else 0
            )
        )
        buffers += width * cast * copies
    if plan.base_bits == 4:
        buffers += width * adapters.dequantized(model) / t
    # FSDP makes a gradient when it is reduced, autograd when it is computed, and zero_grad() gives it back; engines
    # that reduce whole gradients, and DeepSpeed, keep buckets for them.
    made_late = plan.engine == "fsdp" or (plan.shards == 1 and plan.engine != "deepspeed")
    wait = not made_late or plan.accumulation > 1 or plan.pipeline > 1 or plan.offload != "none"
    return Memory(parameters, gradients, optimizer, kept, logits, buffers, host, wait)


def experts_elsewhere(model: Model, plan: Plan) -> float:
    """Parameters of a block's experts that other ranks keep, where ranks share them."""
    return model.experts * model.expert * (1 - 1 / plan.expert)


def expert_padding(model: Model, plan: Plan) -> float:
    """Parameters by which FSDP2 fills a block up before it cuts it: those of experts that ranks have no more of.

    It cuts along the first dimension, which of the experts' weights is their number, into equal pieces: of 8 experts
    8 of 64 ranks have one each, and 64 pieces are gathered and reduced (torch/distributed/fsdp/_fully_shard/
    _fsdp_param.py, ``_init_sharded_param``). Frozen experts beside adapters are counted as if they were cut evenly.
    """
    if plan.engine != "fsdp" or model.experts == 1 or plan.lora_rank:
        return 0.0
    pieces = -(-model.experts // plan.shards) * plan.shards
    return (pieces - model.experts) * model.expert / plan.tensor


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
