"""The C extension that copies blocks: XXH3's checksum, and the bytes of blocks and objects."""

from __future__ import annotations

import importlib.util
import os
import random
import struct
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cuda.shim import compiler
from transferd.blocks.formats import FOOTER_BYTES, Inspection, seal, stamp_of_name
from transferd.blocks.layout import build_layout
from transferd.blocks.layout.base import Arena
from transferd.config import CacheSection
from transferd.workers import cpu_blocks
from transferd.workers.cpu_blocks import BlockMemory, Loan

SOURCE = Path(cpu_blocks.__file__).with_name("_inplace.c")
NAME = f"m/f/g/{'ab' * 20}/0"


@pytest.fixture(scope="module", params=["as installed", "without AVX2"])
def native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if request.param == "as installed":
        return pytest.importorskip("transferd.workers._inplace", reason="the installation found no compiler")
    return compiled(tmp_path_factory.mktemp("native"), "-DWITHOUT_AVX2")


def compiled(directory: Path, *flags: str) -> ModuleType:
    """The extension, built with these flags as well."""
    gcc = compiler()
    if gcc is None:
        pytest.skip("this machine has no C compiler")
    built = directory / "_inplace.so"
    usual = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}"]
    command = [gcc, *usual, *flags, str(SOURCE), "-o", str(built)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return loaded(built)


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("_inplace", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cut(draw: random.Random, total: int, most: int) -> list[int]:
    """`total` as a sum of at most `most` positive numbers."""
    marks = sorted(draw.sample(range(1, total), min(most, total) - 1))
    return [b - a for a, b in zip([0, *marks], [*marks, total], strict=True)]


def some_ends(draw: random.Random, stripes: int) -> tuple[int, ...]:
    """Of up to 7 parts of a payload, and its own, in bytes."""
    inner = draw.sample(range(4, stripes), min(draw.randrange(8), max(0, stripes - 4)))
    return (*(64 * end for end in sorted(inner)), 64 * stripes)


@settings(max_examples=60, deadline=None)
@given(stripes=st.integers(4, 300), pieces=st.integers(1, 4), parts=st.integers(1, 9), seed=st.integers(0, 2**32))
def test_scattered_payloads_arrive_whole_with_the_checksum_of_xxhash(
    native: Any, stripes: int, pieces: int, parts: int, seed: int
) -> None:
    draw = random.Random(seed)
    payload = draw.randbytes(64 * stripes)
    memory, wanted = np.zeros(2 * len(payload) + 64, np.uint8), np.zeros(2 * len(payload) + 64, np.uint8)
    block, stride = draw.randrange(2), 64 * stripes
    ends = some_ends(draw, stripes)
    state, offset = native.new_state(ends), 0
    for piece in cut(draw, stripes, pieces):
        sizes = [64 * count for count in cut(draw, piece, parts)]
        starts = list(np.cumsum([offset, *sizes[:-1]]))
        table = np.array([(at, stride, size) for at, size in zip(starts, sizes, strict=True)], np.int64)
        order = draw.sample(range(len(sizes)), len(sizes))  # the parts lie in memory in another order
        at = offset
        for row in order:
            table[row][0], at = at, at + sizes[row]
        for (first, _, size), start in zip(table.tolist(), starts, strict=True):
            begin = first + stride * block
            wanted[begin : begin + size] = np.frombuffer(payload[start : start + size], np.uint8)
        assert native.copy_memory(memoryview(payload), offset, memory.ctypes.data, table, block, state) == 64 * piece
        offset += 64 * piece
        reached = [end for end in ends if end <= offset]
        assert native.checksums(state) == tuple(xxhash.xxh3_64_intdigest(payload[:end]) for end in reached)
    assert len(native.checksums(state)) == len(ends)
    assert np.array_equal(memory, wanted)


@settings(max_examples=60, deadline=None)
@given(stripes=st.integers(4, 300), pieces=st.integers(1, 4), parts=st.integers(1, 9), seed=st.integers(0, 2**32))
def test_parts_are_collected_in_order_with_the_checksum_of_xxhash(
    native: Any, stripes: int, pieces: int, parts: int, seed: int
) -> None:
    draw = random.Random(seed)
    nbytes, block, skew = 64 * stripes, draw.randrange(3), draw.choice([0, 1, 32])
    memory = np.frombuffer(draw.randbytes(3 * nbytes), np.uint8)
    target = bytearray(b"\x07" * (nbytes + 64 + skew))
    ends = some_ends(draw, stripes)
    state, offset, wanted = native.new_state(ends), 0, b""
    for piece in cut(draw, stripes, pieces):
        sizes = [64 * count for count in cut(draw, piece, parts)]
        table = np.array([(draw.randrange(nbytes - size + 1), nbytes, size) for size in sizes], np.int64)
        native.collect(memoryview(target)[skew:], offset, memory.ctypes.data, table, block, state, draw.random() < 0.5)
        wanted += b"".join(memory[at + nbytes * block :][:size].tobytes() for at, _, size in table.tolist())
        offset += 64 * piece
    assert native.checksums(state) == tuple(xxhash.xxh3_64_intdigest(wanted[:end]) for end in ends)
    assert bytes(target) == b"\x07" * skew + wanted + b"\x07" * 64


def test_a_piece_is_not_collected_into_less_room(native: Any) -> None:
    memory, table, target = np.ones(512, np.uint8), np.array([[0, 0, 512]], np.int64), bytearray(600)
    with pytest.raises(ValueError, match="does not fit"):
        native.collect(target, 128, memory.ctypes.data, table, 0, native.new_state((512,)), False)
    with pytest.raises((TypeError, BufferError)):
        native.collect(bytes(600), 0, memory.ctypes.data, table, 0, native.new_state((512,)), True)
    assert not any(target)


@pytest.mark.parametrize("nbytes", [256, 320, 1024, 1088, 2048, 64 * 1023, 64 * 1024, 64 * 1025])
def test_lengths_beside_the_borders_of_the_format(native: Any, nbytes: int) -> None:
    payload = random.Random(nbytes).randbytes(nbytes)
    memory, state = np.zeros(nbytes, np.uint8), native.new_state((nbytes,))
    native.copy_memory(memoryview(payload), 0, memory.ctypes.data, np.array([[0, 0, nbytes]], np.int64), 0, state)
    assert native.checksums(state) == (xxhash.xxh3_64_intdigest(payload),)
    assert memory.tobytes() == payload


def test_a_copy_beyond_the_payload_reads_nothing_and_has_no_checksum(native: Any) -> None:
    payload, table = bytes(500), np.array([[0, 0, 512]], np.int64)
    memory = np.zeros(512, np.uint8)
    state = native.new_state((512,))
    assert native.copy_memory(memoryview(payload), 0, memory.ctypes.data, table, 0, state) < 512
    assert native.checksums(state) == ()


@pytest.mark.parametrize(
    "rows", [[[0, 0, 100]], [[0, 0, 0]], [[0, 0, -64]], [[0, 0, 576]], [[0, 0, 64]] * 1025, [[0, 0]]]
)
def test_parts_that_are_wrong_touch_nothing(native: Any, rows: list[list[int]]) -> None:
    memory, source = np.zeros(1024, np.uint8), memoryview(b"\x01" * 1024)
    with pytest.raises(ValueError, match="parts of a piece are wrong"):
        native.copy_memory(source, 0, memory.ctypes.data, np.array(rows, np.int64), 0, native.new_state((512,)))
    with pytest.raises(ValueError, match="parts of a piece are wrong"):
        native.copy_memory(
            source, 0, memory.ctypes.data, np.array([[0, 0, 0, 0, 64, 0]], np.int32), 0, native.new_state((512,))
        )
    assert not memory.any()


def test_payloads_of_another_kind_are_refused(native: Any) -> None:
    for ends in (
        (0,),
        (64,),
        (192,),
        (300,),
        (1000,),
        (),
        (512, 512),
        (512, 256),
        (64, 512),
        tuple(range(256, 832, 64)),
    ):
        with pytest.raises(ValueError, match="multiples of 64"):
            native.new_state(ends)
    with pytest.raises(OverflowError):
        native.new_state((-64,))
    with pytest.raises(ValueError, match="the state"):
        native.copy_memory(memoryview(bytes(64)), 0, 0, np.array([[0, 0, 64]], np.int64), 0, bytearray(8))


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

    def load(self, block: int) -> bool:
        loan = Loan()
        inspection = Inspection(stamp_of_name(NAME), self.object.nbytes)
        assert inspection.footer(bytes(self.object[-FOOTER_BYTES:])) is None
        checksum = self.memory.scatter(self.object, block, loan)
        assert not loan._holders
        return checksum is not None and inspection.damage(checksum) is None


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
    assert blocks.memory.collect(2, slot, Loan(), near=True) is not None
    assert slot[:-FOOTER_BYTES] == blocks.object[:-FOOTER_BYTES]


def test_a_layout_of_odd_parts_goes_by_the_device() -> None:
    odd: dict[str, Any] = {"layers": 3, "attention": "mla", "kv_lora_rank": 50, "qk_rope_head_dim": 7, "block_size": 3}
    assert Blocks(CacheSection(device_blocks=5, **odd)).memory.tables is None


def test_a_thread_without_a_loan_touches_no_block() -> None:
    blocks, loan = Blocks(CacheSection(device_blocks=5, **CACHES["GQA"])), Loan()
    before = blocks.bytes.copy()
    assert loan.end() is None
    assert blocks.memory.scatter(blocks.object, 1, loan) is None
    assert np.array_equal(blocks.bytes, before)
    slot = memoryview(bytearray(blocks.object.nbytes))
    assert blocks.memory.collect(1, slot, loan, near=False) is None
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
