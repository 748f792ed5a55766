"""What two daemons say to each other, and its form: a length of 4 bytes (little-endian), then one msgpack map."""

from __future__ import annotations

from typing import Annotated

import msgspec

from transferd.errors import ProtocolError
from transferd.tasks import ErrorInfo
from transferd.wire.protocol import UNREADABLE

VERSION = 1
MAX_FRAME = 16 * 1024**2  # a Want names every object of a sequence: about 100 bytes each


class _Message(msgspec.Struct, frozen=True, tag_field="type"):
    """transfer, rank: which share of which sequence it is about.

    attempt: the receiver's number for this attempt at it. The sender repeats it, and what carries another one
    is about an attempt that is over.
    """

    transfer: str
    rank: int
    attempt: int


class Want(_Message, frozen=True, tag="want"):
    """Receiver: I expect these objects, in this order. engine: where the carrier finds my memory."""

    names: list[str]
    engine: str
    version: int = VERSION


class Begin(_Message, frozen=True, tag="begin"):
    """Sender: I have the same objects; post memory."""


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """Memory of the receiver for one object."""

    name: str
    address: Annotated[int, msgspec.Meta(ge=0)]
    nbytes: Annotated[int, msgspec.Meta(ge=0)]


class Post(_Message, frozen=True, tag="post"):
    """Receiver: write these objects there."""

    slots: list[Slot]


class Landed(_Message, frozen=True, tag="landed"):
    """Sender: these objects are in the memory that was posted for them. With an error: they never will be."""

    names: list[str]
    error: ErrorInfo | None = None


class Done(_Message, frozen=True, tag="done"):
    """Receiver: every object was good and is on my device."""


class Withdraw(_Message, frozen=True, tag="withdraw"):
    """Receiver: I do not want it any more, because of `error`. Answered Withdrawn."""

    error: ErrorInfo


class Withdrawn(_Message, frozen=True, tag="withdrawn"):
    """Sender: nothing is being written into your memory, and nothing will be."""


class Refused(_Message, frozen=True, tag="refused"):
    """Sender: you will not get it, or no more of it; nothing is being written into your memory."""

    error: ErrorInfo


FromReceiver = Want | Post | Done | Withdraw
FromSender = Begin | Landed | Withdrawn | Refused
Message = FromReceiver | FromSender

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """A whole frame."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "little") + body


def body_length(header: bytes) -> int:
    """Raises ProtocolError for more than MAX_FRAME."""
    length = int.from_bytes(header, "little")
    if length > MAX_FRAME:
        raise ProtocolError(f"a frame of {length} bytes, at most {MAX_FRAME}", code="too_large")
    return length


def decode(body: bytes) -> Message:
    """Raises ProtocolError."""
    try:
        message: Message = _decoder.decode(body)
    except UNREADABLE as error:
        raise ProtocolError(f"a peer sent what cannot be read: {error}") from error
    return message
