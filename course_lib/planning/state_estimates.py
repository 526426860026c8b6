"""Model states by the formulas of ZeRO's paper and of DeepSpeed's own estimators. Bytes everywhere."""


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


def deepspeed_zero2(
    parameters: int,
    gpus_per_node: int = 1,
    nodes: int = 1,
    offload: bool = True,
    whole_gradients: bool = False,
    factor: float = 1.5,
) -> tuple[int, int]:
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


def deepspeed_zero3(
    parameters: int,
    largest_layer: int,
    gpus_per_node: int = 1,
    nodes: int = 1,
    offload_optimizer: bool = True,
    offload_parameters: bool = True,
    zero_init: bool = True,
    factor: float = 1.5,
) -> tuple[int, int]:
    """DeepSpeed's own estimate for ZeRO-3: bytes of host memory per node and of one GPU.

    Args:
        parameters: of the model.
        largest_layer: parameters of its largest module, :attr:`course_lib.planning.models.Model.largest_matrix`.
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
