"""ReadLeases gives the bytes of an intact object that is in the page cache, and of nothing else; never waits."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.page_cache import forget, tells_what_it_has
from transferd.adapters.common import read_leases
from transferd.adapters.common.read_leases import ReadLeases, WarmReaders
from transferd.blocks.formats import FOOTER_BYTES, ObjectNamer, seal
from transferd.storage import file_io
from transferd.storage.paths import path_of
from transferd.wire.answers import BlockPlaces, StoreDirectory

PAYLOAD = os.urandom(2 * 262_144 + 64)  # more than the C code reads at a time
LATER = time.monotonic() + 3600


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where objects are."""
    if not file_io.NATIVE:
        pytest.skip("the installation had no compiler")
    if not tells_what_it_has(tmp_path):
        pytest.skip("the file system cannot say what the page cache has")
    return tmp_path


def places(directory: Path) -> BlockPlaces:
    found = directory.stat()
    return BlockPlaces("a model", "fp", "g 1", 0, [StoreDirectory(f"{directory}/", found.st_dev, found.st_ino)], [0])


def stored(directory: Path, payload: bytes = PAYLOAD, key: str = "k", **other: Any) -> Path:
    """An object as the daemon writes it. key, other: what its footer says, if that is not what its name says."""
    said = places(directory)
    namer = ObjectNamer(said.model, said.fingerprint)
    (name,) = namer.names(said.generation, namer.ids(["k"]), said.rank)
    about: dict[str, Any] = {name: getattr(said, name) for name in ("model", "fingerprint", "generation", "rank")}
    about |= other
    footer = ObjectNamer(about["model"], about["fingerprint"])
    (stamp,) = footer.stamps(about["generation"], footer.ids([key]), about["rank"])
    slot = bytearray(payload) + bytes(FOOTER_BYTES)
    seal(memoryview(slot), len(payload), stamp)
    path = directory / path_of(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(slot)
    return path


def read_one(leases: ReadLeases, pieces: Sequence[memoryview]) -> bool:
    (done,) = read_leases.read(leases.orders(["k"], [pieces]))
    return done


def read(directory: Path, nbytes: int = len(PAYLOAD), until: float = LATER) -> bytes | None:
    leases, data = ReadLeases(), bytearray(nbytes)
    leases.take(["k"], places(directory), until)
    return bytes(data) if read_one(leases, [memoryview(data)]) else None


@pytest.mark.parametrize("nbytes", [256, 4096, 70_016, len(PAYLOAD)])
def test_an_intact_object_is_read(nbytes: int, directory: Path) -> None:
    stored(directory, payload=PAYLOAD[:nbytes])
    assert read(directory, nbytes) == PAYLOAD[:nbytes]


@pytest.mark.parametrize("nbytes", [1, 192, 4095, 70_001])
def test_odd_lengths_are_the_daemons(nbytes: int, directory: Path) -> None:
    stored(directory, payload=PAYLOAD[:nbytes])
    assert read(directory, nbytes) is None


@pytest.mark.parametrize("nbytes", [64, 4096, 4160, 262_144 + 64])
def test_the_pieces_of_an_object_are_filled_in_order_and_nothing_beside_them_is_touched(
    nbytes: int, directory: Path
) -> None:
    count = 140 if nbytes < 5000 else 3
    payload = os.urandom(nbytes * count)
    stored(directory, payload)
    leases, memory = ReadLeases(), bytearray(b"\xa5" * (2 * nbytes * count))
    leases.take(["k"], places(directory), LATER)
    pieces = [memoryview(memory)[2 * i * nbytes : (2 * i + 1) * nbytes] for i in reversed(range(count))]
    assert read_one(leases, pieces)
    assert b"".join(pieces) == payload
    gaps = [memory[(2 * i + 1) * nbytes : (2 * i + 2) * nbytes] for i in range(count)]
    assert b"".join(gaps) == b"\xa5" * (nbytes * count)
    assert not read_one(leases, pieces[:-1])


@pytest.mark.parametrize("what", ["key", "model", "fingerprint", "generation", "rank"])
def test_an_object_of_another_identity_is_not_read(what: str, directory: Path) -> None:
    other: dict[str, Any] = {what: 1 if what == "rank" else "other"}
    stored(directory, **other)
    assert read(directory) is None


def _changed(at: int) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[at] ^= 1
        path.write_bytes(content)

    return change


def _link(path: Path) -> None:
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "spoil",
    [
        _changed(0), _changed(len(PAYLOAD) - 1), _changed(len(PAYLOAD) + 20), Path.unlink, _link, _fifo,
        lambda path: os.truncate(path, len(PAYLOAD)), lambda path: path.write_bytes(path.read_bytes() + b"x"),
    ],
    ids=["first byte", "last byte", "footer", "gone", "link", "fifo", "shorter", "longer"],
)  # fmt: skip
def test_what_is_not_the_intact_file_is_not_read(spoil: Callable[[Path], object], directory: Path) -> None:
    spoil(stored(directory))
    assert read(directory) is None


