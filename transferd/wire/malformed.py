"""A request that cannot be read: what is wrong with it, and its seq and task_id as far as they are readable.

Nothing here builds objects from the whole message; unused parts are skipped as bytes. Otherwise a message of
empty lists could take 60 times its size in the daemon's memory.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from transferd.errors import OutOfMemory, ProtocolError

# What msgspec raises for bytes that are not msgpack of the expected shape. ValueError: for example, text that
# is not UTF-8. RecursionError: nesting too deep. MemoryError: out of memory.
UNREADABLE = (msgspec.DecodeError, ValueError, OverflowError, RecursionError, MemoryError)


class Malformed(ProtocolError):
    """Bytes that are not a request. seq and task_id identify it as far as they were readable."""

    def __init__(self, message: str, *, code: str, seq: int = 0, task_id: str | None = None) -> None:
        super().__init__(message, code=code)
        self.seq = seq
        self.task_id = task_id


class _LooseRequest(msgspec.Struct, array_like=True):
    seq: msgspec.Raw
    ack: msgspec.Raw
    body: msgspec.Raw


class _LooseBody(msgspec.Struct):
    type: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    task_id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _TokenIdsBody(msgspec.Struct):
    token_ids: memoryview | None = None


# msgspec decodes a value of an unknown type (TokenIds) to plain objects before it calls the hook. Above this
# size, check first that token_ids are bytes.
CAREFUL_BYTES = 64 * 1024
_token_ids_decoder = msgspec.msgpack.Decoder(_TokenIdsBody)
_loose_decoder = msgspec.msgpack.Decoder(_LooseRequest)
_loose_body_decoder = msgspec.msgpack.Decoder(_LooseBody)
_int_decoder = msgspec.msgpack.Decoder(int)
_text_decoder = msgspec.msgpack.Decoder(str)

T = TypeVar("T")


def check_token_ids(content: memoryview) -> None:
    """Raise msgspec.ValidationError if the message has token_ids that are not bytes."""
    _token_ids_decoder.decode(_loose_decoder.decode(content).body)


def as_malformed(
    content: memoryview, problem: str, code: str, *, tasks: frozenset[str], control: frozenset[str]
) -> Malformed:
    """Build the error, with the seq and task_id of the message if they are readable.

    content: the message after its version byte.
    tasks, control: the known types of bodies.
    """
    seq = 0
    try:
        loose = _loose_decoder.decode(content)
        said = _read(_int_decoder, loose.seq)
        seq = said if said is not None and 0 <= said < 2**63 else 0
        body = _loose_body_decoder.decode(loose.body)
    except UNREADABLE:
        return Malformed(problem, code=code if code in ("too_large", OutOfMemory.code) else "malformed", seq=seq)
    kind, task_id = _read(_text_decoder, body.type), _read(_text_decoder, body.task_id)
    if kind not in tasks and kind not in control:
        if code == "bad_value":
            shown = "missing" if body.type is msgspec.UNSET else repr(kind[:80]) if kind is not None else "not text"
            return Malformed(f"unknown type: {shown}", code="unknown_type", seq=seq, task_id=task_id)
        return Malformed(problem, code=code, seq=seq, task_id=task_id)
    # msgspec's path starts at the envelope; make it start at the task.
    problem = problem.replace("`$[2]", "`$")
    return Malformed(problem, code=code, seq=seq, task_id=task_id if kind in tasks else None)


def _read(decoder: msgspec.msgpack.Decoder[T], raw: msgspec.Raw | msgspec.UnsetType) -> T | None:
    """Decode the value; None if it is not of the decoder's type."""
    if raw is msgspec.UNSET:
        return None
    try:
        return decoder.decode(raw)
    except UNREADABLE:
        return None
