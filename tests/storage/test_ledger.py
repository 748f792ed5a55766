"""The file of orders: what is torn is cut, what is damaged is useless, what is removed is written again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from transferd.storage.ledger import MAGIC, Ledger
from transferd.storage.orders import Epoch, Fits, OrderRecord

EPOCH = Epoch(3, "mark", "family", (2, "before"), 7)
ORDERS = [
    OrderRecord("b-8", "purge", 5.0, fits=Fits(model="m")),
    OrderRecord("b-8", "applied"),
    OrderRecord("b-9", "pin", names=["ab"]),
]


def made(directory: Path, lost: str = "") -> Ledger:
    one = Ledger(str(directory / "orders"), lambda: lost)
    one.read()
    return one


def test_what_was_written_is_read(tmp_path: Path) -> None:
    one = made(tmp_path)
    assert (one.listed.head, one.listed.problem) == (None, "")
    one.write(EPOCH, 1.0, ORDERS[:1])
    one.append(ORDERS[1:])
    again = made(tmp_path)
    assert again.listed == one.listed
    assert again.store == one.store == one.store_there()
    assert again.listed.head is not None
    assert Epoch.of(again.listed.head) == EPOCH
    assert (again.listed.applied, again.listed.orders) == ({"b-8"}, [ORDERS[0], ORDERS[2]])
    assert again.nbytes == (tmp_path / "orders").stat().st_size


def test_a_torn_end_is_cut_wherever_it_was_torn(tmp_path: Path) -> None:
    one, file = made(tmp_path), tmp_path / "orders"
    one.write(EPOCH, 1.0, ORDERS[:1])
    whole = file.read_bytes()
    one.append(ORDERS[2:])
    data = file.read_bytes()
    for length in range(len(whole), len(data)):
        for end in (data[:length], data[:length] + bytes(len(data) - length)):  # cut, or its bytes never came
            file.write_bytes(end)
            again = made(tmp_path)
            assert again.listed.orders == ORDERS[:1], length
            again.append(ORDERS[1:2])
            assert made(tmp_path).listed.applied == {"b-8"}
            assert made(tmp_path).listed.orders == ORDERS[:1]


def test_a_damaged_record_before_the_end_makes_it_useless(tmp_path: Path) -> None:
    one, file = made(tmp_path), tmp_path / "orders"
    one.write(EPOCH, 1.0, ORDERS)
    data = file.read_bytes()
    for at in (0, len(MAGIC), len(MAGIC) + 20, data.index(b'"purge"')):
        damaged = bytearray(data)
        damaged[at] ^= 1
        file.write_bytes(damaged)
        again = made(tmp_path)
        assert again.listed.problem
        assert not again.listed.orders


@pytest.mark.parametrize("content", [b"", MAGIC, b"x" * 100, MAGIC + b"ordr" + bytes(100)])
def test_a_file_that_is_not_a_list_has_a_problem(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "orders").write_bytes(content)
    assert made(tmp_path).listed.problem


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "orders")
    assert "regular" in made(tmp_path).listed.problem
    (tmp_path / "orders").unlink()
    (tmp_path / "orders").symlink_to(tmp_path / "another")
    assert made(tmp_path).listed.problem


@pytest.mark.parametrize("how", ["removed", "cut"])
def test_a_list_that_somebody_removes_is_written_again(how: str, tmp_path: Path) -> None:
    one, file = made(tmp_path), tmp_path / "orders"
    one.write(EPOCH, 1.0, ORDERS[:1])
    file.unlink() if how == "removed" else file.write_bytes(b"")
    one.append(ORDERS[1:])
    assert made(tmp_path).listed == one.listed


def test_nothing_is_written_where_another_store_is(tmp_path: Path) -> None:
    one = made(tmp_path, lost="its lock was replaced")
    with pytest.raises(OSError, match="replaced"):
        one.write(EPOCH, 1.0, ORDERS)
    with pytest.raises(OSError, match="replaced"):
        one.append(ORDERS)
    assert not list(tmp_path.iterdir())
    assert one.behind