def test_an_object_of_another_length_than_the_memory_is_not_read(directory: Path) -> None:
    stored(directory)
    assert read(directory, len(PAYLOAD) - 1) is None
    assert read(directory, len(PAYLOAD) + 1) is None


def test_nobody_waits_for_what_the_page_cache_lacks(directory: Path) -> None:
    """The kernel begins to read it. A quick disk may be done before it looks again; then the bytes are right."""
    path = stored(directory)
    answers = []
    for _ in range(50):
        forget(path)
        answers.append(read(directory))
    assert set(answers) <= {None, PAYLOAD}
    assert None in answers


def test_a_lease_ends_with_its_time_and_with_its_end(directory: Path) -> None:
    stored(directory)
    assert read(directory, until=time.monotonic()) is None
    leases, data = ReadLeases(), [memoryview(bytearray(len(PAYLOAD)))]
    leases.take(["k"], places(directory), LATER)
    assert leases
    leases.end(["k", "unknown"])
    assert not leases
    assert not read_one(leases, data)
    leases.take(["k"], places(directory), time.monotonic() - 1.0)
    leases.take(["other"], replace(places(directory), where=[None]), LATER)
    assert not leases, "what nobody has read does not pile up"


def test_another_directory_at_the_same_path_and_a_key_that_no_file_has_give_no_lease(directory: Path) -> None:
    stored(directory)
    said, leases = places(directory), ReadLeases()
    leases.take(["k"], replace(said, directories=[StoreDirectory(f"{directory}/", 0, 1)]), LATER)
    leases.take(["k"], replace(said, directories=[StoreDirectory(f"{directory}/absent/", 0, 1)]), LATER)
    leases.take(["k"], replace(said, where=[None]), LATER)
    assert not leases


@pytest.fixture
def readers() -> Iterator[WarmReaders]:
    made = WarmReaders(4, logging.getLogger("of a test"))
    yield made
    made.close()


@pytest.mark.parametrize("count", [0, 1, 7, 100])
def test_each_block_is_read_once_and_each_request_ends_once(count: int, directory: Path, readers: WarmReaders) -> None:
    """The third block is of nobody's lease."""
    payload = PAYLOAD[:4096]
    stored(directory, payload)
    leases = ReadLeases()
    leases.take(["k"], places(directory), LATER)
    keys = ["k" if i != 2 else "other" for i in range(count)]
    ends: list[tuple[int, list[bool]]] = []

    def note(number: int, done: list[bool]) -> None:
        ends.append((number, done))

    memory = [[memoryview(bytearray(4096)) for _ in keys] for _ in range(9)]
    for number, blocks in enumerate(memory):
        readers.begin(leases.orders(keys, [[one] for one in blocks]), partial(note, number))
    readers.close()
    right = [i != 2 for i in range(count)]
    assert sorted(ends) == [(number, right) for number in range(9)]
    assert [[bytes(one) == payload for one in blocks] for blocks in memory] == [right] * 9


