"""The footer of a stored object. It turns a wrong object into a miss instead of wrong KV.

A stored object is the packed block (payload), followed by a footer of FOOTER_BYTES, little-endian:

    offset  bytes  field
         0      8  magic "tfdblock"
         8      2  format version, 1
        10      2  footer size, 128
        12      4  rank
        16      8  payload length
        24      8  xxh3-64 of the payload
        32     20  key digest (BLAKE2b-160, keys.py)
        52      4  how the payload is divided into sealed parts: 0 not at all, 1 as BlockLayout.part_ends says
        56     16  digest of the generation
        72     16  digest of the layout fingerprint
        88     16  digest of the model
       104     16  xxh3-64 of the payload up to the end of each part but the last; zero without parts
       120      8  xxh3-64 of the footer's first 120 bytes

The footer comes last, so a truncated object has none in the expected place. Generation, fingerprint and model
are texts of any length, so the footer holds their BLAKE2b-128 digests.

`check` works from the outside in: is there a footer, is the footer intact, is this the requested object, is the
payload intact? So each reason has one meaning: `checksum` means a damaged payload, `key` means that storage mixed
up names, `layout` means a block of another shape. For a partial block (`…:partial:N`), N is part of the key, so the
key digest covers it.

The seals of parts let a load use the leading layers of a block before the rest has come. The last part's seal is the
payload's. Only a copy that takes the checksum as well makes them (workers/cpu_blocks.py); other objects have none, nor
have those of earlier versions, and are loaded as a whole. Earlier versions ignore these fields.

Cost: one pass of xxh3 over the payload, plus about 2 µs. xxhash releases the GIL for payloads of 128 KiB or more.
"""

from __future__ import annotations

import functools
import hashlib
import re
import struct
from collections.abc import Iterable, Sequence

import msgspec
import xxhash

from transferd.blocks.keys import DIGEST_BYTES, encode_text, unquote_part
from transferd.blocks.layout.base import PARTS
from transferd.errors import InvariantError
from transferd.runtime.compat import StrEnum

FOOTER_BYTES = 128
FORMAT_VERSION = 1
BY_LAYERS = 1  # how it is divided into them

_MAGIC = b"tfdblock"
_BODY = struct.Struct("<8sHHIQQ20sI16s16s16sQQ")
_SEAL = struct.Struct("<Q")
assert _BODY.size + _SEAL.size == FOOTER_BYTES
assert DIGEST_BYTES == 20  # the width of the key field
_DIGEST = re.compile(r"[0-9a-f]{40}")
_RANK = re.compile(r"0|[1-9][0-9]{0,8}")


class Damage(StrEnum):
    """Why an object must not be delivered. Metrics count by the value."""

    MAGIC = "magic"  # no footer at the end: the object is truncated, zeroed, or not ours
    VERSION = "version"  # written by another format version
    FOOTER = "footer"  # the footer's own checksum is wrong
    KEY = "key"  # the object belongs to another key
    GENERATION = "generation"  # of another weight version
    LAYOUT = "layout"  # of another layout fingerprint
    MODEL = "model"  # of another model
    RANK = "rank"  # of another rank
    LENGTH = "length"  # the payload has another length than expected
    CHECKSUM = "checksum"  # the payload's bytes have changed since it was stored
    UNREADABLE = "unreadable"  # the medium cannot read the bytes


class Stamp(msgspec.Struct, frozen=True, gc=False):
    """An object's identity, as its footer records it. `stamps` builds them, in about 0.2 µs each."""

    key: bytes  # 20 bytes
    generation: bytes  # 16
    fingerprint: bytes  # 16
    model: bytes  # 16
    rank: int


def stamps(digests: Iterable[str], *, model: str, fingerprint: str, generation: str, rank: int) -> list[Stamp]:
    """One Stamp per key digest (hex, from `ObjectNamer.digests`), in order."""
    common = _text_digest(generation), _text_digest(fingerprint), _text_digest(model), rank
    return [Stamp(bytes.fromhex(digest), *common) for digest in digests]


def seal(slot: memoryview, payload_bytes: int, stamp: Stamp, checksums: Sequence[int] = ()) -> None:
    """Write the footer right after the payload.

    slot: writable bytes that begin with the payload and have room for the footer. The caller owns them, and keeps
    the payload unchanged until it is stored. checksums: the xxh3-64 of the payload up to the end of each of its parts,
    if the caller has them; only one of them: it has no parts.
    """
    _check_room(slot, payload_bytes)
    *parts, checksum = checksums or (xxhash.xxh3_64_intdigest(slot[:payload_bytes]),)
    divided = len(parts) == PARTS - 1
    body = _BODY.pack(
        _MAGIC,
        FORMAT_VERSION,
        FOOTER_BYTES,
        stamp.rank,
        payload_bytes,
        checksum,
        stamp.key,
        BY_LAYERS if divided else 0,
        stamp.generation,
        stamp.fingerprint,
        stamp.model,
        *(parts if divided else (0, 0)),
    )
    slot[payload_bytes : payload_bytes + FOOTER_BYTES] = body + _SEAL.pack(xxhash.xxh3_64_intdigest(body))


