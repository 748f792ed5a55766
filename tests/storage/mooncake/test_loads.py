"""Loads by holder, over a simulated pool: one node's silence is an answer for its objects only."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import msgspec
import pytest

from tests.storage.harness import Harness, Open, pool_storage
from tests.support.blobs import get
from tests.support.simulation.pool import SIM_MASTER, SimPool
from tests.support.waits import until
from transferd.config import MooncakeStorageSection
from transferd.errors import StorageError, StorageUnavailable
from transferd.runtime.clock import Clock
from transferd.storage.base import FOUND, MISSING, Blob, Found, Outcomes
from transferd.storage.mooncake import MooncakeStorage, error_codes, native_calls, peers
from transferd.storage.mooncake.connections import Address
from transferd.storage.mooncake.layout_records import SLOTS
from transferd.storage.mooncake.native_calls import CallKind
from transferd.storage.mooncake.store import PROBE_KEY

NODE, OTHER = "10.0.0.2:15000", "10.0.0.3:15000"
OBJECTS = {"ours": "", "a": NODE, "b": NODE, "c": OTHER}


@pytest.fixture
def silent() -> set[str]:
    return set()


@pytest.fixture
def pool() -> SimPool:
    pool = SimPool()
    pool.objects.update({key: key.encode() for key in OBJECTS})
    pool.placed = {key: [holder] for key, holder in OBJECTS.items()}
    return pool


@pytest.fixture
async def harness(open_storage: Open, pool: SimPool, silent: set[str]) -> Harness:
    async def ask(endpoint: str, _: float) -> frozenset[Address]:
        if endpoint in silent:
            raise StorageUnavailable("no answer")
        return frozenset({(endpoint.rpartition(":")[0], 15000)})

    section = MooncakeStorageSection(master_server_addr=SIM_MASTER)
    opened: Harness = await open_storage(pool_storage(section, clock=Clock(), set_up=pool.set_up, asker=ask))
    pool.calls.clear()
    return opened


def gets(pool: SimPool) -> list[list[str]]:
    return sorted(sorted(keys) for operation, keys in pool.calls if operation == "get")


async def test_objects_of_one_node_and_our_own_are_one_call(harness: Harness, pool: SimPool) -> None:
    answers = await harness.get(("ours", 4), ("a", 1), ("b", 1), ("absent", 1))
    assert answers[:3] == [(FOUND, b"ours"), (FOUND, b"a"), (FOUND, b"b")]
    assert answers[3][0] is MISSING
    assert gets(pool) == [["a", "absent", "b", "ours"]]


async def test_objects_of_several_nodes_are_a_call_for_each_node(harness: Harness, pool: SimPool) -> None:
    answers = await harness.get(("c", 1), ("a", 1), ("ours", 4), ("b", 1))
    assert answers == [(FOUND, b"c"), (FOUND, b"a"), (FOUND, b"ours"), (FOUND, b"b")]
    assert gets(pool) == [["a", "b"], ["c"], ["ours"]]


async def test_a_node_that_hangs_holds_up_its_own_objects_only(harness: Harness, pool: SimPool) -> None:
    release = threading.Event()

    def before(operation: str, keys: Sequence[str]) -> None:
        assert operation != "get" or "a" not in keys or release.wait(30)

    pool.before = before
    hanging = asyncio.ensure_future(harness.get(("c", 1), ("a", 1)))
    assert await harness.get(("c", 1), ("ours", 4)) == [(FOUND, b"c"), (FOUND, b"ours")]
    assert not hanging.done()
    release.set()
    assert await hanging == [(FOUND, b"c"), (FOUND, b"a")]


async def test_a_node_that_is_slow_leaves_threads_for_the_others(
    harness: Harness, pool: SimPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_calls, "PATIENCE_S", 0.001)
    release = threading.Event()

    def before(operation: str, keys: Sequence[str]) -> None:
        assert operation != "get" or "a" not in keys or release.wait(30)

    pool.before = before
    slow = [asyncio.ensure_future(harness.get(("a", 1))) for _ in range(CallKind.LOAD.threads)]
    await until(lambda: len([keys for operation, keys in pool.calls if operation == "holders"]) == len(slow))
    assert await harness.get(("ours", 4)) == [(FOUND, b"ours")]
    assert await harness.get(("c", 1), ("ours", 4)) == [(FOUND, b"c"), (FOUND, b"ours")]
    await until(lambda: len(gets(pool)) == 3 + 2)
    release.set()
    assert await asyncio.gather(*slow) == [[(FOUND, b"a")]] * len(slow)
    assert len(gets(pool)) == len(slow) + 2


async def test_a_node_that_nothing_waits_for_costs_nothing(harness: Harness, pool: SimPool) -> None:
    """A node has another port in each of its lives."""
    await asyncio.gather(*(harness.get((key, 1), ("c", 1)) for key in "ab"))
    storage = harness.storage
    assert isinstance(storage, MooncakeStorage)
    assert storage._loads._by_peer == {}


async def test_a_call_that_nothing_ends_is_answered_for_its_silent_node_and_keeps_its_buffers(
    harness: Harness, pool: SimPool, silent: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SUSPECT_S", "CUT_S", "LEAVE_S"):
        monkeypatch.setattr(peers, name, 0.005)
    release = threading.Event()

    def before(operation: str, _: Sequence[str]) -> None:
        assert operation != "get" or release.wait(30)

    pool.before = before
    silent.add(NODE)
    buffer = harness.buffer(1, b"?")
    outcomes = await get(harness.storage, [Blob("a", buffer)])
    assert [str(outcome.error) for outcome in outcomes] == [peers.unreachable(NODE, "no answer")]
    assert isinstance(outcomes, Outcomes)
    assert not outcomes.returned.done()
    release.set()
    await outcomes.returned
    assert bytes(buffer) == b"a"


async def test_an_error_of_the_library_costs_the_objects_of_its_call_only(harness: Harness, pool: SimPool) -> None:
    def before(operation: str, keys: Sequence[str]) -> None:
        if (operation, list(keys)) in (("get", ["a"]), ("lengths", ["b"])):
            raise StorageError(f"{operation} of {keys[0]}")

    pool.before = before
    pool.objects["b"] = b"long"
    (a, _), c = await harness.get(("a", 1), ("c", 1))
    assert (a.found, str(a.error), c) == (Found.FAILED, "get of a", (FOUND, b"c"))
    (b, _), c = await harness.get(("b", 1), ("c", 1))
    assert (b.found, str(b.error), c) == (Found.FAILED, "lengths of b", (FOUND, b"c"))


async def test_a_failed_transfer_names_its_node_and_its_key(harness: Harness, pool: SimPool) -> None:
    pool.answer("get", error_codes.TRANSFER_FAIL)
    ((outcome, _),) = await harness.get(("a", 1))
    assert outcome.found is Found.FAILED
    assert str(outcome.error) == f"Mooncake could not load a from the node {NODE} (TRANSFER_FAIL, -800)"


async def test_objects_of_a_node_that_is_down_fail_at_once_and_no_others(
    harness: Harness, pool: SimPool, silent: set[str]
) -> None:
    nodes = harness.storage._peers  # type: ignore[attr-defined]
    silent.add(NODE)
    nodes.met({NODE})
    await nodes._doubt(nodes._known[NODE])
    assert NODE in nodes.down
    (a, _), c = await harness.get(("a", 1), ("c", 1))
    assert a.error is not None
    assert (a.error.reason, NODE in str(a.error)) == ("storage_unavailable", True)
    assert c == (FOUND, b"c")
    assert gets(pool) == [["c"]]


async def test_a_layout_record_of_a_node_that_hangs_costs_no_other_object(harness: Harness, pool: SimPool) -> None:
    storage = harness.storage
    assert isinstance(storage, MooncakeStorage)
    assert storage._layouts is not None
    [record] = pool.objects.keys() - OBJECTS.keys()
    pool.placed[record] = [NODE]
    storage._section = msgspec.structs.replace(storage._section, timeout=0.05)
    release = threading.Event()

    def before(operation: str, keys: Sequence[str]) -> None:
        assert operation != "get" or record not in keys or release.wait(30)

    pool.before = before
    looking = asyncio.ensure_future(storage._layouts.look())
    await until(lambda: len(storage._calls), look=0)
    # What asks the master, and other loads, may take as long as this machine needs.
    storage._section = msgspec.structs.replace(storage._section, timeout=60.0)
    await until(lambda: ("exists", [PROBE_KEY]) in pool.calls or storage._breaker.opened, "it is overdue")
    assert storage._breaker.opened == 0
    assert await harness.get(("c", 1), ("ours", 4)) == [(FOUND, b"c"), (FOUND, b"ours")]
    assert not looking.done()
    release.set()
    await looking


async def test_a_layout_record_of_a_node_that_is_down_is_not_waited_for_and_its_slot_is_not_free(
    harness: Harness, pool: SimPool, silent: set[str]
) -> None:
    storage = harness.storage
    assert isinstance(storage, MooncakeStorage)
    assert storage._layouts is not None
    [record] = pool.objects.keys() - OBJECTS.keys()
    pool.placed[record] = [NODE]
    silent.add(NODE)
    storage._peers.met({NODE})
    await storage._peers._doubt(storage._peers._known[NODE])
    assert NODE in storage._peers.down
    free = await storage._layouts._read(range(SLOTS))
    assert free == list(range(1, SLOTS))
    assert [record in keys for keys in gets(pool)] == [False]
