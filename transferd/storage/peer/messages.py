"""The messages between two daemons, and their frames: a length of 4 bytes (little-endian), then one msgpack map."""

from __future__ import annotations

from typing import Annotated

import msgspec

from transferd.errors import PeerRefused, ProtocolError
from transferd.tasks import ErrorInfo
from transferd.wire.protocol import UNREADABLE

VERSION = 1
# Codes of a peer's errors that mean the same here. Others would speak of its device, or of its bugs, as if of ours.
ABOUT_A_TRANSFER = frozenset(
    {
        *("model_mismatch", "layout_mismatch", "generation_mismatch", "blocks_mismatch", "version_mismatch"),
        *("already_sending", "busy", "cancelled", "expired", "peer_lost", "malformed", "damaged"),
    }
)
LONGEST_MESSAGE = 500  # characters of a peer's error
MAX_FRAME = 16 * 1024**2  # a Want names every object of a sequence: about 100 bytes each


class _TransferMessage(msgspec.Struct, frozen=True, tag_field="type"):
    """The fields of every message.

    transfer, rank: the transfer, and the rank with this share of it. A transfer's name is at most as long as a task's
        id.
    attempt: the receiver's number for this attempt. The sender repeats it; a message with another number belongs to an
        attempt that is over.
    """

    transfer: Annotated[str, msgspec.Meta(max_length=1024)]
    rank: int
    attempt: int


def theirs(error: ErrorInfo, code: str = PeerRefused.code) -> ErrorInfo:
    """A peer's error, cut to a bounded length, with a code that can stand here. code: instead of others."""
    message = error.message[:LONGEST_MESSAGE]
    if error.code in ABOUT_A_TRANSFER:
        return ErrorInfo(error.code, message)
    return ErrorInfo(code, f"{message} ({error.code[:64]} there)")


class Want(_TransferMessage, frozen=True, tag="want"):
    """Receiver: I expect these objects, in this order. engine: the carrier's address of my memory."""

    names: list[str]
    engine: Annotated[str, msgspec.Meta(max_length=1024)]
    version: int = VERSION


class Begin(_TransferMessage, frozen=True, tag="begin"):
    """Sender: I have the same objects; post memory."""


class PostedSlot(msgspec.Struct, frozen=True, array_like=True):
    """The receiver's memory for one object."""

    name: str
    address: Annotated[int, msgspec.Meta(ge=0)]
    nbytes: Annotated[int, msgspec.Meta(ge=0)]


class Post(_TransferMessage, frozen=True, tag="post"):
    """Receiver: write these objects there."""

    slots: list[PostedSlot]


class Landed(_TransferMessage, frozen=True, tag="landed"):
    """Sender: these objects are in the memory posted for them; or, with an error, they never will be."""

    names: list[str]
    error: ErrorInfo | None = None


class Done(_TransferMessage, frozen=True, tag="done"):
    """Receiver: every object was intact and is on my device."""


class Withdraw(_TransferMessage, frozen=True, tag="withdraw"):
    """Receiver: I cancel this attempt because of `error`. The sender answers Withdrawn."""

    error: ErrorInfo


class Withdrawn(_TransferMessage, frozen=True, tag="withdrawn"):
    """Sender: I am not writing into your memory, and will not."""


class Refusal(_TransferMessage, frozen=True, tag="refused"):
    """Sender: I will not send the rest; I am not writing into your memory."""

    error: ErrorInfo


FromReceiver = Want | Post | Done | Withdraw
FromSender = Begin | Landed | Withdrawn | Refusal
PeerMessage = FromReceiver | FromSender

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PeerMessage)


def encode(message: PeerMessage) -> bytes:
    """The frame of a message."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "little") + body


def body_length(header: bytes) -> int:
    """The length of a frame's body. Raises ProtocolError above MAX_FRAME."""
    length = int.from_bytes(header, "little")
    if length > MAX_FRAME:
        raise ProtocolError(f"a peer sent a frame of {length} bytes; the limit is {MAX_FRAME}", code="too_large")
    return length


def decode(body: bytes) -> PeerMessage:
    """The message in a frame's body. Raises ProtocolError."""
    try:
        message: PeerMessage = _decoder.decode(body)
    except UNREADABLE as error:
        raise ProtocolError(f"a peer sent a message that cannot be decoded: {error}") from error
    return message
