"""Collectives from point-to-point messages alone: what stands behind ``all_reduce`` and its kin.

Each does what the function of the same name in ``torch.distributed`` does, on tensors of any shape, number of
elements and dtype that can be added, over any group, from ``isend`` and ``irecv``. They return when they are done:
there is no ``async_op``.

Sources: the ring, Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009);
the tree and the pairs, Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH"
(2005), section 4; the barrier, Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization" (1988).

With N ranks and a tensor of S bytes, a rank sends

============== ========================== ==================
collective     bytes                      messages
============== ========================== ==================
all_reduce     2 (N - 1) / N * S          2 (N - 1)
reduce_scatter (N - 1) / N * S            N - 1
all_gather     (N - 1) / N * S            N - 1
all_to_all     (N - 1) / N * S            N - 1
broadcast      at most S * ceil(log2 N)   ceil(log2 N) rounds
barrier        ceil(log2 N)               ceil(log2 N)
============== ========================== ==================

where S is all that is gathered or scattered. Where the elements don't divide by N, the parts differ by one element,
nothing is padded, and all_reduce costs a rank at most 2 elements more or less than the formula.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from course_lib.errors import ConfigError
from course_lib.parallel.groups import device_of

COMBINE: dict[ReduceOp.RedOpType, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
"""How two ranks' tensors become one. A sum of booleans is their `or`, as in torch."""


def all_reduce(tensor: Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM, group: dist.ProcessGroup | None = None) -> None:
    """Combine the ranks' tensors, in place on every rank: a reduce-scatter, then an all-gather of the parts.

    The result has the same bits on all ranks. It knows every dtype that can be added.

    Args:
        tensor: the same shape and dtype on every rank.
        op: ``AVG`` is for floating-point tensors.
        group: the N ranks; None: all ranks.
    Raises:
        ConfigError: an operation that the dtype does not have, or a rank outside the group.
    """
    rank, ranks = _position(group)
    whole = tensor.contiguous()  # the tensor itself, or a copy that can be viewed as 1-D
    parts = whole.view(-1).tensor_split(ranks)  # (E,) -> N views of (E / N,), in place

    # --- phase 1: reduce-scatter. Part r is finished, on rank r alone ---
    reduce_scatter(parts[rank], parts, op, group)
    # --- phase 2: all-gather. Each part was added up on one rank only, so all ranks end with the same bits ---
    all_gather(parts, parts[rank], group)

    _copy_back(whole, tensor)


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Combine the ranks' lists of N tensors, and leave rank i the i-th of the result, by a ring.

    Unlike torch's, the tensors of a list may differ in shape. The list stays as it was.

    Args:
        output: this rank's part of the result, of the shape of ``input_list[rank]``; may be that very tensor.
        input_list: tensor i has the same shape and dtype on every rank.
        op: ``AVG`` is for floating-point tensors.
        group: the N ranks; None: all ranks.
    Raises:
        ConfigError: lists, shapes or operations that don't fit, or a rank outside the group.
    """
    rank, ranks = _position(group)
    _check_lists("reduce_scatter", ranks, input_list)
    _check_fit("reduce_scatter", rank, input_list[rank], output)
    if op not in COMBINE or (op == ReduceOp.AVG and not output.is_floating_point()):
        raise ConfigError(f"reduce_scatter has no {op} of {output.dtype}", "use SUM, MAX or MIN")
    # --- around the ring, N - 1 steps ---
    # A part starts at the rank after its owner, grows by one rank's share at each step, and ends with its owner: in
    # step s this rank receives the part that is s + 1 before its own, with s ranks' shares in it. For N = 3, part 0:
    #     rank 1: x1  ->  rank 2: x1 + x2  ->  rank 0: x1 + x2 + x0
    partial = input_list[(rank - 1) % ranks]  # (E / N,), only read: the list stays as it was
    for step in range(1, ranks):
        own_share = input_list[(rank - 1 - step) % ranks]
        received = torch.empty_like(own_share, memory_format=torch.contiguous_format)
        _exchange(partial, (rank + 1) % ranks, received, (rank - 1) % ranks, group)
        partial = COMBINE[op](received, own_share, out=received)  # the buffer is ours, so that no other is needed

    # Only now: `output` may be input_list[rank] itself, whose share was read in the last step.
    output.copy_(partial)
    if op == ReduceOp.AVG:  # once, at the end: dividing each share would round N times
        output.div_(ranks)


def all_gather(tensor_list: Sequence[Tensor], tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Give every rank the tensors of all ranks, by a ring. Unlike torch's, the ranks' shapes may differ.

    Args:
        tensor_list: to be filled; tensor i has the shape and dtype of rank i's ``tensor``.
        tensor: this rank's; may be ``tensor_list[rank]`` itself.
        group: the N ranks; None: all ranks.
    Raises:
        ConfigError: lists or shapes that don't fit, or a rank outside the group.
    """
    rank, ranks = _position(group)
    _check_lists("all_gather", ranks, tensor_list)
    _check_fit("all_gather", rank, tensor_list[rank], tensor)
    tensor_list[rank].copy_(tensor)
    # --- around the ring, N - 1 steps ---
    # Each rank passes on what it received last, so step s brings the tensor of the rank s before it. Nothing is added.
    for step in range(1, ranks):
        _exchange(
            tensor_list[(rank - step + 1) % ranks],
            (rank + 1) % ranks,
            tensor_list[(rank - step) % ranks],
            (rank - 1) % ranks,
            group,
        )


