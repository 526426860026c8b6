"""Time of one training step by formula: computing, what of the communication nothing hides, bubble, optimizer.

Collectives cost volume / bandwidth + latency, with NCCL's bus-bandwidth factors (NVIDIA/nccl-tests, PERFORMANCE.md).
ZeRO's volumes are arXiv 1910.02054 section 7 with the (N - 1) / N that the paper leaves out; tensor parallelism's
are arXiv 2104.04473 section 3.2; bubbles arXiv 2104.04473 section 2.2 and arXiv 2401.10241 table 2. Seconds,
bytes, bytes per second.
"""

from dataclasses import dataclass

from course_lib.planning import adapters, block_collectives, memory, optimizers, work
from course_lib.planning.block_collectives import calls, collective
from course_lib.planning.bubble import bubble_seconds
from course_lib.planning.hardware import NETWORK_EFFICIENCY, NETWORK_LATENCY, Cluster
from course_lib.planning.models import Model
from course_lib.planning.pipeline_ranks import distinct, pipeline_ranks
from course_lib.planning.plan import Plan

WAITING = ("recompute", "launch", "tensor", "pipeline", "bubble", "data", "optimizer")
"""What a step spends beside computing, in the names of :class:`Cost`."""
GRADIENT_SUM = 12
"""Bytes per parameter that the host moves to add an fp32 gradient to the one that it keeps: two read, one written."""


@dataclass(frozen=True)
class Cost:
    """One step, by what the slowest GPU spends it on; seconds."""

    compute: float
    """Matmuls, attention and element-wise work of all micro-batches, without what is recomputed."""
    recompute: float
    launch: float
    """Waiting for the host to start what the GPU has to do; 0 where the GPU is the slower of the two."""
    tensor: float
    """Collectives of tensor, context and expert parallelism that nothing hides."""
    pipeline: float
    """Messages between pipeline ranks that nothing hides."""
    bubble: float
    """Waiting for the pipeline to fill and drain."""
    data: float
    """Collectives of data parallelism and sharding that nothing hides."""
    optimizer: float
    """The update, and its way to and from host memory."""
    tokens: int
    """Tokens of one step, of all GPUs."""
    flops: float
    """Model FLOPs of one step, of all GPUs, as MFU counts them."""
    gpus: int
    peak: float
    """FLOP/s of one GPU by the datasheet."""
    dollars_per_gpu_hour: float | None = None

    @property
    def step(self) -> float:
        """Seconds of one step."""
        return sum((getattr(self, name) for name in WAITING), start=self.compute)

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs together."""
        return self.tokens / self.step

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, 0 to 1."""
        return self.flops / self.step / (self.gpus * self.peak)

    def hours(self, tokens: float) -> float:
        """Hours to train on so many tokens."""
        return tokens / self.tokens_per_second / 3600

    def dollars(self, tokens: float) -> float | None:
        """Price of that, where it is known."""
        if self.dollars_per_gpu_hour is None:
            return None
        return self.hours(tokens) * self.gpus * self.dollars_per_gpu_hour


def zero_volume(stage: int) -> int:
    """Elements that ZeRO moves per step and rank, for each parameter, (N - 1) / N left out as in the paper.

    Source: arXiv 1910.02054 section 7: reduce-scatter of gradients and all-gather of parameters, and at stage 3
    that all-gather in the forward and in the backward pass. An engine may send more: DeepSpeed's stages 1 and 2
    all-reduce the gradients unless ``use_multi_rank_bucket_allreduce`` is false (3 in place of 2, by our meter).
    """
    return 3 if stage == 3 else 2


