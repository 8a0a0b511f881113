"""Messages with tensor values between ranks.

Values go straight from and into tensors, or through a few buffers.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from distckpt._base.memory import Copier, is_plain_memory
from distckpt._geometry.region import whole
from distckpt._geometry.units import cut_region, units_of
from distckpt._ranks.collectives import Ranks
from distckpt._ranks.exchanges import Transfer

MESSAGE_BYTES = 8 << 20
"""Size of the largest message."""
OWN_MESSAGE_BYTES = 256 << 10
"""Smaller units are joined into messages of up to `MESSAGE_BYTES`."""
ALIGN_BYTES = 16
"""Alignment of units in a message: a multiple of the size of every dtype."""
MAX_UNDER_WAY = 64
"""Messages that a rank has on their way at a time."""
MAX_BUFFERS = 8
"""Messages that go through buffers at a time, not straight to targets."""


class Message(NamedTuple):
    """Values of units, on their way between this rank and `peer`.

    A large unit goes in several messages, one for each part.

    All ranks carry out their messages in ascending `order` (number of the first unit, number of the
    part, receiving rank), in which no two messages of a wave are equal. So the first message that
    is not done is the next one for both of its ranks, and there is no deadlock. `views` are the
    places of the units in the targets.
    """

    order: tuple[int, int, int]
    peer: int
    is_sent: bool
    views: tuple[torch.Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(map(_padded_bytes, self.views[:-1])) + self.views[-1].nbytes


def make_messages(
    rank: int, peer: int, is_sent: bool, units: Iterable[tuple[int, torch.Tensor]]
) -> Iterator[Message]:
    """Divide the units for one peer into messages, equal on both ranks.

    `units` has the number of each unit, ascending, and its place in the target.
    """
    receiver = peer if is_sent else rank
    small: list[tuple[int, torch.Tensor]] = []
    for number, view in units:
        if view.nbytes < OWN_MESSAGE_BYTES:
            small.append((number, view))
            continue
        pieces = cut_region(whole(tuple(view.shape)), MESSAGE_BYTES // view.element_size())
        for part, piece in enumerate(pieces):
            yield Message((number, part, receiver), peer, is_sent, (view[piece.slices()],))
    sizes = [_padded_bytes(view) for _, view in small]
    for spans in units_of(sizes, MESSAGE_BYTES, block_bytes=MESSAGE_BYTES):
        numbers, views = zip(*(small[span.chunk] for span in spans), strict=True)
        yield Message((numbers[0], 0, receiver), peer, is_sent, views)


def make_buffers(max_bytes: int) -> deque[torch.Tensor]:
    """Return buffers for messages, at least one. They take no memory before they are used."""
    count = max(1, min(MAX_BUFFERS, max_bytes // MESSAGE_BYTES))
    memory = torch.empty(count * MESSAGE_BYTES, dtype=torch.uint8, device="cpu")
    return deque(memory[i * MESSAGE_BYTES : (i + 1) * MESSAGE_BYTES] for i in range(count))


def _padded_bytes(view: torch.Tensor) -> int:
    return -(-view.nbytes // ALIGN_BYTES) * ALIGN_BYTES


class _UnderWay(NamedTuple):
    """A message that has been started; `buffer` is free when it is done."""

    message: Message
    transfer: Transfer
    buffer: torch.Tensor | None


def exchange(
    ranks: Ranks, messages: list[Message], buffers: deque[torch.Tensor], problems: list[Exception]
) -> None:
    """Carry out the messages of one wave, some at a time; all ranks must call it.

    Errors with this rank's own tensors are not raised but added to `problems`: other ranks wait for
    the messages.
    """
    under_way: deque[_UnderWay] = deque()
    tags: dict[tuple[int, bool], int] = defaultdict(int)
    for message in sorted(messages, key=lambda message: message.order):
        tag = tags[message.peer, message.is_sent]
        tags[message.peer, message.is_sent] += 1
        memory = _straight_memory(message)
        buffer = None
        while len(under_way) >= MAX_UNDER_WAY or (memory is None and not buffers):
            _finish(ranks, under_way.popleft(), buffers, problems)
        if memory is None:
            buffer = buffers.popleft()
            memory = buffer[: message.num_bytes]
            if message.is_sent:
                _copy_views(message, memory, problems)
        transfer = ranks.start_transfer(memory, message.peer, tag, message.is_sent)
        under_way.append(_UnderWay(message, transfer, buffer))
    while under_way:
        _finish(ranks, under_way.popleft(), buffers, problems)


def _finish(
    ranks: Ranks, item: _UnderWay, buffers: deque[torch.Tensor], problems: list[Exception]
) -> None:
    ranks.finish(item.transfer)
    if item.buffer is not None:
        if not item.message.is_sent:
            _copy_views(item.message, item.transfer.memory, problems)
        buffers.append(item.buffer)


def _straight_memory(message: Message) -> torch.Tensor | None:
    """Return a message's bytes in its target; None without plain memory."""
    view = message.views[0]
    if len(message.views) > 1 or not is_plain_memory(view):
        return None
    # A tensor of one item counts as contiguous whatever its strides, but view() refuses most of
    # them.
    return view.detach().as_strided((view.numel(),), (1,)).view(torch.uint8)


def _copy_views(message: Message, memory: torch.Tensor, problems: list[Exception]) -> None:
    """Copy the views of a message to its memory, or back."""
    start = 0
    try:
        for view in message.views:
            values = memory[start : start + view.nbytes].view(view.dtype).view(view.shape)
            start += _padded_bytes(view)
            if message.is_sent:
                copy_values(view.detach(), values)
            else:
                copy_values(values, view.detach())
    except Exception as error:
        problems.append(error)


def copy_values(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy values between any devices, see `Copier.copy`."""
    Copier(()).copy(target, source)
