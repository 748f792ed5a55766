"""The file that keeps pins over a restart: what is over, gone, too much or unreadable is left out."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.simulation.loop import simulate
from transferd.storage.lru import LruIndex, Use
from transferd.storage.pin_file import PinFile
from transferd.storage.pins import KeptPin, Pins
from transferd.storage.queues import EngineOwner

A, B = EngineOwner("a", 1), EngineOwner("b")
PINS = [KeptPin("m/f/1/aa/0", A, 50.0), KeptPin("m/f/1/bb/0", A, 50.0), KeptPin("m/f/1/aa/0", B, 5.0)]


def made(directory: Path, lost: str = "") -> PinFile:
    return PinFile(str(directory / "pins"), lambda: lost)


def test_pins_last_until_their_time(tmp_path: Path) -> None:
    one = made(tmp_path)
    assert one.read(1000.0) == []
    one.write([*PINS, KeptPin("m/f/1/aa/0", "nobody that an engine could be", 50.0)], 1000.0)
    assert sorted(made(tmp_path).read(1001.0)) == sorted(pin._replace(left_s=pin.left_s - 1.0) for pin in PINS)
    assert {pin.owner for pin in one.read(1010.0)} == {A}
    assert one.read(1050.0) == []
    one.write([], 1000.0)
    assert one.read(1000.0) == []


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"version": 2, "pins": []}', b'{"version": 1, "pins": [{"engine": 1}]}', b"\xff\xff"]
)
def test_a_file_that_is_not_a_pin_file_has_no_pins_and_is_replaced(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "pins").write_bytes(content)
    one = made(tmp_path)
    assert one.read(0.0) == []
    one.write(PINS, 0.0)
    assert len(one.read(0.0)) == 3


def test_a_path_that_no_object_has_is_left_out(tmp_path: Path) -> None:
    one = made(tmp_path)
    one.write(PINS, 0.0)
    file = tmp_path / "pins"
    file.write_bytes(file.read_bytes().replace(b"m/f/1/bb/bb@0", b"../../bb/bb@0"))
    assert {pin.name for pin in one.read(0.0)} == {"m/f/1/aa/0"}


def test_nothing_is_written_where_another_store_is_or_the_disk_fails(tmp_path: Path) -> None:
    made(tmp_path, lost="its lock was replaced").write(PINS, 0.0)
    assert not list(tmp_path.iterdir())
    (tmp_path / "pins").mkdir()
    made(tmp_path).write(PINS, 0.0)
    assert [path.name for path in tmp_path.iterdir()] == ["pins"]
    assert made(tmp_path).read(0.0) == []


def test_restored_pins_name_present_objects_and_take_at_most_half_of_the_store() -> None:
    async def story(_: object) -> None:
        index, use = LruIndex(100), Use(owner=A)
        for depth in range(8):
            index.reserve(f"n{depth}", 10, use, depth)
            index.commit(f"n{depth}")
        pins = Pins(index)
        pins.restore([KeptPin("gone", A, 5.0), *(KeptPin(f"n{depth}", A, 5.0) for depth in range(8))])
        assert len(pins) == 5
        pins.restore([KeptPin("n0", B, 9.0)])  # it is pinned already
        assert (len(pins), len(list(pins.kept()))) == (5, 6)
        await asyncio.sleep(6.0)
        assert [(pin.name, pin.owner) for pin in pins.kept()] == [("n0", B)]
        pins.close()

    simulate(story, 1)
