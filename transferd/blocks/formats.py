"""How a packed block becomes objects in a storage pool. There are two formats; `storage.key_schema` chooses one.

    schema        objects of one (block, rank)                              what proves an object intact
    transferd     one: all planes in layout order, then the footer          its footer
    fastdeploy    one per plane: [layers, heads, block_size, head_dim]      only its length

This module contains all the differences: the names of objects, the place of each segment in a staging slot, which
part of the slot is which object, and what is written and checked besides the bytes. Workers do not know which
ObjectFormat they use. `storage/divided.py` splits and joins blocks that are several objects.

FastDeploy's names are `prefix{version}_{hash}_{rank}_{plane}`, where plane is key, value, key_scale or value_scale.
Its objects hold raw bytes: all layers of one plane, one after the other, as its cache_transfer_manager.py and
swap_cache_layout.cu lay them out. `indexer` (DSA) is our addition: FastDeploy does not store it. Such a name
contains neither model nor tensor-parallel size nor dtype, and nothing in the object shows damage.
docs/fastdeploy_details.md describes the cost.

**Names.** A key is an opaque string of any length and any characters. Its *digest* is BLAKE2b
of 160 bits with the personalisation `transferd key`, over the key in UTF-8 (lone surrogates, which
Python strings may contain, are encoded as in WTF-8), as 40 hex digits. It has 160 bits because keys may
come from many tenants: a collision then costs 2^80 tries, and names stay short.
An object's name is

    <model>/<fingerprint>/<generation>/<key digest>/<rank>

Model and generation may be any text. In a name, each of their bytes outside `A-Z a-z 0-9 _ . -` becomes
%XX, and a part longer than PART_BYTES is cut and ends in `~` and its digest. So a name is printable ASCII
of bounded length with exactly four slashes, and two different identities never share a name.

**Footers.** A footer turns a wrong object into a miss instead of wrong KV. It has FOOTER_BYTES,
little-endian, and follows the packed block (payload):

    offset  bytes  field
         0      8  magic "tfdblock"
         8      2  format version, 1
        10      2  footer size, 128
        12      4  rank
        16      8  payload length
        24      8  xxh3-64 of the payload
        32     20  key digest (BLAKE2b-160)
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
payload's. Only a copy that takes the checksum as well makes these seals, and uses them (workers/_inplace.c). Other
objects, and those of earlier versions, lack them and are loaded as a whole. Earlier versions ignore these fields.

Cost: one pass of xxh3 over the payload, plus about 2 µs. xxhash releases the GIL for payloads of 128 KiB or more.
"""

from __future__ import annotations

import functools
import hashlib
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

import msgspec
import numpy as np
import xxhash

from transferd.blocks.keys import encode_text
from transferd.blocks.layout.base import BlockLayout
from transferd.config import StorageSection
from transferd.errors import ConfigError, InvariantError
from transferd.runtime.compat import StrEnum

DIGEST_BYTES = 20
PART_BYTES = 120  # of a quoted model or generation: name parts also become file names, which hold 255

_KEY_HASHER = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"transferd key")  # copied, never updated
_UNSAFE = re.compile(rb"[^A-Za-z0-9_.-]")

# --- names ----------------------------------------------------------------------------------------


def key_digest(key: str) -> str:
    """A key's digest as it appears in names and footers: 40 lower-case hex digits."""
    hasher = _KEY_HASHER.copy()
    hasher.update(key.encode("utf-8", "surrogatepass"))
    return hasher.hexdigest()


class ObjectNamer:
    """Names of one model's objects in one layout. Immutable; shared by all ranks.

    model: `storage.model`.
    fingerprint: `BlockLayout.fingerprint`.

    Each call takes the generation, because it changes while a daemon runs.
    """

    def __init__(self, model: str, fingerprint: str) -> None:
        self.model = model
        self.fingerprint = fingerprint
        self.space = f"{quote_part(model)}/{quote_part(fingerprint)}"

    def ids(self, keys: Iterable[str]) -> list[str]:
        """The `key_digest` of each key. They are the same on every rank: compute them once per task."""
        return list(map(key_digest, keys))

    def names(self, generation: str, ids: Iterable[str], rank: int) -> list[str]:
        """The names of one rank's objects, in the order of their keys' `ids`; about 0.1 µs each."""
        head = f"{self.space}/{quote_part(generation)}/"
        tail = f"/{rank}"
        return [head + digest + tail for digest in ids]

    def stamps(self, generation: str, ids: Iterable[str], rank: int) -> list[Stamp]:
        """The stamps of these objects, in order."""
        common = _text_digest(generation), _text_digest(self.fingerprint), _text_digest(self.model), rank
        return [Stamp(bytes.fromhex(digest), *common) for digest in ids]

    def id_of(self, generation: str, name: str) -> str | None:
        """The digest in the name of an object of this generation and any rank; None for any other name."""
        head = f"{self.space}/{quote_part(generation)}/"
        return name[len(head) :].partition("/")[0] if name.startswith(head) else None

    def owns(self, name: str) -> bool:
        """Whether it is the name of an object of this model and layout, in any generation."""
        return name.startswith(f"{self.space}/")


