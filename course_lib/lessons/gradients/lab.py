"""Lesson 16: one step on data and tensor ranks, and six engines whose gradients are wrong and whose loss is right.

The wrong ones are what issues of other projects tell, in small and in our own words. A step takes the model of the
lesson (embedding, norm, up, down, head, with the MLP between up and down), this rank's rows, and the mesh.
"""

from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from course_lib.parallel import tp_collectives

Model: TypeAlias = Any
"""An nn.Module with embedding, norm, up, down and head."""
SPLIT = ("up.weight", "up.bias", "down.weight")
"""Parameters of which each tensor rank uses its own rows or columns."""


def own_rows(model: Model, mesh: DeviceMesh) -> slice:
    """The units of the MLP that this tensor rank computes."""
    units, place = model.up.out_features // mesh["tp"].size(), mesh.get_local_rank("tp")
    return slice(place * units, (place + 1) * units)


def loss_of(model: Model, words: Tensor, mesh: DeviceMesh) -> Tensor:
    """Mean loss of this rank's rows (rows, tokens); the MLP is split over tp as in lesson 08."""
    tp, mine = mesh.get_group("tp"), own_rows(model, mesh)
    x = model.embedding(words[:, :-1])
    inside = tp_collectives.copy(model.norm(x), tp)
    inside = F.gelu(F.linear(inside, model.up.weight[mine], model.up.bias[mine]))
    x = x + tp_collectives.reduce(inside @ model.down.weight[:, mine].T, tp) + model.down.bias
    return F.cross_entropy(model.head(x).flatten(0, 1), words[:, 1:].flatten())


def reduce_gradients(model: Model, mesh: DeviceMesh) -> None:
    """Mean over dp. The parts of tp are brought together, so that every rank can show whole gradients."""
    for name, parameter in model.named_parameters():
        if name in SPLIT:  # this rank's rows, and zeros
            dist.all_reduce(parameter.grad, group=mesh.get_group("tp"))
        dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
        parameter.grad /= mesh["dp"].size()


def right(model: Model, words: Tensor, mesh: DeviceMesh) -> Tensor:
    """Loss, backward, reduction."""
    loss = loss_of(model, words, mesh)
    loss.backward()
    reduce_gradients(model, mesh)
    return loss


# --- wrong ---


def example(model: Model, words: Tensor, mesh: DeviceMesh) -> Tensor:
    """Megatron-LM #1528: a norm's gradient is too large by the tensor ranks."""
    loss = right(model, words, mesh)
    for parameter in model.norm.parameters():
        dist.all_reduce(parameter.grad, group=mesh.get_group("tp"))
    return loss


def engine_1(model: Model, words: Tensor, mesh: DeviceMesh) -> Tensor:
    """Engine 1."""
    loss = loss_of(model, words, mesh)
    loss.backward()
    for name, parameter in model.named_parameters():
        if name in SPLIT:
            dist.all_reduce(parameter.grad, group=mesh.get_group("tp"))
        dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
        parameter.grad /= dist.get_world_size()
    return loss


def engine_2(model: Model, words: Tensor, mesh: DeviceMesh) -> Tensor:
    """Engine 2."""
    tp, mine = mesh.get_group("tp"), own_rows(model, mesh)
    x = model.embedding(words[:, :-1])
    inside = model.norm(x)
    inside.register_hook(lambda gradient: dist.all_reduce(gradient.clone(), group=tp))
    inside = F.gelu(F.linear(inside, model.up.weight[mine], model.up.bias[mine]))
    x = x + tp_collectives.reduce(inside @ model.down.weight[:, mine].T, tp) + model.down.bias
    loss = F.cross_entropy(model.head(x).flatten(0, 1), words[:, 1:].flatten())
    loss.backward()
    reduce_gradients(model, mesh)
    return loss


def engine_3(model: Model, words: Tensor, mesh: DeviceMesh) -> Tensor:
    """Engine 3."""
    tp, mine = mesh.get_group("tp"), own_rows(model, mesh)
    x = model.embedding(words[:, :-1])
    inside = tp_collectives.copy(model.norm(x), tp)
    inside = F.gelu(F.linear(inside, model.up.weight[mine], model.up.bias[mine]))
    out = inside @ model.down.weight[:, mine].T + model.down.bias / mesh["tp"].size()
    x = x + tp_collectives.reduce(out, tp)
    loss = F.cross_entropy(model.head(x).flatten(0, 1), words[:, 1:].flatten())
    loss.backward()
    reduce_gradients(model, mesh)
    return loss


def engine_4(model: Model, words: Tensor, mesh: DeviceMesh, largest: float = 0.1) -> Tensor:
    """Engine 4."""
    loss = loss_of(model, words, mesh)
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
        parameter.grad /= mesh["dp"].size()
    square = torch.stack([parameter.grad.square().sum() for parameter in model.parameters()]).sum()
    dist.all_reduce(square, group=mesh.get_group("tp"))
    for name, parameter in model.named_parameters():
        parameter.grad *= largest / square.sqrt()
        if name in SPLIT:
            dist.all_reduce(parameter.grad, group=mesh.get_group("tp"))
    return loss


def engine_5(model: Model, words: Tensor, mesh: DeviceMesh, limit: int = 2304) -> Tensor:
    """Engine 5."""
    loss = loss_of(model, words, mesh)
    loss.backward()
    bucket: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if name in SPLIT:
            dist.all_reduce(parameter.grad, group=mesh.get_group("tp"))
        if sum(gradient.numel() for gradient in bucket) + parameter.numel() > limit:
            average(bucket, mesh)
            bucket = []
        if parameter.numel() > limit:
            average([parameter.grad], mesh)
        elif parameter.numel() < limit:
            bucket.append(parameter.grad)
    average(bucket, mesh)
    return loss


def average(bucket: list[Tensor], mesh: DeviceMesh) -> None:
    """Over dp, in place, in one message."""
    if not bucket:
        return
    together = torch.cat([gradient.flatten() for gradient in bucket])
    dist.all_reduce(together, group=mesh.get_group("dp"))
    parts = (together / mesh["dp"].size()).split([gradient.numel() for gradient in bucket])
    for gradient, part in zip(bucket, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


ISSUES = {
    engine_1: "DeepSpeed #5555",
    engine_2: "SkyRL #1886",
    engine_3: "torchtitan #4332",
    engine_4: "NeMo-RL #3788",
    engine_5: "DeepSpeed #4321",
}
"""Where each was told."""
