"""The file of orders: what is damaged is useless as a whole, and each order replaces it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from transferd.storage.ledger import MAGIC, Ledger
from transferd.storage.orders import By, Epoch, Fits, Listed, PinRecord, PurgeRecord

PURGE = PurgeRecord("b-8", 5.0, Fits(model="m", names=["ab"]), By(uid=7))
PINS = [PinRecord(9, 60.0, "e", ["ab"], 7), PinRecord(10, 60.0, "e", ["cd"], ended=True)]
LISTED = Listed(Epoch(3, "mark", "family", (2, "before"), 7), [PURGE], {"b-8"}, PINS)


def made(directory: Path, lost: str = "") -> Ledger:
    one = Ledger(str(directory / "orders"), lambda: lost)
    one.read()
    return one


def test_what_was_written_is_read(tmp_path: Path) -> None:
    one = made(tmp_path)
    assert one.listed == Listed()
    for listed in (LISTED, Listed(LISTED.epoch)):
        one.write(listed)
        assert made(tmp_path).listed == one.listed == listed
    (tmp_path / "orders").unlink()  # somebody removes it
    one.write(LISTED)
    assert made(tmp_path).listed == LISTED
    assert [path.name for path in tmp_path.iterdir()] == ["orders"]


def test_a_damaged_or_cut_list_is_useless(tmp_path: Path) -> None:
    one, file = made(tmp_path), tmp_path / "orders"
    one.write(LISTED)
    data = file.read_bytes()
    damaged = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(len(data))]
    for content in (*damaged, *(data[:length] for length in range(len(data)))):
        file.write_bytes(content)
        listed = made(tmp_path).listed
        assert listed.problem
        assert listed == Listed(problem=listed.problem)


@pytest.mark.parametrize("content", [b"", MAGIC, b"x" * 100, MAGIC + bytes(100)])
def test_a_file_that_is_not_a_list_has_a_problem(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "orders").write_bytes(content)
    assert made(tmp_path).listed.problem


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "orders")
    assert "regular" in made(tmp_path).listed.problem
    (tmp_path / "orders").unlink()
    (tmp_path / "orders").symlink_to(tmp_path / "another")
    assert made(tmp_path).listed.problem


def test_nothing_is_written_where_another_store_is(tmp_path: Path) -> None:
    one = made(tmp_path, lost="its lock was replaced")
    with pytest.raises(OSError, match="replaced"):
        one.write(LISTED)
    assert not list(tmp_path.iterdir())
    assert one.behind


def test_a_list_of_millions_of_pinned_objects_is_read(tmp_path: Path) -> None:
    """A damaged list empties its disk."""
    many = Listed(LISTED.epoch, pins=[PinRecord(9, 60.0, "e", ["0" * 32] * 2_000_000)])
    made(tmp_path).write(many)
    assert made(tmp_path).listed == many