def estimate(model: Model, plan: Plan, cluster: Cluster) -> Cost:
    """Seconds of one step.

    Args:
        model: the model.
        plan: its layout and how a step is run.
        cluster: what it runs on; the plan's GPUs fill it from the first node on.
    """
    chip = cluster.accelerator
    forward, backward = work.block(model, plan, chip)
    again = work.recomputed(model, plan, chip)
    head = sum(part.total for part in work.output_layer(model, plan, chip))
    tensor_forward, tensor_backward = block_collectives.exposed(model, plan, cluster, forward, backward)
    data_forward, data_backward = _sharded(
        model, plan, cluster, forward.total + tensor_forward, backward.total + again.total + tensor_backward
    )

    busy = sum(
        (forward.total, backward.total, again.total, tensor_forward, tensor_backward, data_forward, data_backward)
    )
    host = work.launching(model, plan, calls(plan), cluster.launch)
    late = max(0.0, sum(host) - busy)  # the host runs ahead where it can: only the sum over the passes counts
    late_forward = late * host[0] / sum(host)
    whole = busy + late
    # the slowest pipeline rank: one with the most blocks, or the one with the output layer
    gather = block_collectives.gathered_logits(model, plan, cluster)
    layers, last = max(
        ((rank.blocks, rank.predicts) for rank in distinct(pipeline_ranks(plan, model.layers))),
        key=lambda rank: rank[0] * whole + (head + gather) * rank[1],
    )
    extra, gather = head * last, gather * last
    one = layers * whole + extra + gather  # one micro-batch
    first = layers * (forward.total + tensor_forward + data_forward + late_forward) + extra / 3 + gather  # its forward
    message = _message(model, plan, cluster)
    return Cost(
        compute=plan.accumulation * (layers * (forward.total + backward.total) + extra),
        recompute=plan.accumulation * layers * again.total,
        launch=plan.accumulation * layers * late,
        tensor=plan.accumulation * (layers * (tensor_forward + tensor_backward) + gather),
        pipeline=2 * message * (plan.accumulation * plan.virtual + plan.pipeline - 1),
        bubble=bubble_seconds(plan, first, one - first - layers * forward.matmul, layers * forward.matmul),
        data=plan.accumulation * layers * (data_forward + data_backward)
        + _once(model, plan, cluster, layers * (backward.total + again.total + tensor_backward + late - late_forward)),
        optimizer=_optimizer(model, plan, cluster),
        tokens=plan.global_batch * plan.sequence_length,
        flops=plan.global_batch * plan.sequence_length * model.flops(plan.sequence_length),
        gpus=plan.gpus,
        peak=chip.peak[plan.precision],
        dollars_per_gpu_hour=cluster.dollars_per_gpu_hour,
    )


def _sharded(model: Model, plan: Plan, cluster: Cluster, forward: float, backward: float) -> tuple[float, float]:
    """Gathering and scattering of one block at stage 3, beyond the forward and backward that hide it.

    In a pipeline parameters stay gathered for all micro-batches of a step, see :func:`_once`. Offloaded shards come
    over PCIe as they are kept before they are cast and gathered; FSDP's reduced gradients leave under the backward
    pass, but from the second micro-batch on they wait to be added in host memory (PyTorch's ``foreach_reduce``).

    Args:
        model: the model.
        plan: the layout.
        cluster: the hardware.
        forward: seconds of the block's forward pass, behind which the next block's parameters arrive.
        backward: seconds of its backward pass.
    """
    offloaded = plan.offload == "parameters"
    if plan.stage < 3 or plan.pipeline > 1 or (plan.shards == 1 and not offloaded):
        return 0.0, 0.0
    padding = memory.expert_padding(model, plan)
    weights, size = model.layer / plan.tensor + padding, float(plan.width)
    trained = _trained(model, plan, model.layer) + padding
    if plan.lora_rank:
        size = adapters.frozen_bytes(model, plan.base_bits == 4, plan.width) / model.layer
    gather = collective("all_gather", weights * size, plan.shards, plan.tensor, cluster)
    scatter = collective("reduce_scatter", trained * plan.bytes.gradients, plan.shards, plan.tensor, cluster)
    scatter += collective(
        "all_reduce", trained * plan.bytes.gradients / plan.shards, plan.replicas, plan.tensor * plan.shards, cluster
    )  # of each copy's shard
    waits = 0.0
    if offloaded:
        gather += weights * plan.bytes.parameters / plan.shards / cluster.accelerator.pcie
    if offloaded and plan.engine == "fsdp":
        out = weights * plan.bytes.gradients / plan.shards / cluster.accelerator.pcie
        later = (plan.accumulation - 1) / plan.accumulation
        scatter += (1 - later) * out
        waits = later * (out + GRADIENT_SUM * weights / plan.shards / _host_rate(cluster))
    if not plan.overlap:
        return gather, gather + scatter + waits
    return max(0.0, gather - forward), max(0.0, gather + scatter - backward) + waits