def all_to_all(
    output_list: Sequence[Tensor], input_list: Sequence[Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """Send tensor i to rank i, and receive one from every rank, in rounds of pairs. gloo has only the ``_single`` one.

    Args:
        output_list: to be filled; tensor i has the shape and dtype of what rank i sends here.
        input_list: tensor i is for rank i.
        group: the N ranks; None: all ranks.
    Raises:
        ConfigError: lists or shapes that don't fit, or a rank outside the group.
    """
    rank, ranks = _position(group)
    _check_lists("all_to_all", ranks, input_list, output_list)
    _check_fit("all_to_all", rank, input_list[rank], output_list[rank])
    output_list[rank].copy_(input_list[rank])  # what stays here is not sent
    # --- N - 1 rounds of pairs ---
    # In round d everybody sends to the rank d after it: no rank has two messages to take at once. No ring here: what
    # rank r sends to rank i nobody else needs, so that passing it on would only multiply the bytes.
    for distance in range(1, ranks):
        to, source = (rank + distance) % ranks, (rank - distance) % ranks
        _exchange(input_list[to], to, output_list[source], source, group)


def broadcast(tensor: Tensor, src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Give every rank the tensor of one, in place, by a binomial tree: each round doubles those that hold it.

    Args:
        tensor: the same shape and dtype on every rank.
        src: the rank in the whole job, not in the group, that has it.
        group: the N ranks; None: all ranks.
    Raises:
        ConfigError: a rank outside the group.
    """
    rank, ranks = _position(group)
    root = src if group is None else dist.get_group_rank(group, src)
    from_root = (rank - root) % ranks  # the root counts as rank 0
    whole = tensor.contiguous()
    # --- ceil(log2 N) rounds: 1, 2, 4, … ranks have it ---
    holders = 1
    while holders < ranks:
        # Ranks 0 to holders - 1 have it; each sends it to the rank that many after it. In the last round some have
        # nobody to send to, where N is no power of two.
        if from_root < holders and from_root + holders < ranks:
            _wait(dist.isend(whole, group=group, group_dst=(rank + holders) % ranks))
        elif holders <= from_root < 2 * holders:
            _wait(dist.irecv(whole, group=group, group_src=(rank - holders) % ranks))
        holders *= 2
    _copy_back(whole, tensor)


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Return when every rank has called it: after round k a rank has heard of the 2^k ranks before it.

    Raises:
        ConfigError: a rank outside the group.
    """
    rank, ranks = _position(group)
    device = device_of(group)
    token = torch.ones(1, dtype=torch.uint8, device=device)  # what it says does not matter, only that it came
    # --- ceil(log2 N) rounds: word from the ranks 1, 2, 4, … before, who pass on what they have heard ---
    distance = 1
    while distance < ranks:
        _exchange(token, (rank + distance) % ranks, torch.empty_like(token), (rank - distance) % ranks, group)
        distance *= 2
    if device.type == "cuda":  # where a message is only queued when the call returns
        torch.cuda.current_stream().synchronize()


def _position(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This rank's number in the group, and how many ranks the group has."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ConfigError(
            f"rank {dist.get_rank()} called a collective of a group that it is not in",
            "call it on the group's ranks only",
        )
    return rank, ranks


def _check_lists(name: str, ranks: int, *lists: Sequence[Tensor]) -> None:
    """Refuse a list that has not one tensor per rank, before anyone waits for it."""
    for tensors in lists:
        if len(tensors) != ranks:
            raise ConfigError(f"{name} was given {len(tensors)} tensors for {ranks} ranks", "give one tensor per rank")


def _check_fit(name: str, rank: int, listed: Tensor, own: Tensor) -> None:
    """Refuse a list whose tensor for this rank is unlike the one that it is copied to or from."""
    if listed.shape != own.shape or listed.dtype != own.dtype:
        raise ConfigError(
            f"{name} on rank {rank}: tensor {rank} of the list is {tuple(listed.shape)} {listed.dtype}, "
            f"and the other {tuple(own.shape)} {own.dtype}",
            "give both the same shape and dtype",
        )


def _exchange(sent: Tensor, to: int, received: Tensor, source: int, group: dist.ProcessGroup | None) -> None:
    """Send to one rank and receive from another at the same time, so that a ring of senders does not lock up.

    Nothing travels for an empty tensor: both ends know its shape. But on GPUs a byte does, since a batch may be the
    group's first call, which all its ranks have to make (torch.distributed.batch_isend_irecv).
    """
    receive_buffer = received.contiguous()  # the tensor itself, or room beside it
    buffers = [sent.contiguous(), receive_buffer]
    if sent.is_cuda:
        buffers = [buffer if buffer.numel() else buffer.new_empty(1, dtype=torch.uint8) for buffer in buffers]
    messages = [
        dist.P2POp(dist.isend, buffers[0], group=group, group_peer=to),
        dist.P2POp(dist.irecv, buffers[1], group=group, group_peer=source),
    ]
    messages = [message for message in messages if message.tensor.numel()]
    # Both at once: were all ranks to send first, each would wait for a receiver that is sending, too.
    for work in dist.batch_isend_irecv(messages) if messages else []:
        work.wait()
    _copy_back(receive_buffer, received)


def _copy_back(buffer: Tensor, tensor: Tensor) -> None:
    """Copy a result to where it is wanted, if that is not contiguous and another tensor travelled in its place."""
    if buffer is not tensor:
        tensor.copy_(buffer)


def _wait(work: dist.Work | None) -> None:
    assert work is not None, "only ranks outside the group get no work, and they were refused"
    work.wait()