@functools.lru_cache(maxsize=64)
def quote_part(text: str) -> str:
    """`text` as a name part: printable ASCII without slashes, at most PART_BYTES long, injective."""
    raw = encode_text(text)
    quoted = _UNSAFE.sub(lambda match: b"%%%02X" % match[0][0], raw).decode("ascii")
    if len(quoted) <= PART_BYTES:
        return quoted
    digest = hashlib.blake2b(raw, digest_size=DIGEST_BYTES, person=b"transferd part").hexdigest()
    return f"{quoted[: PART_BYTES - len(digest) - 1]}~{digest}"


def unquote_part(part: str) -> str | None:
    """The inverse of `quote_part`. None if the text was cut because it was too long, or if this is no such part."""
    if "~" in part:
        return None
    try:
        text = unquote_to_bytes(part).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None
    return text if quote_part(text) == part else None


# --- the footer -----------------------------------------------------------------------------------

FOOTER_BYTES = 128
FORMAT_VERSION = 1

_MAGIC = b"tfdblock"
_BODY = struct.Struct("<8sHHIQQ20sI16s16s16sQQ")
_SEAL = struct.Struct("<Q")
_NO_SEAL = bytes(_SEAL.size)
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


def seal(slot: memoryview, payload_bytes: int, stamp: Stamp) -> None:
    """Write the footer right after the payload.

    slot: writable bytes that begin with the payload and have room for the footer. The caller owns them, and keeps the
        payload unchanged until it is stored.
    """
    _check_room(slot, payload_bytes)
    body = _body(payload_bytes, stamp, xxhash.xxh3_64_intdigest(slot[:payload_bytes]))
    slot[payload_bytes : payload_bytes + FOOTER_BYTES] = body + _SEAL.pack(xxhash.xxh3_64_intdigest(body))


def unsealed_footer(payload_bytes: int, stamp: Stamp) -> bytes:
    """A footer without checksums."""
    return _body(payload_bytes, stamp) + _NO_SEAL


def _body(payload_bytes: int, stamp: Stamp, checksum: int = 0) -> bytes:
    """A footer without its own checksum."""
    texts = stamp.generation, stamp.fingerprint, stamp.model
    return _BODY.pack(
        _MAGIC, FORMAT_VERSION, FOOTER_BYTES, stamp.rank, payload_bytes, checksum, stamp.key, 0, *texts, 0, 0
    )


def check(slot: memoryview, payload_bytes: int, stamp: Stamp) -> Damage | None:
    """None if `slot` holds the intact object that `stamp` names, otherwise why it must not be delivered."""
    _check_room(slot, payload_bytes)
    inspection = Inspection(stamp, payload_bytes + FOOTER_BYTES)
    damage = inspection.footer(bytes(slot[payload_bytes : payload_bytes + FOOTER_BYTES]))
    return damage or inspection.damage(xxhash.xxh3_64_intdigest(slot[:payload_bytes]))


class Inspection:
    """Checks an object piece by piece: its footer first, then the payload in order, in pieces of any size.

    At the end, `damage` returns what `check` would.

    stamp: the identity that the footer must have.
    nbytes: the object's length, footer included.
    """

    __slots__ = ("_hasher", "_recorded", "_stamp", "payload_bytes")

    def __init__(self, stamp: Stamp, nbytes: int) -> None:
        self._stamp = stamp
        self.payload_bytes = nbytes - FOOTER_BYTES
        self._recorded = 0  # the payload's checksum according to the footer
        self._hasher: xxhash.xxh3_64 | None = None  # of the payload, if it is fed

    def footer(self, footer: bytes) -> Damage | None:
        """Check the footer: the object's last FOOTER_BYTES, or all of a shorter object.

        An empty field of the stamp matches anything.
        """
        if len(footer) < FOOTER_BYTES:
            return Damage.MAGIC
        magic, version, size, rank, length, self._recorded, key, _, *texts, _, _ = _BODY.unpack_from(footer)
        generation, fingerprint, model = texts
        stamp = self._stamp
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
    """The name is not one of ours, so nothing can prove the object intact."""


