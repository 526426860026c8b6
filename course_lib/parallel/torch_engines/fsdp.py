"""FSDP with torch's own engine, ``fully_shard`` (FSDP2), behind the same face as the one from scratch.

FSDP2 splits each parameter by itself along its first dimension (a ``DTensor``), where FSDP from scratch splits the
flat buffer of a unit; what is communicated, and when, is the same.
"""

import contextlib
import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from course_lib.errors import ConfigError
from course_lib.parallel import blocks as partition
from course_lib.parallel.sharding import Shard, check_elementwise, local, names_of, repoint
from course_lib.parallel.wrapping import run_hooks_always
from course_lib.torch_names import parameter_groups


def hybrid_mesh(device_type: str, replicas: int, shards: int) -> DeviceMesh:
    """The 2-D mesh of hybrid sharding (HSDP): ``replicas`` copies of the model, each over ``shards`` ranks.

    Neighbouring ranks share a copy: with ``shards`` the GPUs of a machine, what is gathered stays within it, and only
    1/``shards`` of the gradients crosses between machines.

    Raises:
        ConfigError: the sizes don't multiply to the number of ranks.
    """
    world = dist.get_world_size()
    if replicas * shards != world:
        raise ConfigError(
            f"{replicas} replicas of {shards} shards are {replicas * shards} ranks, not {world}",
            "choose sizes whose product is the number of ranks",
        )
    return init_device_mesh(device_type, (replicas, shards), mesh_dim_names=("replicate", "shard"))


