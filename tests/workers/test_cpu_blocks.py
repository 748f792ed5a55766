"""The C extension that copies blocks: XXH3's checksum, and the bytes of blocks and objects."""

from __future__ import annotations

import itertools
import os
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.extension import compiled
from transferd.blocks.formats import FOOTER_BYTES, Inspection, _body, seal, stamp_of_name
from transferd.blocks.layout import build_layout
from transferd.blocks.layout.base import Arena
from transferd.config import CacheSection
from transferd.workers import cpu_blocks
from transferd.workers.cpu_blocks import BlockMemory, Loan

SOURCE = Path(cpu_blocks.__file__).with_name("_inplace.c")
_inplace: Any = getattr(cpu_blocks, "_inplace", None)  # there is none without a compiler
NAME = f"m/f/g/{'ab' * 20}/0"


@pytest.fixture(scope="module", params=["as installed", "without AVX2"])
def native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if request.param == "as installed":
        return pytest.importorskip("transferd.workers._inplace", reason="the installation found no compiler")
    return compiled(SOURCE, tmp_path_factory.mktemp("native"), "-DWITHOUT_AVX2")


def cut(draw: random.Random, total: int, most: int) -> list[int]:
    """`total` as a sum of at most `most` positive numbers."""
    marks = sorted(draw.sample(range(1, total), min(most, total) - 1))
    return [b - a for a, b in zip([0, *marks], [*marks, total], strict=True)]


def some_ends(draw: random.Random, stripes: int) -> tuple[int, ...]:
    """Of up to 7 parts of a payload, and its own, in bytes."""
    inner = draw.sample(range(4, stripes), min(draw.randrange(8), max(0, stripes - 4)))
    return (*(64 * end for end in sorted(inner)), 64 * stripes)


