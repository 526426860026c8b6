"""Memory of training by formula, each term with its source. Bytes everywhere.

Model states: ZeRO, arXiv 1910.02054 sections 3 and 5. Activations: Korthikanti et al., arXiv 2205.05198 section 4,
counted the same way for gated MLPs, grouped queries and fused attention, which that paper does not have; for a GPT
block they are its table 2 to the byte.
"""

from dataclasses import dataclass

from course_lib.planning.models import Model
from course_lib.planning.pipeline_ranks import PipelineRank, distinct, in_flight, pipeline_ranks
from course_lib.planning.plan import Checkpointing, Plan

RUNTIME = int(1.5 * 2**30)
"""Bytes that are gone before the first tensor: CUDA context, cuBLAS workspaces, NCCL channels. An assumption."""
USABLE = 0.95
"""Share of the rest that tensors can fill before the allocator's fragments stop them. An assumption."""
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
        held = {kind: getattr(self, kind) for kind in
                ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")}
        if not self.gradients_wait:
            before = self.gradients < self.activations + self.logits
            held |= {"gradients": 0.0} if before else {"activations": 0.0, "logits": 0.0}
        return held

    def fits(self, capacity: float, host: float = float("inf")) -> bool:
        """Whether a GPU with ``capacity`` bytes holds it, and ``host`` bytes of host memory what is offloaded."""
        return self.total <= (capacity - RUNTIME) * USABLE and self.host <= host * USABLE


def zero_model_states(parameters: float, shards: int, stage: int, optimizer_bytes: float = 12) -> float:
    """Bytes per GPU of 16-bit weights and gradients and a mixed-precision optimizer.

    Args:
        parameters: of the model, Psi.
        shards: degree of data parallelism, N_d.
        stage: 0 to 3.
        optimizer_bytes: K; 12 for Adam.

    Source: arXiv 1910.02054 sections 5.1 to 5.3 and table 1.
    """
    return parameters * (2 / (shards if stage >= 3 else 1) + 2 / (shards if stage >= 2 else 1)
                         + optimizer_bytes / (shards if stage >= 1 else 1))


def deepspeed_zero2(parameters: int, gpus_per_node: int = 1, nodes: int = 1, offload: bool = True,
                    whole_gradients: bool = False, factor: float = 1.5) -> tuple[int, int]:
    """DeepSpeed's own estimate for ZeRO-2: bytes of host memory per node and of one GPU.

    Args:
        parameters: of the model.
        gpus_per_node: GPUs in a node.
        nodes: nodes.
        offload: the optimizer is in host memory.
        whole_gradients: as the documentation's table still counts: every GPU keeps all 16-bit gradients.
        factor: DeepSpeed's additional buffer factor.

    Source: ``estimate_zero2_model_states_mem_needs`` of deepspeed 0.19.
    """
    gpus = gpus_per_node * nodes
    if offload:
        return int(parameters * max(4 * gpus, 16) * factor), 2 * parameters
    whole, split = (4, 16) if whole_gradients else (2, 18)
    return int(parameters * 4 * gpus_per_node * factor), whole * parameters + int(split * parameters / gpus)


def deepspeed_zero3(parameters: int, largest_layer: int, gpus_per_node: int = 1, nodes: int = 1,
                    offload_optimizer: bool = True, offload_parameters: bool = True, zero_init: bool = True,
                    factor: float = 1.5) -> tuple[int, int]:
    """DeepSpeed's own estimate for ZeRO-3: bytes of host memory per node and of one GPU.

    Args:
        parameters: of the model.
        largest_layer: parameters of its largest module, :attr:`Model.largest_matrix`.
        gpus_per_node: GPUs in a node.
        nodes: nodes.
        offload_optimizer: the optimizer is in host memory.
        offload_parameters: so are the parameters; needs ``offload_optimizer``.
        zero_init: the model is built sharded (``deepspeed.zero.Init``).
        factor: DeepSpeed's additional buffer factor.

    Source: ``estimate_zero3_model_states_mem_needs`` of deepspeed 0.19.
    """
    gpus, largest = gpus_per_node * nodes, 4 * largest_layer
    if not offload_optimizer:
        host = largest_layer if zero_init else parameters
        return int(host * 4 * gpus_per_node * factor), largest + int(18 * parameters / gpus)
    kept = (18 if offload_parameters else 16) / nodes
    host_bytes = parameters * (kept if zero_init else max(4 * gpus_per_node, kept)) * factor
    return int(host_bytes), largest + (0 if offload_parameters else int(2 * parameters / gpus))


def activations(model: Model, micro_batch: int, sequence_length: int, *, tensor: int = 1,
                sequence_parallel: bool = False, checkpointing: Checkpointing = "none", flash: bool = False,
                fused: bool = True) -> float:
    """Bytes that one block keeps for its backward pass, of one micro-batch on one tensor rank, 16-bit activations.

    Args:
        model: its sizes; ``dropout`` adds the masks, one byte per element.
        micro_batch: sequences, b.
        sequence_length: tokens per sequence, s; a context rank's share where a sequence is split.
        tensor: tensor-parallel ranks, t.
        sequence_parallel: norms, residuals and masks are split over them too.
        checkpointing: "selective" keeps no attention scores, "full" only the block's input, "operators" that, what
            attention gave and the matmuls that :func:`course_lib.planning.work.second_matmuls` leaves; "alternate"
            is the mean of nothing and "full".
        flash: fused attention: the scores are never kept, but one sum per row and head.
        fused: False: in plain PyTorch operations an RMS norm also keeps its input in fp32 and its result before the
            weight, and a GELU that is written out keeps three steps on the way.

    Source: arXiv 2205.05198 section 4 and table 2.
    """
    h, tokens = model.hidden, micro_batch * sequence_length
    if checkpointing == "full":
        return 2 * h * tokens / (tensor if sequence_parallel else 1)
    if checkpointing == "alternate":
        none, full = (activations(model, micro_batch, sequence_length, tensor=tensor, flash=flash, fused=fused,
                                  sequence_parallel=sequence_parallel, checkpointing=kept) for kept in ("none", "full"))
        return (none + full) / 2
    if checkpointing == "operators":
        inside = model.ffn * model.experts_per_token  # of gate and up the first
        kept = 2 * (2 * model.attention_width + model.kv_heads * model.head_dim + inside) + 4 * model.heads
        down = 2 * h if model.gated else 0  # a seventh matmul is kept, a sixth is not; each rank's part of the sum
        ends = 2 * h + (4 * h if tensor > 1 else 0)  # the block's input, and what two reduce-scatters gave
        return tokens * (down + ends / (tensor if sequence_parallel else 1) + kept / tensor)
    masks = 1 if model.dropout else 0
    norm = 6 if model.rms_norm and not fused else 2
    whole = 2 * norm * h + 4 * h + 2 * h * masks  # two norms' inputs, what they feed, two masks
    queries, keys = model.attention_width, model.kv_heads * model.head_dim
    plain = {"relu": 2, "gelu_new": 4 if fused else 10}  # ReLU's backward needs its result alone
    inside = 8 if model.gated else plain.get(model.activation, 4)
    mlp = inside * model.ffn * model.experts_per_token
    split = 2 * queries + 4 * keys + 2 * queries + mlp  # q, k and v, what attention gives, the MLP's inside
    if flash:
        split += 4 * model.heads
    elif checkpointing == "none":
        split += (2 + 3 * masks) * model.heads * sequence_length  # softmax; its mask and what is left of it
    return tokens * (whole / (tensor if sequence_parallel else 1) + split / tensor)


def outside_blocks(model: Model, micro_batch: int, sequence_length: int, tensor: int = 1, pipeline: int = 1) -> float:
    """Bytes that the first rank of a full 1F1B pipeline keeps outside its blocks, split over the tensor ranks.

    The mask of the embedding's dropout for each micro-batch in flight; without a pipeline also the last norm's and
    the output layer's inputs and the logits in fp32. (:func:`estimate` counts the logits as PyTorch keeps them.)

    Source: arXiv 2205.05198 section 4.3.
    """
    masks = pipeline * model.hidden if model.dropout else 0
    outputs = 4 * (model.hidden + (model.vocab if model.has_head else 0)) if pipeline == 1 else 0
    return micro_batch * sequence_length * (masks + outputs) / tensor


def checkpointed(layers: int, checkpoints: float, inputs: float, inside: float) -> float:
    """Bytes of ``layers`` blocks of which ``checkpoints`` groups keep only their input, while one is recomputed.

    Source: arXiv 2104.04473 section 3.5.
    """
    return checkpoints * inputs + layers / checkpoints * inside


def best_checkpoints(layers: int, inputs: float, inside: float) -> float:
    """The number of groups for which :func:`checkpointed` is least."""
    return (layers * inside / inputs) ** 0.5


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
    return max((of_rank(model, plan, rank) for rank in distinct(pipeline_ranks(plan, model.layers))),
               key=lambda memory: memory.total)


def of_rank(model: Model, plan: Plan, rank: PipelineRank) -> Memory:
    """Peak memory of the GPUs of one pipeline rank."""
    layers, embeds, predicts = rank.blocks, rank.embeds, rank.predicts
    recipe, shards, t = plan.bytes, plan.shards, plan.tensor
    cross = model.extra * layers / model.layers
    block = (model.attention + model.mlp) / t + model.norms
    ends = (model.embedding if embeds else 0) / t + (model.head if predicts else 0) / t
    if predicts and not embeds and model.has_head and model.head < model.vocab * model.hidden:
        ends += model.vocab * model.hidden / t  # a tied matrix is kept at both ends of a pipeline
    local = layers * block + cross / t + ends

    own = local / shards
    if plan.engine == "fsdp" and model.experts > 1:
        # FSDP2 cuts along the first dimension, which of the experts' weights is their number: 8 experts lie whole on
        # 8 of 64 ranks (torch/distributed/fsdp/_fully_shard/_fsdp_param.py, _init_sharded_param).
        of_experts = layers * model.experts * model.expert / t
        own += of_experts * (-(-model.experts // shards) / model.experts - 1 / shards)
    parameters = recipe.parameters * (own if plan.stage >= 3 else local)
    gradients = (recipe.gradients + recipe.accumulated) * (own if plan.stage >= 2 else local)
    optimizer = (recipe.master + recipe.moments) * (own if plan.stage >= 1 else local)
    host = 0.0
    if plan.offload != "none":
        host += optimizer + gradients
        optimizer = 0.0
        gradients /= 1 if plan.stage < 2 else max(layers, 1)  # sharded ones leave block by block
        if plan.offload == "parameters":
            host += parameters
            parameters = 0.0

    width = 2 if plan.precision not in ("fp32", "tf32") else 4  # bytes of an activation
    sequence = plan.sequence_length // plan.context
    one = activations(model, plan.micro_batch, sequence, tensor=t, sequence_parallel=plan.sequence_parallel,
                      checkpointing=plan.checkpointing, flash=plan.flash, fused=plan.compiled) * width / 2
    depth = 1.0
    if plan.pipeline > 1:
        depth = in_flight(plan.schedule, plan.pipeline, plan.accumulation, plan.virtual, rank.rank)
    kept = layers * one * depth
    tokens = plan.micro_batch * sequence
    kept += tokens * model.hidden / t * ((depth if embeds and model.dropout else 0) + (2 * width if predicts else 0))
    # Compiled: as they come, in fp32, their softmax. In plain operations the gradient takes the place of the first.
    bytes_per_logit = width + 8 if plan.compiled else 12
    logits = tokens * model.vocab / t * bytes_per_logit if predicts and model.has_head else 0

    buffers = 0.0
    if plan.checkpointing in ("operators", "alternate", "full"):  # the block that is being recomputed
        buffers += activations(model, plan.micro_batch, sequence, tensor=t, flash=plan.flash, fused=plan.compiled,
                               sequence_parallel=plan.sequence_parallel) * width / 2
    if plan.engine == "fsdp" and plan.pipeline > 1:
        buffers += (width + recipe.gradients) * local  # gathered, and summed whole, from first micro-batch to last
    elif plan.engine == "fsdp" and (shards > 1 or plan.offload != "none"):
        # At the loss the root's ends are gathered, and the last block, prefetched. Where that block's backward pass
        # takes more than the logits that have gone by then: the block before it, its whole gradient, that gradient
        # in fp32 to be reduced, and the head's, which waits for the embedding's.
        head = model.vocab * model.hidden / t if predicts and model.has_head else 0
        buffers += width * (ends + block) + max(0.0, (2 * width + 4) * block + width * head - logits)
        if plan.offload != "none":
            buffers += recipe.parameters * block / shards  # a block's piece as it comes from the host, to be cast
    elif plan.engine == "deepspeed" and (shards > 1 or plan.offload != "none"):
        buffers += 2 * width * min(DEEPSPEED_BUCKET, local)
        if plan.stage >= 3:
            buffers += width * min(DEEPSPEED_LIVE, local)
    elif plan.engine == "ddp" and width == 2:
        buffers += width * local  # autocast keeps the 16-bit weights until the forward pass ends
    # FSDP makes a gradient when it is reduced, and zero_grad() gives it back; the other engines keep buckets for them.
    wait = plan.engine != "fsdp" or plan.accumulation > 1 or plan.pipeline > 1 or plan.offload != "none"
    return Memory(parameters, gradients, optimizer, kept, logits, buffers, host, wait)
