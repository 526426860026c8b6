"""Point-to-point messages of a pipeline: what a rank hands to other ranks, and to other stages of its own.

The way of one message, the output of ``1F0`` on rank 1, which ``2F0`` on rank 2 will use::

    rank 1   1F0  hand_over(2F0, output)    1SEND_F0  send: isend, kept until it has been received
    rank 2        2RECV_F0  receive: irecv into new tensors    2F0  take: wait for it

Where both stages are on one rank there is no send and no receive: ``take`` finds what ``hand_over`` put there.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.parallel.pipeline.actions import RECV_F, SEND_F, Action, B, I, Schedule
from course_lib.parallel.pipeline.passes import partner

Tensors = tuple[Tensor, ...]


class TensorMeta(NamedTuple):
    """Shape and dtype of a tensor, so that a rank can make room for it."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorMeta":
        return cls(tensor.shape, tensor.dtype, tensor.requires_grad)


Forms = dict[tuple, tuple[TensorMeta, ...]]
"""What a stage's outputs look like, by stage and kind of micro-batch."""


class P2PChannel:
    """The messages of one pass: each is what a forward or backward of one stage gives to that of the next.

    A message bears the name of the action that will use it; one for ``2I0`` is addressed to ``2B0``. The receiver makes
    room before it comes. So the first time that a stage's outputs look different, the sender tells it how, ahead of
    them; gradients that come back look like the outputs.

    Nothing blocks but ``take`` and the first ``receive`` of a form: a send is begun and its tensors are kept until they
    have been received, a receive is begun and waited for when its tensors are used.

    Args:
        table: with its sends and receives.
        group: whose ranks are those of the table.
        device: where tensors are received.
        forms: what is known from earlier passes; grows.
        kinds: of each micro-batch; those of one kind have messages of one form, and all ranks know the kinds.
    """

    def __init__(
        self, table: Schedule, group: dist.ProcessGroup | None, device: torch.device, forms: Forms, kinds: Sequence[Any]
    ):
        self.table, self.group, self.device, self.forms, self.kinds = table, group, device, forms, kinds
        # Forms are told by the hosts where the group has a backend for their memory: by the GPUs, both ends would wait
        # until their device has done all that was queued.
        reached = (group or dist.group.WORLD)._device_types  # type: ignore[union-attr]
        self._told_on = torch.device("cpu") if torch.device("cpu") in reached else device
        self._messages: dict[Action, Tensors] = {}  # by who will use it: not yet sent, or not yet taken
        self._posted: dict[Action, list[dist.Work]] = {}  # receives that have been begun, by who will use what comes
        self._sent: list[tuple[Action, list[dist.Work], Tensors]] = []  # sends that may still be under way
        # Where each action is in its rank's row.
        self._position = {_address(action): position for row in table.rows for position, action in enumerate(row)}

    def hand_over(self, user: Action, tensors: Tensors) -> None:
        """Put a message where its user will take it, or where a send will."""
        self._messages[_address(user)] = tensors

    def send(self, action: Action) -> None:
        """Send a message and go on."""
        message = self._messages.pop(_user(action))
        peer = self._peer(action)
        key = action.stage, self.kinds[action.microbatch]
        # --- once per form: tell the receiver how large it is. Not of gradients: they look like the outputs ---
        if action.kind == SEND_F and key not in self.forms:
            self.forms[key] = tuple(map(TensorMeta.of, message))
            dist.send_object_list([self.forms[key]], group=self.group, group_dst=peer, device=self._told_on)
        # --- begin to send. What goes over a link is one run of memory; the tensors are kept until it has arrived ---
        tensors = tuple(tensor.detach().contiguous() for tensor in message)
        works = [_begun(dist.isend(tensor, group=self.group, group_dst=peer)) for tensor in tensors]
        self._sent.append((_user(action), works, tensors))

    def receive(self, action: Action) -> None:
        """Make room for a message, ask for it and go on."""
        peer = self._peer(action)
        forward = action.kind == RECV_F
        key = action.stage - forward, self.kinds[action.microbatch]  # outputs of the stage before, or of this one
        # --- once per form: be told. The sender's row has its send in the same place among their common messages ---
        if key not in self.forms:
            told: list[Any] = [None]
            dist.recv_object_list(told, group=self.group, group_src=peer, device=self._told_on)
            self.forms[key] = told[0]
        # --- make room and begin. Gradients come back for those outputs alone that have one ---
        tensors = tuple(
            torch.empty(form.shape, dtype=form.dtype, device=self.device)
            for form in self.forms[key]
            if forward or form.requires_grad
        )
        self._posted[_user(action)] = [
            _begun(dist.irecv(tensor, group=self.group, group_src=peer)) for tensor in tensors
        ]
        if forward:  # a leaf needs a gradient here if its original does there
            for tensor, form in zip(tensors, self.forms[key], strict=True):
                tensor.requires_grad_(form.requires_grad)
        self._messages[_user(action)] = tensors

    def take(self, user: Action) -> Tensors:
        """A message, as soon as it is there."""
        user = _address(user)
        if user in self._posted:
            for work in self._posted.pop(user):
                work.wait()
            self._release(user)
        return self._messages.pop(user)

    def close(self) -> None:
        """Wait until everything that was sent has been received."""
        for _, works, _ in self._sent:
            for work in works:
                work.wait()

    def _release(self, received: Action) -> None:
        """Free what the sender of a message had certainly received before it sent: its row says so.

        Otherwise every output that was sent would stay alive to the end of the pass.
        """
        # When it sent this, the sender was at `sent_at` in its row. All before that had run there, each with its input:
        # of what was sent to that rank, all that is used before there has been received.
        send = partner(_receive_for(received))
        sender, sent_at = self.table.stage_ranks[send.stage], self._position[send]
        kept = []
        for user, works, tensors in self._sent:
            if self.table.stage_ranks[user.stage] == sender and self._position[user] < sent_at:
                for work in works:
                    work.wait()  # returns at once, and lets the backend forget the tensors
            else:
                kept.append((user, works, tensors))
        self._sent = kept

    def _peer(self, action: Action) -> int:
        """The rank at the other end of a send or receive."""
        return self.table.stage_ranks[partner(action).stage]


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None  # torch gives None to a rank that is not in the group
    return work


def _address(action: Action) -> Action:
    """Both kinds of backward that begin with a gradient from the next stage, as one."""
    return action._replace(kind=B) if action.kind == I else action


def _user(action: Action) -> Action:
    """Who will use what is sent or received."""
    receive = action if action.kind.startswith("RECV") else partner(action)
    return receive._replace(kind=receive.kind[-1])


def _receive_for(user: Action) -> Action:
    """The receive that brings a user's message."""
    return user._replace(kind=f"RECV_{user.kind}")