class TorchFullyShardedDataParallel(nn.Module):
    """Result of :func:`shard_with_torch`: the sharded module, its optimizer, and what a trainer calls."""

    def __init__(self, module: nn.Module, optimizer: Optimizer, mesh: DeviceMesh):
        super().__init__()
        self.module, self.optimizer, self.mesh = module, optimizer, mesh

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate without communication of gradients: each rank keeps its whole gradients meanwhile."""
        sharded = cast(FSDPModule, self.module)
        sharded.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            sharded.set_requires_gradient_sync(True)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients down to a global L2 norm of at most ``max_norm``; returns the norm before."""
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)
        # Of DTensors the norm is a sum that is still to be made over the ranks: full_tensor() makes it.
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, those too that ``no_sync`` keeps, which FSDP2 would add to the next step's."""
        self.module.zero_grad(set_to_none)
        for record in self._managed():
            record.unsharded_accumulated_grad = None
            if hasattr(record, "_unsharded_param"):
                record._unsharded_param.grad = None

    def whole_weights(self) -> dict[str, Any]:
        """The whole model's tensors on the CPU, by name, on the first rank; elsewhere nothing. A collective call."""
        return get_model_state_dict(self.module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    def resident(self) -> dict[str, list[Tensor]]:
        """The tensors alive on this rank by kind; those of freed storage count 0 bytes.

        Communication buffers are FSDP2's own and come and go within its hooks: they are not listed.
        """
        records = self._managed()
        gathered = [record._unsharded_param for record in records if hasattr(record, "_unsharded_param")]
        gradients = [record.sharded_param.grad for record in records] + [whole.grad for whole in gathered]
        gradients += [record.unsharded_accumulated_grad for record in records]
        states = [leaf for leaf in tree_leaves(dict(self.optimizer.state)) if isinstance(leaf, Tensor)]
        return {
            "parameters": [local(record.sharded_param) for record in records]
            + [buffer for record in records for buffer in record.all_gather_outputs],
            "gradients": [local(gradient) for gradient in gradients if gradient is not None],
            "optimizer states": [local(tensor) for tensor in states],
            "communication buffers": [],
        }

    def _managed(self) -> list[Any]:
        """FSDP2's record of each parameter: its shard, the buffer to gather it in, its gradients.

        It is in no public list; without it what a unit holds while it computes could not be measured.
        """
        states = [fully_shard.state(module) for module in self.module.modules()]  # type: ignore[attr-defined]
        groups = [group for state in states if state for group in parameter_groups(state)]
        return [record for group in groups for record in group.fsdp_params]


def shard_with_torch(
    module: nn.Module,
    optimizer: Optimizer,
    *,
    units: Collection[nn.Module] | None = None,
    apart: Mapping[nn.Module, DeviceMesh] | None = None,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool = True,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    cpu_offload: bool = False,
    filled_later: bool = False,
) -> TorchFullyShardedDataParallel:
    """Split a model over ranks with ``fully_shard``, on CPUs (gloo) and GPUs (NCCL) by the same code path.

    Args:
        module: changed in place; its parameters become ``DTensor``s. All ranks start from the first one's weights.
        optimizer: over the module's parameters, before its first step; repointed to the ``DTensor``s.
        units: modules that are gathered each by itself; by default the blocks that
            :func:`course_lib.parallel.blocks.blocks` finds. The rest of the model is the root unit.
        apart: modules within units that only some ranks have alike, such as experts, and those ranks: a module is split
            over them, and its gradient's sum divided by the number of all ranks of ``mesh``.
        mesh: 1-D, or 2-D (replicate, shard) for HSDP, see :func:`hybrid_mesh`; all ranks by default.
        reshard_after_forward: free a unit after its forward and gather it again for its backward, or keep it.
        param_dtype: of the gathered parameters and of floating-point inputs; by default the parameters' own.
        reduce_dtype: in which gradients are added up; ``param_dtype`` by default.
        cpu_offload: keep shards, gradients and optimizer states in the memory of the host, and step there. Clipping
            then communicates on the host: start the process group with ``cpu:gloo,cuda:nccl``.
        filled_later: the parameters have no values yet, and lie on the meta device; each rank fills its local parts
            afterwards. ``mesh`` says on which device.
    Raises:
        ConfigError: an optimizer that is not elementwise; units that overlap; parameters tied between units; CPU
            offload without a GPU.
    """
    check_elementwise(optimizer, "fsdp")
    device = next(module.parameters()).device
    if cpu_offload and device.type == "cpu":
        raise ConfigError(
            "cpu_offload moves shards from a GPU to the host, and this model is on the CPU already",
            "leave it out, or run on a GPU",
        )
    # --- phase 1: which modules are units, and what fully_shard would do wrong without a word ---
    chosen = list(dict.fromkeys(partition.blocks(module).values() if units is None else units))
    check_units(module, chosen)
    mesh = mesh or init_device_mesh("cpu" if filled_later else device.type, (dist.get_world_size(),))
    names = names_of(module)  # before: the parameters will be others
    # --- phase 2: all ranks begin alike, then each keeps its part ---
    split_in_place(
        module,
        chosen,
        mesh,
        apart or {},
        reshard_after_forward=reshard_after_forward,
        mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
        offload_policy=CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
    )
    if filled_later:  # now there is room to make for a share alone
        module._apply(lambda tensor: torch.empty_like(tensor, device=mesh.device_type) if tensor.is_meta else tensor)
    # --- phase 3: the optimizer's parameters, by name, are the DTensors now ---
    sharded = dict(module.named_parameters())
    repoint(optimizer, {parameter: sharded[name] for parameter, name in names.items()})
    return TorchFullyShardedDataParallel(module, optimizer, mesh)


def split_in_place(
    module: nn.Module,
    units: Sequence[nn.Module],
    mesh: DeviceMesh,
    apart: Mapping[nn.Module, DeviceMesh],
    *,
    reshard_after_forward: bool,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
) -> None:
    """``fully_shard`` for units and what is around them, with what it leaves to its caller.

    Args:
        module: the root; its parameters become ``DTensor``s. What lies on the meta device has no values yet.
        units: modules that are gathered each by itself.
        mesh: see :func:`shard_with_torch`.
        apart: see :func:`shard_with_torch`.
        reshard_after_forward: of the units; the root stays whole, as backward begins there.
        mp_policy: dtypes of computing and reducing.
        offload_policy: where shards lie.
    """
    # --- phase 1: all ranks begin alike, which fully_shard leaves to the caller. Along one axis after the other, from
    # the first rank of each line: after the last axis everybody has what rank 0 had. ---
    over = {parameter: ranks for part, ranks in apart.items() for parameter in part.parameters()}
    for tensor in [*module.parameters(), *module.buffers()]:
        alike = over.get(tensor, mesh)  # type: ignore[call-overload]
        for axis in range(alike.ndim if not tensor.is_meta else 0):
            dist.broadcast(tensor.detach(), group=alike.get_group(axis), group_src=0)
    # --- phase 2: shard, units before the root: what a unit has taken, the root leaves alone. A parameter (d, …) is now
    # a DTensor whose local part is (d / N, …). ---
    policies: dict[str, Any] = {"mp_policy": mp_policy, "offload_policy": offload_policy}
    for part, ranks in apart.items():
        sharded = fully_shard(part, mesh=ranks, reshard_after_forward=reshard_after_forward, **policies)
        # Its gradient is the mean over the ranks that have it: what is missing are those that share its layer. (torch's
        # set_gradient_divide_factor needs a product within a sum, which gloo has not, and divides twice for one rank.)
        sharded.set_all_reduce_hook(functools.partial(_divide, by=mesh.size() // ranks.size()))
        run_hooks_always(part)
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward, **policies)
        run_hooks_always(unit)
    fully_shard(module, mesh=mesh, reshard_after_forward=False, **policies)


def _divide(gradient: Tensor, by: int) -> None:
    gradient /= by


def shards(module: nn.Module) -> dict[str, Shard]:
    """This rank's shard of every parameter by name, after a module or several in it were split: a run of rows."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()  # after a forward pass without backward the root is still gathered
    runs = {}
    parameter: Any
    for name, parameter in module.named_parameters():
        # Rows are dealt out as torch.chunk does over the last dimension of the mesh: whole chunks, then the rest.
        mesh, (rows, *row) = parameter.device_mesh, parameter.shape
        first = min(-(-rows // mesh.shape[-1]) * mesh.get_coordinate()[-1], rows)
        runs[name] = Shard(parameter.shape, first * math.prod(row), parameter.detach().to_local().view(-1))
    return runs


def check_units(module: nn.Module, chosen: Collection[nn.Module]) -> None:
    """Refuse units that overlap, or that other modules reach into: FSDP2 has one owner for a parameter.

    Raises:
        ConfigError: the unit, and the parameter.
    """
    partition.check_disjoint(chosen)
    owner = partition.owners(module, chosen)
    for unit in chosen:
        for name, parameter in unit.named_parameters():
            if owner[parameter] is not unit:
                raise ConfigError(
                    f"{names_of(module)[parameter]} is tied to {name} of a {type(unit).__name__}, "
                    "and fully_shard cannot split a parameter that units share",
                    "choose units= that keep tied parameters together, or the engine from scratch",
                )