def test_readers_read_while_the_interpreter_is_busy(directory: Path, readers: WarmReaders) -> None:
    stored(directory)
    leases, ends, data = ReadLeases(), list[list[bool]](), bytearray(len(PAYLOAD))
    leases.take(["k"], places(directory), LATER)
    orders, interval = leases.orders(["k"], [[memoryview(data)]]), sys.getswitchinterval()
    readers.begin([], ends.append)
    sys.setswitchinterval(600)  # no other thread gets the interpreter from this one
    try:
        readers.begin(orders, ends.append)
        give_up = time.monotonic() + 60
        while data != PAYLOAD:
            assert time.monotonic() < give_up
    finally:
        sys.setswitchinterval(interval)
    readers.close()
    assert ends == [[], [True]]


def test_an_end_that_fails_costs_no_other_one(
    directory: Path, readers: WarmReaders, caplog: pytest.LogCaptureFixture
) -> None:
    stored(directory)
    leases, ends = ReadLeases(), list[list[bool]]()
    leases.take(["k"], places(directory), LATER)

    def fail(done: list[bool]) -> None:
        raise OSError(f"of a test: {done}")

    for end in (fail, ends.append):
        readers.begin(leases.orders(["k"], [[memoryview(bytearray(len(PAYLOAD)))]]), end)
    readers.close()
    assert ends == [[True]]
    assert "of a test: [True]" in caplog.text


def test_without_threads_the_daemon_loads(
    directory: Path, readers: WarmReaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(directory)
    leases, ends = ReadLeases(), list[list[bool]]()
    leases.take(["k"], places(directory), LATER)

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError(f"can't start new thread {thread.name}")

    def begin() -> None:
        readers.begin(leases.orders(["k"], [[memoryview(bytearray(len(PAYLOAD)))]]), ends.append)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        begin()
    assert ends == [[False]]
    begin()
    readers.close()
    assert ends == [[False], [True]]


def test_memory_that_cannot_be_written_and_readers_that_are_closed_end_a_request_at_once(
    directory: Path, readers: WarmReaders
) -> None:
    stored(directory)
    leases, ends = ReadLeases(), list[list[bool]]()
    leases.take(["k"], places(directory), LATER)
    readers.begin(leases.orders(["k"] * 4, [[memoryview(bytes(len(PAYLOAD)))]] * 4), ends.append)
    assert ends == [[False] * 4]
    readers.close()
    readers.close()
    readers.begin(leases.orders(["k"], [[memoryview(bytearray(len(PAYLOAD)))]]), ends.append)
    assert ends == [[False] * 4, [False]]


def test_one_bad_block_of_a_run_costs_itself_alone(directory: Path) -> None:
    leases = ReadLeases()
    memory = [memoryview(bytearray(len(PAYLOAD))) for _ in range(3)]
    leases.take(["k"], places(directory), LATER)
    good = stored(directory)
    (order,) = leases.orders(["k"], [[memory[0]]])
    bad = good.with_name("bad")
    bad.write_bytes(good.read_bytes())
    _changed(0)(bad)
    assert order is not None
    runs = [order, (str(bad), [memory[1]], order[2]), (order[0], [memory[2]], order[2])]
    assert read_leases.read(runs) == [True, False, True]
    assert bytes(memory[0]) == bytes(memory[2]) == PAYLOAD


@pytest.mark.parametrize(
    "order", [("path", [bytearray(256)], b"short"), ("path", [b"read only"], bytes(128)), ("path",)]
)
def test_an_order_that_is_none_is_refused_and_nothing_of_the_run_is_read(order: Any, directory: Path) -> None:
    stored(directory)
    leases, data = ReadLeases(), bytearray(len(PAYLOAD))
    leases.take(["k"], places(directory), LATER)
    with pytest.raises((TypeError, ValueError, BufferError)):
        read_leases.read([*leases.orders(["k"], [[memoryview(data)]]), order])
    assert data == bytes(len(PAYLOAD))
