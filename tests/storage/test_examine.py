"""One stored file against its own name: what is damaged, what is gone, and what nobody can tell."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.storage.harness import put_stranger
from tests.storage.sealed_files import flip, name, sealed
from tests.support.descriptors import open_below
from transferd.blocks.formats import FOOTER_BYTES, Damage
from transferd.storage.examine import PIECE_BYTES, Examination


@pytest.fixture
def buffer() -> memoryview:
    return memoryview(bytearray(PIECE_BYTES))


def test_an_object_that_was_replaced_while_it_was_read_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "object"
    path.write_bytes(sealed(1, 3 * PIECE_BYTES))
    flip(path, 3 * PIECE_BYTES - 5)
    examination = Examination(name(1), str(path))
    for step, nbytes in enumerate(examination.pieces(memoryview(bytearray(PIECE_BYTES)))):
        assert nbytes <= PIECE_BYTES
        if step == 1:
            other = tmp_path / "other"
            other.write_bytes(sealed(1, 3 * PIECE_BYTES))
            other.rename(path)
    assert step == 3
    assert examination.gone
    assert examination.damage is None


def test_a_file_that_held_another_object_during_an_examination_is_left_alone(tmp_path: Path) -> None:
    """A full store writes over its files: this one held another object for a while, and came back."""
    path, good = tmp_path / "object", sealed(1, 3 * PIECE_BYTES)
    path.write_bytes(good)
    os.utime(path, ns=(0, 0))  # so that a coarse clock sees what follows, too
    examination = Examination(name(1), str(path))
    for step, _ in enumerate(examination.pieces(memoryview(bytearray(PIECE_BYTES)))):
        with path.open("r+b") as file:  # the same inode
            file.write(sealed(2, 3 * PIECE_BYTES) if step == 1 else good)
    assert step == 3
    assert (examination.damage, examination.gone) == (None, True)


@pytest.mark.parametrize("payload_bytes", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1])
def test_every_piece_of_an_object_is_read(tmp_path: Path, payload_bytes: int) -> None:
    path = tmp_path / "object"
    path.write_bytes(sealed(1, payload_bytes))
    buffer = memoryview(bytearray(PIECE_BYTES))
    whole = Examination(name(1), str(path))
    assert sum(whole.pieces(buffer)) == payload_bytes + FOOTER_BYTES
    assert whole.damage is None
    if payload_bytes:
        flip(path, payload_bytes - 1)
        damaged = Examination(name(1), str(path))
        assert list(damaged.pieces(buffer))
        assert damaged.damage is Damage.CHECKSUM


def examined(path: Path, buffer: memoryview, of: str = name(1)) -> Examination:
    examination = Examination(of, str(path))
    for _ in examination.pieces(buffer):
        pass
    return examination


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        ("longer", Damage.MAGIC),
        ("shorter", Damage.MAGIC),
        ("a piece is missing", Damage.LENGTH),
        ("shorter than a footer", Damage.MAGIC),
        ("empty", Damage.MAGIC),
        ("footer", Damage.FOOTER),
        ("payload", Damage.CHECKSUM),
        ("of another block", Damage.KEY),
    ],
)
def test_each_damage_is_named(tmp_path: Path, buffer: memoryview, damage: str, found: Damage) -> None:
    path = tmp_path / "object"
    content = sealed(1)
    path.write_bytes(
        {
            "longer": content + b"x",
            "shorter": content[:-1],
            "a piece is missing": content[1:],
            "shorter than a footer": content[: FOOTER_BYTES - 1],
            "empty": b"",
            "footer": content[:-1] + bytes([content[-1] ^ 1]),
            "payload": bytes([content[0] ^ 1]) + content[1:],
            "of another block": sealed(2),
        }[damage]
    )
    examination = examined(path, buffer)
    assert (examination.damage, examination.gone, examination.unsealed) == (found, False, False)


def test_an_intact_object_is_none_of_it(tmp_path: Path, buffer: memoryview) -> None:
    path = tmp_path / "object"
    path.write_bytes(sealed(1))
    examination = examined(path, buffer)
    assert (examination.damage, examination.gone, examination.unsealed) == (None, False, False)
    assert examination.nbytes == len(sealed(1))


def test_an_absent_file_is_gone_and_a_foreign_name_is_unsealed(tmp_path: Path, buffer: memoryview) -> None:
    assert examined(tmp_path / "nothing", buffer).gone
    path = tmp_path / "object"
    path.write_bytes(sealed(1))
    foreign = examined(path, buffer, "someone/elses/object")
    assert (foreign.unsealed, foreign.damage, foreign.gone) == (True, None, False)


@pytest.mark.parametrize("stranger", ["fifo", "directory", "link", "socket"])
def test_what_is_no_file_is_not_read_and_nothing_waits_for_it(
    tmp_path: Path, buffer: memoryview, monkeypatch: pytest.MonkeyPatch, stranger: str
) -> None:
    """It has come since the directory was listed. A link or a socket does not even open."""
    monkeypatch.chdir(tmp_path)  # a socket's name may not be long
    path, kept = tmp_path / "object", tmp_path / "kept"
    kept.write_bytes(sealed(1))
    if stranger == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    else:
        put_stranger(path, stranger, kept)
    if stranger in ("link", "socket"):
        with pytest.raises(OSError, match=r"symbolic links|No such device"):
            examined(path, buffer)
    else:
        assert examined(path, buffer).damage is Damage.UNREADABLE
    assert buffer.tobytes().strip(b"\0") == b""


def test_a_file_that_is_cut_off_while_it_is_read_is_gone_not_damaged(tmp_path: Path, buffer: memoryview) -> None:
    """Somebody has touched it: what it holds now is another examination's."""
    path = tmp_path / "object"
    path.write_bytes(sealed(1, 3 * PIECE_BYTES))
    examination = Examination(name(1), str(path), keep_out=True)
    for step, _ in enumerate(examination.pieces(buffer)):
        if step == 1:
            os.truncate(path, PIECE_BYTES)
    assert (examination.damage, examination.gone) == (None, True)


def test_an_examination_that_is_given_up_keeps_no_descriptor(tmp_path: Path, buffer: memoryview) -> None:
    path = tmp_path / "object"
    path.write_bytes(sealed(1, 3 * PIECE_BYTES))
    pieces = Examination(name(1), str(path)).pieces(buffer)
    assert next(pieces) == FOOTER_BYTES
    assert open_below(tmp_path) == [str(path)]
    pieces.close()  # type: ignore[attr-defined]
    assert open_below(tmp_path) == []
