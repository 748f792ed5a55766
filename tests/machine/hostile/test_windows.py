"""Windows of engines in processes of their own over one arena: whose it is, and what remains when one is killed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.machine.hostile.test_memory import ALICE, BLOCKS, BOB, PAGE, World, made_world

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")

SMALL, LARGE = (5000, 4096), (2 * PAGE, 4096)  # size and stride


@pytest.fixture
def world() -> Iterator[World]:
    with made_world({"backend": "memory"}) as world:
        yield world


def test_only_its_owner_has_windows_over_memory(world: World) -> None:
    """A name that everybody may write to, of one user; another user's windows must not even be compared with it."""
    name = world.name()
    alice, bob = world.engine(ALICE, "alice", SMALL), world.engine(BOB, "bob", LARGE)
    alice.make(name)
    os.chmod(f"/dev/shm/{name}", 0o666)
    alice.paint(name, 1)
    before = alice.digest(name)
    said = f"not_yours: the memory of '{name}' belongs to the user {ALICE}, and the client that offers it runs as {BOB}"
    assert bob.offer(name, False, 0, True) == said, "before its owner has offered it"
    assert alice.offer(name) == "ok"
    assert bob.offer(name, False, 0, True) == said, "and afterwards"
    assert alice.write("k", [0, 5])[0] == "ok"
    assert alice.digest(name) == before
    assert world.alive


def test_memory_that_was_given_to_another_user_is_not_shared_with_him(world: World) -> None:
    """The file says at each offer whose it is. Who had it before keeps the windows, and shares them with nobody."""
    name = world.name()
    alice, bob = world.engine(ALICE, "alice", SMALL), world.engine(BOB, "bob", LARGE)
    alice.make(name)
    assert alice.offer(name) == "ok"
    os.chown(f"/dev/shm/{name}", BOB, BOB)
    answer = bob.offer(name, False, 0, True)
    assert answer.startswith("already_attached: the memory offered for rank 0 overlaps that of rank 0"), answer
    assert alice.write("k", [0])[0] == "ok"


def test_two_processes_of_one_user_share_windows_and_one_outlives_the_other(world: World) -> None:
    name = world.name()
    one, other = world.engine(ALICE, "one", LARGE), world.engine(ALICE, "other", SMALL)
    one.make(name)
    one.paint(name, 1)
    assert one.offer(name, True) == "ok"
    assert other.offer(name) == "ok"
    assert one.write("k", [0])[0] == "ok"
    assert other.write("k", [1])[0] == "ok"
    one.paint(name, 2)
    assert other.read("k", [300])[0] == "ok"
    touched = one.colours(name, 300)
    assert touched == [1], "4096 bytes of the window that was loaded"
    assert one.colours(name, 299) == [2]
    assert one.colours(name, 301) == [1, 2], "5000 bytes in all"
    with open(f"/dev/shm/{name}", "rb") as arena:
        content = bytearray(arena.read())
    assert content.count(1) == 5000
    one.end()  # kill -9
    assert other.read("k", [400])[0] == "ok"
    assert other.write("more", [400])[0] == "ok"
    content[400 * 4096 : 400 * 4096 + 5000] = bytes([1]) * 5000
    with open(f"/dev/shm/{name}", "rb") as arena:
        assert arena.read() == content
    again = world.engine(ALICE, "again", (PAGE, 8192))  # another size over the memory that the dead one had
    assert again.offer(name) == "ok"
    assert again.write("k", [3])[0] == "ok"
    assert len(content) == BLOCKS * PAGE


def test_an_arena_that_is_truncated_costs_its_engines_their_tasks_and_nobody_else(world: World) -> None:
    name, apart = world.name(), world.name()
    one, other = world.engine(ALICE, "one", LARGE), world.engine(ALICE, "other", SMALL)
    third = world.engine(BOB, "third")
    third.make(apart)
    one.make(name)
    assert [one.offer(name), other.offer(name), third.offer(apart)] == ["ok"] * 3
    assert [engine.write("k", [0])[0] for engine in (one, other, third)] == ["ok"] * 3
    one.truncate(name, 0)
    for engine in (other, one):
        status, count, code, _ = engine.read("k", [2])
        assert (status, count, code) == ("failed", 0, "device_lost")
    assert third.read("k", [1])[0] == "ok"
    one.make(name)
    assert [one.offer(name), other.offer(name)] == ["ok"] * 2
    assert [engine.read("k", [2])[0] for engine in (one, other)] == ["ok"] * 2
    assert world.alive