def check(slot: memoryview, payload_bytes: int, stamp: Stamp) -> Damage | None:
    """None if `slot` holds the intact object that `stamp` names, otherwise why it must not be delivered."""
    _check_room(slot, payload_bytes)
    inspection = Inspection(stamp, payload_bytes + FOOTER_BYTES)
    damage = inspection.footer(bytes(slot[payload_bytes : payload_bytes + FOOTER_BYTES]))
    return damage or inspection.damage(xxhash.xxh3_64_intdigest(slot[:payload_bytes]))


class Inspection:
    """Checks an object piece by piece: its footer first, then the payload in order, in pieces of any size.

    stamp: what the footer must say. nbytes: the object's length, footer included. At the end, `damage` returns what
    `check` would.

    seals: of the payload up to the end of each part, once the footer was checked; empty if it has none of parts.
    """

    __slots__ = ("_hasher", "_recorded", "_stamp", "payload_bytes", "seals")

    def __init__(self, stamp: Stamp, nbytes: int) -> None:
        self._stamp = stamp
        self.payload_bytes = nbytes - FOOTER_BYTES
        self._recorded = 0  # the payload's checksum, as the footer says
        self._hasher: xxhash.xxh3_64 | None = None  # of the payload, if it is fed
        self.seals: tuple[int, ...] = ()

    def footer(self, footer: bytes) -> Damage | None:
        """Check the footer: the object's last FOOTER_BYTES, or all of a shorter object.

        An empty field of the stamp matches anything.
        """
        if len(footer) < FOOTER_BYTES:
            return Damage.MAGIC
        magic, version, size, rank, length, self._recorded, key, divided, *texts, first, second = _BODY.unpack_from(
            footer
        )
        generation, fingerprint, model = texts
        stamp, self.seals = self._stamp, ()
        if magic != _MAGIC:
            return Damage.MAGIC
        if version != FORMAT_VERSION or size != FOOTER_BYTES:
            return Damage.VERSION
        if _SEAL.unpack_from(footer, _BODY.size)[0] != xxhash.xxh3_64_intdigest(footer[: _BODY.size]):
            return Damage.FOOTER
        if key != stamp.key:
            return Damage.KEY
        if generation != stamp.generation and stamp.generation:
            return Damage.GENERATION
        if fingerprint != stamp.fingerprint and stamp.fingerprint:
            return Damage.LAYOUT
        if model != stamp.model and stamp.model:
            return Damage.MODEL
        if rank != stamp.rank:
            return Damage.RANK
        if length != self.payload_bytes:
            return Damage.LENGTH
        if divided == BY_LAYERS:
            self.seals = first, second, self._recorded
        return None

    def payload(self, piece: memoryview) -> None:
        if self._hasher is None:
            self._hasher = xxhash.xxh3_64()
        self._hasher.update(piece)

    def damage(self, checksum: int | None = None) -> Damage | None:
        """The result for the fed payload, or for its `checksum` if the caller has it. Check the footer first."""
        if checksum is None:
            checksum = (self._hasher or xxhash.xxh3_64()).intdigest()
        return None if checksum == self._recorded else Damage.CHECKSUM


class NotSealed(ValueError):
    """The name is not one of ours, so the object has nothing that proves it intact."""


def stamp_of_name(name: str) -> Stamp:
    """The stamp that an object of this name must have.

    A part that was too long for the name (keys.py) stays empty and is not compared. Raises NotSealed.
    """
    parts = name.split("/")
    if len(parts) != 5 or not _DIGEST.fullmatch(parts[3]) or not _RANK.fullmatch(parts[4]):
        raise NotSealed(name)
    texts = (unquote_part(part) for part in parts[:3])
    model, fingerprint, generation = (b"" if text is None else _text_digest(text) for text in texts)
    return Stamp(bytes.fromhex(parts[3]), generation, fingerprint, model, int(parts[4]))


def _check_room(slot: memoryview, payload_bytes: int) -> None:
    if payload_bytes < 0 or slot.nbytes < payload_bytes + FOOTER_BYTES or slot.format != "B":
        raise InvariantError(
            f"a slot of {slot.nbytes} bytes (format {slot.format!r}) cannot hold {payload_bytes} bytes and a footer"
        )


@functools.lru_cache(maxsize=64)
def _text_digest(text: str) -> bytes:
    return hashlib.blake2b(encode_text(text), digest_size=16, person=b"transferd stamp").digest()
