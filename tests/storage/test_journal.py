"""The order of use in a file: what is written is read back, whatever a kill or somebody else did to the end of it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from transferd.storage import journal
from transferd.storage.found import FoundObjects, UseOrder
from transferd.storage.journal import MAGIC, UseJournal, hash_of
from transferd.storage.queues import RESTORED


def made(path: Path) -> UseJournal:
    made = UseJournal(str(path / "order"), syncs=False)
    made.start(made.read())
    return made


def known(path: Path) -> dict[int, tuple[int, int]]:
    records = UseJournal(str(path / "order"), syncs=False).read()
    return {int(one["name"]): (int(one["use"]), int(one["depth"])) for one in records}


def test_the_last_record_of_an_object_counts_also_over_lives(tmp_path: Path) -> None:
    first = made(tmp_path)
    for name, use, depth in (("a", 1, 0), ("b", 1, 1), ("a", 2, 5)):
        first.note(name, use, depth)
    first.flush()
    second = made(tmp_path)
    second.note("b", 3, 0)
    second.flush()
    assert known(tmp_path) == {hash_of("a"): (2, 5), hash_of("b"): (3, 0)}


def test_a_use_that_was_continued_gives_all_its_objects_to_the_latest(tmp_path: Path) -> None:
    one = made(tmp_path)
    for use in (1, 2, 5):
        one.note(f"n{use}", use, use)
    one.note_continued(1, 2)
    one.note_continued(2, 5)
    one.flush()
    assert known(tmp_path) == {hash_of(f"n{use}"): (5, use) for use in (1, 2, 5)}
    one.rewrite(3)
    assert len(known(tmp_path)) == 3


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_end_costs_its_batch_and_nothing_else(tmp_path: Path, cut: int) -> None:
    one = made(tmp_path)
    for batch in range(3):
        for i in range(2):
            one.note(f"{batch}{i}", batch + 1, i)
        one.flush()
    size = os.path.getsize(tmp_path / "order")
    os.truncate(tmp_path / "order", size - cut)
    assert len(known(tmp_path)) == (4 if cut <= 56 else 2)
    again = made(tmp_path)
    again.note("new", 9, 0)
    again.flush()
    assert known(tmp_path)[hash_of("new")] == (9, 0)


def test_a_flipped_bit_ends_the_reading(tmp_path: Path) -> None:
    one = made(tmp_path)
    for batch in range(3):
        one.note(f"{batch}", batch, 0)
        one.flush()
    content = bytearray((tmp_path / "order").read_bytes())
    content[len(MAGIC) + 16 + 20 + 16] ^= 1  # in the record of the second batch
    (tmp_path / "order").write_bytes(content)
    assert list(known(tmp_path)) == [hash_of("0")]


@pytest.mark.parametrize("content", [b"", b"something else", MAGIC, MAGIC + b"uses" + b"\xff" * 12])
def test_a_file_that_is_not_a_journal_is_replaced(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "order").write_bytes(content)
    one = made(tmp_path)
    one.note("a", 1, 2)
    one.flush()
    assert known(tmp_path) == {hash_of("a"): (1, 2)}


def test_something_else_in_its_place_is_a_problem_that_is_said_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "order").mkdir()
    one = made(tmp_path)
    one.note("a", 1, 2)
    one.flush()
    assert one.problem
    assert len(one.read()) == 0


def test_nothing_is_written_into_another_directory(tmp_path: Path) -> None:
    there = ""
    one = UseJournal(str(tmp_path / "order"), syncs=False, lost=lambda: there)
    one.start(one.read())
    before = (tmp_path / "order").read_bytes()
    there = "its lock was replaced"
    one.note("a", 1, 0)
    one.flush()
    one.rewrite(0)
    assert one.problem == there
    (tmp_path / "order").unlink()
    one.note("a", 2, 0)
    one.flush()
    assert not list(tmp_path.iterdir())
    there = ""
    one.start(one.read())
    assert ((tmp_path / "order").read_bytes(), one.problem) == (before, "")


def test_a_grown_journal_is_rewritten_without_old_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "SLACK", 10)
    one = made(tmp_path)
    for use in range(1, 12):
        one.note(f"n{use}", use, 0)
    one.flush()
    assert one.grown
    one.rewrite(9)
    assert not one.grown
    assert set(known(tmp_path)) == {hash_of(f"n{use}") for use in (9, 10, 11)}


def test_what_is_to_go_first_stays_first_when_the_journal_is_rewritten(tmp_path: Path) -> None:
    one = made(tmp_path)
    one.note("retired", 5, 0)
    one.note_continued(5, RESTORED)
    one.note("live", 6, 0)
    one.flush()
    one.rewrite(6)
    assert known(tmp_path) == {hash_of("retired"): (RESTORED, 0), hash_of("live"): (6, 0)}
    found = FoundObjects()
    for name in ("live", "retired"):
        found.add(name, 1, 0)
    order = UseOrder.of(found, one.read())
    assert [each.name for each in order.adopted(0, 2)] == ["retired", "live"]


def test_a_journal_that_cannot_be_read_is_not_written_anew_without_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SLACK", 0)
    one = made(tmp_path)
    one.note("a", 1, 2)
    one.flush()
    assert one.grown

    def no_descriptor(path: str, flags: int, mode: int = 0, real: object = os.open) -> int:
        if not flags & os.O_WRONLY:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        return real(path, flags, mode)  # type: ignore[operator, no-any-return]

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", no_descriptor)
        one.rewrite(0)
    assert one.problem == os.strerror(errno.EMFILE)
    assert not one.grown, "it is not tried again at once"
    one.note("b", 3, 0)
    one.flush()
    assert known(tmp_path) == {hash_of("a"): (1, 2), hash_of("b"): (3, 0)}
    one.rewrite(2)
    assert (one.problem, known(tmp_path)) == ("", {hash_of("b"): (3, 0)})


def test_what_waits_while_the_disk_hangs_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look-up of a block is a use: a disk that hung for an hour took the daemon's memory."""
    monkeypatch.setattr(journal, "MOST_WAITING", 100)
    one, hangs, answers = made(tmp_path), threading.Event(), threading.Event()
    append = one._append

    def hang(noted: Sequence[tuple[str | int, int, int]]) -> None:
        hangs.set()
        answers.wait(10.0)
        append(noted)

    one.note("first", 1, 0)
    with monkeypatch.context() as ill:
        ill.setattr(one, "_append", hang)
        thread = threading.Thread(target=one.flush)
        thread.start()
        assert hangs.wait(10.0)
        for use in range(2, 1000):
            one.note(f"n{use}", use, 0)
            assert len(one._noted) <= 100
        assert one.problem
        answers.set()
        thread.join()
    one.flush()
    assert not one.problem
    uses = {use for use, _ in known(tmp_path).values()}
    assert {1, *range(950, 1000)} <= uses, "the latest count"


def test_a_journal_that_somebody_removes_begins_again(tmp_path: Path) -> None:
    one = made(tmp_path)
    for name in ("a", "b"):
        one.note(name, 1, 2)
        one.flush()
        (tmp_path / "order").unlink()
    for use in (3, 4):
        one.note("c", use, 0)
        one.flush()
    assert known(tmp_path) == {hash_of("c"): (4, 0)}
    (tmp_path / "order").unlink()
    one.rewrite(0)
    assert (one.problem, known(tmp_path)) == ("", {})