def stamp_of_name(name: str) -> Stamp:
    """The stamp that an object of this name must have.

    A part that was too long for the name stays empty and is not compared. Raises NotSealed.
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


# --- formats --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ObjectPart:
    """One of a block's objects. Its name is the block's name + `suffix`; its bytes are slot[start:stop]."""

    suffix: str
    start: int
    stop: int


class SealedBlocks(ObjectNamer):
    """transferd's format: one object per block. Its footer seals model, layout, generation, key and rank.

    Immutable; shared by all ranks and threads, as RawPlanes is, which has the same members:

    space: the common beginning of the names of all its objects (storage/queues.py).
    parts: a block's objects.
    slot_bytes: the length of the parts, from the start of a slot.
    offsets: int64 [segments], the start of each segment in a slot.
    checked_bytes: how many bytes of a block `seal` and `check` read; that is their cost.
    ids: the part of each key that goes into names. The same on every rank, so it is computed once per task.
    names, id_of: of one rank's blocks, in order, and back; `id_of` takes a name of any rank.
    """

    def __init__(self, model: str, layout: BlockLayout) -> None:
        super().__init__(model, layout.fingerprint)
        self.slot_bytes = layout.block_bytes + FOOTER_BYTES
        self.parts: tuple[ObjectPart, ...] = (ObjectPart("", 0, self.slot_bytes),)
        self.offsets = np.array([segment.offset for segment in layout.segments], dtype=np.int64)
        self.checked_bytes = layout.block_bytes

    def possible(self, name: str, nbytes: int) -> bool:
        """Whether an object of this name could have this length. Most names do not determine the length."""
        return nbytes == self.slot_bytes if self.owns(name) else nbytes > FOOTER_BYTES

    def seal(self, slots: Sequence[memoryview], generation: str, ids: Sequence[str], rank: int) -> None:
        """Complete slots that hold packed blocks, so that `check` can later prove them intact."""
        for slot, mark in zip(slots, self.stamps(generation, ids, rank), strict=True):
            seal(slot, self.checked_bytes, mark)

    def check(self, slots: Sequence[memoryview], generation: str, ids: Sequence[str], rank: int) -> list[Damage | None]:
        """For each slot: None if it holds the right block, intact; otherwise why it must not be delivered."""
        marks = self.stamps(generation, ids, rank)
        return [check(slot, self.checked_bytes, mark) for slot, mark in zip(slots, marks, strict=True)]

    def inspection(self, generation: str, block: str, rank: int) -> Inspection:
        """Like `check`, for one block, by its id. Raises InvariantError if the format splits a block into objects."""
        return Inspection(self.stamps(generation, [block], rank)[0], self.slot_bytes)

    def footers(self, generation: str, ids: Sequence[str], rank: int) -> bytes:
        """The footers of these blocks one behind the other, without checksums. Raises the same."""
        marks = self.stamps(generation, ids, rank)
        return b"".join(map(functools.partial(unsealed_footer, self.checked_bytes), marks))


class RawPlanes:
    """FastDeploy's format: one raw object per plane. Shares a pool with FastDeploy's own transfer processes."""

    space = ""
    checked_bytes = 0

    def __init__(self, layout: BlockLayout) -> None:
        layers = layout.layers + layout.mtp_layers
        parts, first = [], {}
        end = 0
        for plane in layout.planes:
            first[plane.name] = end
            parts.append(ObjectPart(f"_{plane.name}", end, end + layers * plane.nbytes))
            end = parts[-1].stop
        self.parts = tuple(parts)
        self.slot_bytes = end
        self.offsets = np.array(
            [first[segment.plane.name] + segment.layer * segment.nbytes for segment in layout.segments], dtype=np.int64
        )

    def ids(self, keys: Iterable[str]) -> list[str]:
        return list(keys)

    def names(self, generation: str, ids: Iterable[str], rank: int) -> list[str]:
        return [f"prefix{generation}_{key}_{rank}" for key in ids]

    def id_of(self, generation: str, name: str) -> str | None:
        head = f"prefix{generation}_"
        key, _, rank = name[len(head) :].rpartition("_")
        return key if name.startswith(head) and rank.isdigit() else None

    def possible(self, _name: str, nbytes: int) -> bool:
        return nbytes > 0

    def seal(self, _slots: Sequence[memoryview], _generation: str, _ids: Sequence[str], _rank: int) -> None:
        """Does nothing: the format has only the raw bytes."""

    def check(
        self, slots: Sequence[memoryview], _generation: str, _ids: Sequence[str], _rank: int
    ) -> list[Damage | None]:
        """Finds no damage: storage has checked the lengths, and there is nothing else to check."""
        return [None] * len(slots)

    def inspection(self, generation: str, block: str, rank: int) -> Inspection:
        raise InvariantError(f"planes of rank {rank} have no footers: block {block} of generation {generation!r}")

    def footers(self, generation: str, ids: Sequence[str], rank: int) -> bytes:
        raise InvariantError(f"planes of rank {rank} have no footers: {len(ids)} blocks of generation {generation!r}")


ObjectFormat = SealedBlocks | RawPlanes


def object_format(storage: StorageSection, layout: BlockLayout) -> ObjectFormat:
    """The configured format. Raises ConfigError."""
    if storage.key_schema == "fastdeploy":
        if layout.page_bytes:
            what = 'FastDeploy\'s objects are planes of a model; pages need the schema "transferd"'
            raise ConfigError("storage.key_schema", what, storage.key_schema)
        return RawPlanes(layout)
    return SealedBlocks(storage.model, layout)