class Lent:
    """One block in memory of its own, cut at random, with its payload and the object that it must become.

    ends: of the sealed parts. block: its number, of two.
    """

    def __init__(self, native: Any, draw: random.Random, stripes: int, ends: tuple[int, ...] = ()) -> None:
        self.native, self.ends = native, ends or some_ends(draw, stripes)
        nbytes, self.block = 64 * stripes, draw.randrange(2)
        self.payload = draw.randbytes(nbytes)
        self.bytes = np.frombuffer(draw.randbytes(2 * nbytes + 64), np.uint8).copy()
        self.before, self.wanted = self.bytes.copy(), self.bytes.copy()
        skew = draw.choice([0, 1, 32])
        bounds = sorted({0, *self.ends, *(64 * draw.randrange(1, stripes) for _ in range(draw.randrange(3)))})
        pieces = []
        for begin, end in itertools.pairwise(bounds):
            table, at = [], begin
            for size in [64 * count for count in cut(draw, (end - begin) // 64, draw.randrange(1, 9))]:
                table.append((skew + at, nbytes, size))
                first = skew + at + nbytes * self.block
                self.wanted[first : first + size] = np.frombuffer(self.payload[at : at + size], np.uint8)
                at += size
            pieces.append((begin, np.array(table, np.int64)))
        self.memory = native.new_memory(self.bytes.ctypes.data, self.ends, tuple(pieces))
        self.loan, self.footer = Loan(), bytearray(_body(nbytes, stamp_of_name(NAME)) + bytes(8))
        self.lent = self.lend()

    def lend(self, part: int = -1, state: bytearray | None = None) -> Any:
        states = [] if state is None else [state]
        return self.native.lend_blocks(self.memory, self.loan, [self.block], bytes(self.footer), part, states)

    def object(self) -> bytearray:
        """As the twin makes it, besides the seals of parts."""
        made = bytearray(self.payload + bytes(FOOTER_BYTES))
        seal(memoryview(made), len(self.payload), stamp_of_name(NAME))
        return made


@settings(max_examples=60, deadline=None)
@given(stripes=st.integers(4, 300), seed=st.integers(0, 2**32))
def test_a_block_becomes_the_object_that_the_twin_makes_and_comes_back(native: Any, stripes: int, seed: int) -> None:
    draw = random.Random(seed)
    one = Lent(native, draw, stripes)
    assert native.take(one.lent, 0, memoryview(one.object()))
    assert np.array_equal(one.bytes, one.wanted), "every byte of the block, and no other"
    made = bytearray(len(one.payload) + FOOTER_BYTES)
    assert native.fill(one.lent, 0, memoryview(made), draw.random() < 0.5)
    inspection = Inspection(stamp_of_name(NAME), len(made))
    footer = bytes(made[-FOOTER_BYTES:])
    assert inspection.footer(footer) is None
    assert inspection.damage(xxhash.xxh3_64_intdigest(made[:-FOOTER_BYTES])) is None
    sums = tuple(xxhash.xxh3_64_intdigest(one.payload[:end]) for end in one.ends)
    by_layers = struct.unpack_from("<I", footer, 52), struct.unpack_from("<QQ", footer, 104)
    assert by_layers == (((1,), sums[:2]) if len(sums) == 3 else ((0,), (0, 0)))
    assert made[:-FOOTER_BYTES] == one.payload
    assert made == one.object() or len(sums) == 3
    assert one.loan.shared == bytes(8)


@settings(max_examples=60, deadline=None)
@given(stripes=st.integers(4, 40), seed=st.integers(0, 2**32))
def test_an_object_that_is_not_right_is_not_taken_and_a_wrong_footer_touches_nothing(
    native: Any, stripes: int, seed: int
) -> None:
    draw = random.Random(seed)
    one = Lent(native, draw, stripes)
    damaged = one.object()
    damaged[at := draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
    assert not native.take(one.lent, 0, memoryview(damaged))
    assert at < len(one.payload) or np.array_equal(one.bytes, one.before)
    other = one.object()
    seal(memoryview(other), len(one.payload), stamp_of_name(NAME.replace("ab", "cd")))
    one.bytes[:] = one.before
    assert not native.take(one.lent, 0, memoryview(other))
    assert np.array_equal(one.bytes, one.before)


@pytest.mark.parametrize("nbytes", [256, 320, 1024, 1088, 2048, 64 * 1023, 64 * 1024, 64 * 1025])
def test_lengths_beside_the_borders_of_the_format(native: Any, nbytes: int) -> None:
    one = Lent(native, random.Random(nbytes), nbytes // 64, (nbytes,))
    assert native.take(one.lent, 0, memoryview(one.object()))
    assert np.array_equal(one.bytes, one.wanted)


def test_parts_are_taken_in_order_and_each_once(native: Any) -> None:
    one = Lent(native, random.Random(3), 30, (640, 1280, 1920))
    made = memoryview(bytearray(len(one.payload) + FOOTER_BYTES))
    assert native.take(one.lent, 0, memoryview(one.object()))
    assert native.fill(one.lent, 0, made, False)
    one.bytes[:] = one.before
    state = native.new_state(one.memory)
    assert not native.take(one.lend(1, state), 0, made), "the first part comes first"
    for part in range(3):
        assert not np.array_equal(one.bytes, one.wanted)
        assert native.take(one.lend(part, state), 0, made)
        assert not native.take(one.lend(part, state), 0, made)
    assert np.array_equal(one.bytes, one.wanted)
    assert not native.take(one.lend(0, native.new_state(one.memory)), 0, memoryview(one.object())), (
        "it has no such seals"
    )


@pytest.mark.parametrize(
    "rows", [[[0, 0, 100]], [[0, 0, 0]], [[0, 0, -64]], [[0, 0, 576]], [[0, 0, 64]] * 1025, [[0, 0]]]
)
def test_parts_that_are_wrong_are_refused(native: Any, rows: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"parts of a piece are wrong|pieces are not the payload"):
        native.new_memory(0, (512,), ((0, np.array(rows, np.int64)),))
    with pytest.raises(ValueError, match="parts of a piece are wrong"):
        native.new_memory(0, (512,), ((0, np.array([[0, 0, 0, 0, 512, 0]], np.int32)),))
    with pytest.raises(ValueError, match="parts of a piece are wrong"):
        native.new_memory(0, (512,), ((64, np.array([[0, 0, 512]], np.int64)),))


@pytest.mark.parametrize(
    "ends",
    [(0,), (64,), (192,), (300,), (1000,), (), (512, 512), (512, 256), (64, 512), tuple(range(256, 832, 64)), (-64,)],
)
def test_payloads_of_another_kind_are_refused(native: Any, ends: tuple[int, ...]) -> None:
    with pytest.raises((ValueError, OverflowError)):
        native.new_memory(0, ends, ())


def test_calls_that_do_not_fit_are_refused(native: Any) -> None:
    one = Lent(native, random.Random(1), 8)
    room = memoryview(bytearray(len(one.payload) + FOOTER_BYTES))
    for i, data in ((1, room), (-1, room), (0, room[1:])):
        with pytest.raises(ValueError, match="no such block"):
            native.fill(one.lent, i, data, True)
        with pytest.raises(ValueError, match="no such block"):
            native.take(one.lent, i, data)
    with pytest.raises((TypeError, BufferError)):
        native.fill(one.lent, 0, bytes(len(room)), True)
    for footers, part, states in ((b"", -1, []), (bytes(128), 0, []), (bytes(128), 9, [bytearray(1)])):
        with pytest.raises(ValueError, match="a footer for each block"):
            native.lend_blocks(one.memory, one.loan, [0], footers, part, states)
    with pytest.raises(ValueError, match="another length"):
        native.lend_blocks(one.memory, one.loan, [0], bytes(128), 0, [bytearray(1)])
    with pytest.raises(ValueError, match="another length"):
        native.end_loan(bytearray(4))
    with pytest.raises(ValueError, match="PyCapsule"):
        native.new_state(one.lent)


# --- blocks -----------------------------------------------------------------------------------------


class Blocks:
    """Memory of a layout, and one sealed object."""

    def __init__(self, cache: CacheSection) -> None:
        layout = build_layout(cache)
        self.bytes = np.frombuffer(os.urandom(layout.device.extent), np.uint8).copy()
        self.memory = BlockMemory(
            Arena(layout.device, self.bytes.ctypes.data),
            layout.packed(1, layout.block_bytes + FOOTER_BYTES),
            [nbytes for _, nbytes in layout.part_ends],
        )
        payload = layout.block_bytes
        self.object = memoryview(bytearray(os.urandom(payload) + bytes(FOOTER_BYTES)))
        seal(self.object, payload, stamp_of_name(NAME))

    def lend(self, block: int, loan: Loan | None = None) -> Any:
        footer = _body(self.object.nbytes - FOOTER_BYTES, stamp_of_name(NAME)) + bytes(8)
        return _inplace.lend_blocks(self.memory.native, loan or Loan(), [block], footer, -1, [])

    def load(self, block: int) -> bool:
        taken: bool = _inplace.take(self.lend(block), 0, self.object)
        return taken


CACHES: dict[str, dict[str, Any]] = {
    "GQA": {"layers": 3, "kv_heads": 2, "head_dim": 32, "block_size": 16},
    "MLA": {"layers": 2, "attention": "mla", "kv_lora_rank": 64, "qk_rope_head_dim": 32, "block_size": 16},
    "large": {"layers": 16, "kv_heads": 4, "head_dim": 128, "block_size": 65},
}


@pytest.mark.parametrize("shape", CACHES)
def test_an_object_is_copied_to_its_block_and_no_other_byte_and_each_damage_is_seen(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_blocks, "PIECE_BYTES", 1024)
    blocks = Blocks(CacheSection(device_blocks=5, **CACHES[shape]))
    before = blocks.bytes.copy()
    assert blocks.load(3)
    parts = [(first + 3 * stride, n) for piece in blocks.memory.pieces for first, stride, n in piece.parts]
    assert b"".join(blocks.bytes[at : at + n].tobytes() for at, n in parts) == bytes(blocks.object[:-FOOTER_BYTES])
    mine = np.zeros(len(before), bool)
    for at, n in parts:
        mine[at : at + n] = True
    assert np.array_equal(blocks.bytes[~mine], before[~mine])
    for position in (0, 1000, blocks.object.nbytes - FOOTER_BYTES - 1):
        blocks.object[position] ^= 1
        assert not blocks.load(2), position
        blocks.object[position] ^= 1
    assert blocks.load(2)
    slot = memoryview(bytearray(blocks.object.nbytes))
    assert _inplace.fill(blocks.lend(2), 0, slot, True)
    assert slot[:-FOOTER_BYTES] == blocks.object[:-FOOTER_BYTES]


def test_a_layout_of_odd_parts_goes_by_the_device() -> None:
    odd: dict[str, Any] = {"layers": 3, "attention": "mla", "kv_lora_rank": 50, "qk_rope_head_dim": 7, "block_size": 3}
    assert Blocks(CacheSection(device_blocks=5, **odd)).memory.native is None


async def test_a_thread_without_a_loan_touches_no_block() -> None:
    blocks, loan = Blocks(CacheSection(device_blocks=5, **CACHES["GQA"])), Loan()
    before = blocks.bytes.copy()
    assert loan.end() is None
    assert not _inplace.take(blocks.lend(1, loan), 0, blocks.object)
    assert np.array_equal(blocks.bytes, before)
    slot = memoryview(bytearray(blocks.object.nbytes))
    assert not _inplace.fill(blocks.lend(1, loan), 0, slot, False)
    assert not any(slot)


def test_a_piece_has_no_more_parts_than_the_extension_takes() -> None:
    assert f"#define MOST_PARTS {cpu_blocks.MOST_PARTS} " in SOURCE.read_text()


@pytest.mark.parametrize("name", ["workers/_inplace", "tiers/_copyruns", "storage/_files"])
def test_an_extension_has_no_thread_local_data(name: str) -> None:
    """The C library allocates it when a thread first uses it, and aborts the process if there is no memory."""
    found = list(Path(cpu_blocks.__file__).parents[1].glob(f"{name}.*.so"))
    if not found:
        pytest.skip("the installation found no compiler")
    for path in found:
        elf = path.read_bytes()
        assert elf[:5] == b"\x7fELF\x02", "64 bits"
        (table,) = struct.unpack_from("<Q", elf, 32)
        size, count = struct.unpack_from("<HH", elf, 54)
        kinds = [struct.unpack_from("<I", elf, table + i * size)[0] for i in range(count)]
        assert 1 in kinds, "PT_LOAD"
        assert 7 not in kinds, "PT_TLS"