def _once(model: Model, plan: Plan, cluster: Cluster, last_backward: float) -> float:
    """Data parallelism's collectives once per step, beyond the last micro-batch's backward pass that hides them.

    FSDP in a pipeline is among them: gathered before the first micro-batch, scattered after the last (arXiv
    2407.21783 section 3.3.2; torchtitan's parallelize_llama.py and PyTorch's pipeline stages do the same).
    """
    weights = (
        _trained(model, plan, model.parameters) + model.layers * memory.expert_padding(model, plan)
    ) / plan.pipeline
    if plan.stage == 3 and plan.pipeline == 1:
        # the first gather of a step, which nothing comes before: embedding and output layer
        ends = (model.embedding + model.head) / plan.tensor
        moved = ends * plan.bytes.parameters / plan.shards if plan.offload == "parameters" else 0.0
        return collective("all_gather", ends * plan.width, plan.shards, plan.tensor, cluster) + (
            moved / cluster.accelerator.pcie
        )
    if plan.shards == 1:
        return 0.0
    parts = [(weights, plan.shards, plan.tensor)]
    if plan.expert > 1:
        experts = model.layers * model.experts * model.expert
        parts = [(weights - experts, plan.shards, 1), (experts / plan.expert, plan.shards // plan.expert, plan.expert)]
    sync = update = 0.0
    for part, ranks, stride in parts:
        if plan.stage == 0:
            sync += collective("all_reduce", part * plan.bytes.gradients, ranks, stride, cluster)
        else:
            sync += collective("reduce_scatter", part * plan.bytes.gradients, ranks, stride, cluster)
            update += collective("all_gather", part * plan.width, ranks, stride, cluster)
    if plan.stage == 2:
        sync *= plan.accumulation  # a sharded gradient has no place to wait in for the next micro-batch's
        last_backward *= plan.accumulation
    if not plan.overlap:
        return sync + update
    if plan.engine in ("megatron", "fsdp"):  # parameters are gathered under the next forward pass
        return max(0.0, sync - last_backward) + max(0.0, update - last_backward / 2)
    return max(0.0, sync - last_backward) + update


def _message(model: Model, plan: Plan, cluster: Cluster) -> float:
    """Seconds in which one micro-batch's activations reach the next pipeline rank, if nothing hides them."""
    if plan.pipeline == 1 or (plan.schedule == "interleaved" and plan.overlap):
        return 0.0
    size = work.local_tokens(plan) * model.hidden * plan.width / plan.tensor  # each tensor rank sends its part
    if plan.gpus // plan.pipeline >= cluster.gpus_per_node:
        return size * cluster.gpus_per_node / (cluster.network * NETWORK_EFFICIENCY) + NETWORK_LATENCY
    return size / cluster.accelerator.bus + cluster.accelerator.latency


def _optimizer(model: Model, plan: Plan, cluster: Cluster) -> float:
    """Seconds of the update of what a rank keeps; with DeepSpeed's offload its way to the host and back too.

    FSDP's gradients are there already, and offloaded parameters stay there.
    """
    chip = cluster.accelerator
    whole = _trained(model, plan, model.parameters) + model.layers * memory.expert_padding(model, plan)
    if plan.stage == 0:
        whole -= model.layers * memory.experts_elsewhere(model, plan)
    kept = whole / plan.pipeline / (plan.shards if plan.stage >= 1 else 1)
    moved_here = optimizers.traffic(plan.optimizer, model)
    if plan.offload == "none":
        products = optimizers.flops(plan.optimizer, model) / plan.pipeline
        return moved_here * kept / chip.memory_rate + products / chip.matmul_rate(chip.half_precision())
    moved = 0.0 if plan.engine == "fsdp" else plan.bytes.gradients
    moved += 0.0 if plan.offload == "parameters" else plan.width
    return kept * (moved_here / _host_rate(cluster) + moved / chip.pcie)


def _trained(model: Model, plan: Plan, parameters: int) -> float:
    """Of a block's parameters, or of all, those that a tensor rank trains."""
    if plan.lora_rank:
        blocks = 1 if parameters == model.layer else model.layers
        return blocks * adapters.of_a_block(model, plan.lora_rank) / plan.tensor
    return parameters / plan.tensor


def _host_rate(cluster: Cluster) -> float:
    """Bytes/s of host memory that each GPU's process has while all of a node work."""
    return cluster.host_bandwidth / cluster.gpus_per_node
