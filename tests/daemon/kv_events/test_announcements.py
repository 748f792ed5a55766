"""Which claims are made, and when they are withdrawn."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

import pytest

from transferd.blocks.formats import SealedBlocks
from transferd.blocks.keys import block_keys
from transferd.blocks.layout import build_layout
from transferd.config import CacheSection
from transferd.daemon.kv_events.announcements import HASHES_PER_EVENT, Residency
from transferd.tasks import (
    ErrorInfo,
    RankResult,
    ReadStorageTask,
    Status,
    SwapInTask,
    SwapOutTask,
    Task,
    TaskResult,
    WriteStorageTask,
)
from transferd.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, block_hash

BLOCK = 4
RANKS = [RankResult(rank=0, status=Status.OK)]
OBJECTS = SealedBlocks("demo", build_layout(CacheSection()))


class World:
    """A Residency, and what a subscriber that believes every event would think."""

    def __init__(self, **more: Any) -> None:
        self.told = 0
        options: dict[str, Any] = {"block_size": BLOCK, "max_blocks": 1000, "changed": self._changed} | more
        self.residency = Residency(OBJECTS, **options)
        self.events: list[KvEvent] = []
        self.believed: dict[str, set[int]] = {"GPU": set(), "CPU": set(), "STORAGE": set()}

    def _changed(self) -> None:
        self.told += 1

    def end(
        self,
        task: Task,
        status: Status = Status.OK,
        *,
        moved: Sequence[int] | None = None,
        started: bool = True,
        generation: str = "",
        error: ErrorInfo | None = None,
    ) -> list[KvEvent]:
        if moved is None:
            moved = task.gpu_block_ids[: task.blocks] if status is Status.OK else []
        result = TaskResult(
            task_id=task.task_id,
            status=status,
            block_ids=list(moved),
            ranks=RANKS if started else [],
            error=error,
            generation=generation,
        )
        self.residency.task_ended(task, result, "")
        return self.take()

    def take(self) -> list[KvEvent]:
        events = self.residency.drain()
        for event in events:
            if isinstance(event, BlockStored):
                assert not self.believed[event.medium] & set(event.block_hashes), "announced twice"
                self.believed[event.medium] |= set(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                assert set(event.block_hashes) <= self.believed[event.medium], "withdrawn without being announced"
                self.believed[event.medium] -= set(event.block_hashes)
            else:
                for hashes in self.believed.values():
                    hashes.clear()
        self.events += events
        return events


def hashes(keys: Sequence[str]) -> set[int]:
    return {block_hash(key) for key in keys}


def write(keys: list[str], blocks: list[int], **more: Any) -> WriteStorageTask:
    return WriteStorageTask(task_id="w", keys=keys, gpu_block_ids=blocks, **more)


def read(keys: list[str], blocks: list[int], **more: Any) -> ReadStorageTask:
    return ReadStorageTask(task_id="r", keys=keys, gpu_block_ids=blocks, **more)


def swap_out(gpu: list[int], cpu: list[int]) -> SwapOutTask:
    return SwapOutTask(task_id="o", gpu_block_ids=gpu, cpu_block_ids=cpu)


def swap_in(gpu: list[int], cpu: list[int]) -> SwapInTask:
    return SwapInTask(task_id="i", gpu_block_ids=gpu, cpu_block_ids=cpu)


def test_a_write_announces_storage_and_nothing_else() -> None:
    world = World()
    [event] = world.end(write(["a", "b"], [1, 2]))
    assert event == BlockStored([block_hash("a"), block_hash("b")], None, [], 0, None, "STORAGE", None)


def test_token_ids_make_an_event_describe_itself() -> None:
    world = World()
    tokens = list(range(100, 100 + 3 * BLOCK))
    keys = block_keys(tokens, BLOCK)
    [event] = world.end(write(keys, [1, 2, 3], token_ids=tokens))
    assert event == BlockStored([block_hash(key) for key in keys], None, tokens, BLOCK, None, "STORAGE", None)


def test_a_task_that_begins_inside_a_sequence_does_not_pretend_to_begin_at_its_root() -> None:
    world = World()
    tokens = list(range(5 * BLOCK))
    keys = block_keys(tokens, BLOCK)
    first, rest = world.end(write(keys[2:], [1, 2, 3], token_ids=tokens, start_write_block_idx=2))
    assert first == BlockStored([block_hash(keys[2])], None, [], 0, None, "STORAGE", None)
    expected = BlockStored(
        [block_hash(keys[3]), block_hash(keys[4])],
        block_hash(keys[2]),
        tokens[3 * BLOCK :],
        BLOCK,
        None,
        "STORAGE",
        None,
    )
    assert rest == expected


def test_a_partial_last_block_is_announced_without_its_tokens() -> None:
    world = World()
    tokens = list(range(BLOCK + 2))
    keys = block_keys(tokens, BLOCK)
    full, partial = world.end(write(keys, [1, 2], token_ids=tokens))
    assert isinstance(full, BlockStored)
    assert isinstance(partial, BlockStored)
    assert full.token_ids == tokens[:BLOCK]
    assert (partial.parent_block_hash, partial.token_ids, partial.block_size) == (block_hash(keys[0]), [], 0)


def test_token_ids_are_left_out_where_that_is_configured() -> None:
    world = World(token_ids=False)
    tokens = list(range(2 * BLOCK))
    [event] = world.end(write(block_keys(tokens, BLOCK), [1, 2], token_ids=tokens))
    assert isinstance(event, BlockStored)
    assert (event.token_ids, event.block_size) == ([], 0)


def test_a_partial_write_announces_the_blocks_that_every_rank_stored() -> None:
    world = World()
    error = ErrorInfo("storage", "rank 1: full")
    world.end(write(["a", "b", "c", "d"], [5, 6, 7, 8]), Status.PARTIAL, moved=[5, 7, 8], error=error)
    assert world.believed["STORAGE"] == hashes(["a", "c", "d"])
    first, second = world.events
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert second.parent_block_hash == block_hash("b")


def test_a_partial_write_that_names_one_block_twice_announces_nothing() -> None:
    world = World()
    world.end(write(["a", "b"], [5, 5]), Status.PARTIAL, moved=[5], error=ErrorInfo("storage", "full"))
    assert world.events == []
    world.end(write(["a", "b"], [5, 5]))
    assert world.believed["STORAGE"] == hashes(["a", "b"])
    world.end(swap_out([5], [0]))
    assert world.believed["CPU"] == set()


@pytest.mark.parametrize("status", [Status.FAILED, Status.EXPIRED, Status.CANCELLED])
def test_a_write_that_stored_nothing_announces_nothing(status: Status) -> None:
    world = World()
    assert world.end(write(["a"], [1]), status) == []


def test_blocks_that_are_already_stored_are_not_announced_again() -> None:
    world = World()
    world.end(write(["a", "b"], [1, 2]))
    assert world.end(write(["a", "b"], [3, 4])) == []
    [event] = world.end(write(["a", "b", "c"], [3, 4, 5]))
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.parent_block_hash) == ([block_hash("c")], block_hash("b"))


def test_a_block_that_left_before_the_answer_is_not_announced() -> None:
    gone = {OBJECTS.ids(["b"])[0]}
    world = World(holds=lambda digest: digest not in gone, reports_departures=True)
    world.end(write(["a", "b", "c"], [1, 2, 3]))
    assert world.believed["STORAGE"] == hashes(["a", "c"])


def test_a_departure_is_announced_once_for_all_ranks() -> None:
    world = World(reports_departures=True)
    world.end(write(["a", "b"], [1, 2]))
    for _rank in range(3):
        world.residency.object_left(OBJECTS.ids(["a"])[0])
    assert world.take() == [BlockRemoved([block_hash("a")], "STORAGE")]
    world.residency.object_left(OBJECTS.ids(["never announced"])[0])
    assert world.take() == []


def test_a_read_announces_the_device_and_what_it_proves_of_storage() -> None:
    world = World()
    world.end(read(["a", "b"], [1, 2, 9]))
    assert world.believed == {"GPU": hashes(["a", "b"]), "CPU": set(), "STORAGE": hashes(["a", "b"])}


def test_a_read_withdraws_what_its_targets_held_whatever_came_of_it() -> None:
    world = World()
    world.end(read(["a", "b"], [1, 2]))
    world.end(read(["c", "d"], [1, 2]), Status.FAILED, error=ErrorInfo("storage", "gone"))
    assert world.believed["GPU"] == set()
    world.end(read(["a", "b"], [1, 2]))
    world.end(read(["c", "d"], [1, 2]), Status.PARTIAL, moved=[1])
    assert world.believed["GPU"] == hashes(["c"])


def test_a_read_that_misses_withdraws_the_first_key_it_did_not_find() -> None:
    world = World()
    world.end(write(["a", "b", "c"], [1, 2, 3]))
    world.end(read(["a", "b", "c"], [4, 5, 6]), Status.PARTIAL, moved=[4])
    assert world.believed["STORAGE"] == hashes(["a", "c"])


def test_a_sparse_read_announces_what_it_loaded_and_withdraws_every_key_it_did_not_find() -> None:
    world = World(token_ids=True)
    world.end(write(["a", "b", "c", "d"], [1, 2, 3, 4]))
    events = world.end(read(["a", "b", "c", "d"], [5, 6, 7, 8], prefix=False), Status.PARTIAL, moved=[6, 8])
    assert world.believed == {"GPU": hashes(["b", "d"]), "CPU": set(), "STORAGE": hashes(["b", "d"])}
    stored = [event for event in events if isinstance(event, BlockStored)]
    assert [event.parent_block_hash for event in stored] == [None, None], "its keys need not be one sequence"


def test_a_sparse_read_withdraws_what_its_targets_held() -> None:
    world = World()
    world.end(read(["a", "b", "c"], [1, 2, 3]))
    world.end(read(["d", "e", "f"], [1, 2, 3], prefix=False), Status.PARTIAL, moved=[2])
    assert world.believed["GPU"] == hashes(["e"])


def test_a_read_that_failed_says_nothing_about_storage() -> None:
    world = World()
    world.end(write(["a", "b"], [1, 2]))
    world.end(read(["a", "b"], [4, 5]), Status.PARTIAL, moved=[4], error=ErrorInfo("storage", "rank 1: no answer"))
    assert world.believed["STORAGE"] == hashes(["a", "b"])


def test_a_missed_read_withdraws_nothing_if_storage_reports_departures() -> None:
    world = World(reports_departures=True)
    world.end(write(["a"], [1]))
    world.end(read(["a"], [4]), Status.MISS)
    assert world.believed["STORAGE"] == hashes(["a"])


def test_a_swap_moves_what_is_known_of_the_blocks() -> None:
    world = World()
    world.end(write(["a", "b"], [1, 2]))
    world.end(swap_out([1, 2, 3], [10, 11, 12]))
    assert world.believed["CPU"] == hashes(["a", "b"])
    assert world.believed["GPU"] == set()
    world.end(swap_in([7, 8], [10, 11]))
    assert world.believed["GPU"] == hashes(["a", "b"])
    assert world.believed["CPU"] == set()


def test_tokens_travel_with_a_block_through_a_swap() -> None:
    world = World()
    tokens = list(range(2 * BLOCK))
    keys = block_keys(tokens, BLOCK)
    world.end(write(keys, [1, 2], token_ids=tokens))
    [event] = world.end(swap_out([1, 2], [3, 4]))
    assert event == BlockStored([block_hash(key) for key in keys], None, tokens, BLOCK, None, "CPU", None)


def test_a_failed_swap_withdraws_its_targets_and_leaves_its_sources() -> None:
    world = World()
    world.end(write(["a"], [1]))
    world.end(swap_out([1], [10]))
    world.end(read(["b"], [1]))
    failed = ErrorInfo("device", "lost")
    world.end(swap_out([1], [10]), Status.FAILED, error=failed)
    assert world.believed["CPU"] == set()
    assert world.believed["GPU"] == hashes(["b"])


def test_a_block_that_lies_in_two_slots_is_withdrawn_with_the_last_of_them() -> None:
    world = World()
    world.end(read(["a"], [1]))
    world.end(read(["a"], [2]))
    world.end(read(["b"], [1]))
    assert world.believed["GPU"] == hashes(["a", "b"])
    world.end(read(["c"], [2]))
    assert world.believed["GPU"] == hashes(["b", "c"])


def test_a_read_of_what_is_there_already_changes_nothing() -> None:
    world = World()
    world.end(read(["a"], [1]))
    assert world.end(read(["a"], [1])) == []


def test_a_write_of_other_keys_from_a_slot_withdraws_what_was_claimed_of_it() -> None:
    world = World()
    world.end(read(["a", "b"], [1, 2]))
    world.end(write(["a", "x"], [1, 2]))
    assert world.believed["GPU"] == hashes(["a"])


def flush(keys: list[str], exists: bool | None, blocks: list[int] | None = None) -> WriteStorageTask:
    return write(keys, blocks or [], flush_cache_exists=exists)


@pytest.mark.parametrize("exists", [True, None])
def test_a_flush_claims_for_the_device_what_the_engine_says(exists: bool | None) -> None:
    world = World(only_flush=True)
    world.end(flush(["a", "b"], exists, [1, 2]))
    world.end(flush(["c"], exists))
    assert world.believed == {"GPU": hashes(["a", "b", "c"]), "CPU": set(), "STORAGE": set()}
    assert world.end(flush(["a", "c"], exists)) == []


def test_a_flush_withdraws_what_the_engine_says_is_gone_wherever_it_was() -> None:
    world = World(only_flush=True)
    world.end(flush(["a", "b"], True, [1, 2]))
    world.end(flush(["c", "a"], True))
    world.end(swap_out([2], [7]))
    world.end(flush(["a", "b", "c", "never seen"], False))
    assert world.believed == {"GPU": set(), "CPU": set(), "STORAGE": set()}
    assert world.residency.statistics() == {"GPU": 0, "CPU": 0, "STORAGE": 0}


def test_a_flush_that_failed_claims_nothing_but_withdraws() -> None:
    world = World(only_flush=True)
    error = ErrorInfo("storage_error", "rank 0: no index today")
    assert world.end(flush(["a"], True), Status.FAILED, error=error) == []
    world.end(flush(["b"], True, [1]))
    world.end(flush(["b"], False), Status.FAILED, error=error)
    assert world.believed["GPU"] == set()


def test_announcements_without_slots_are_bounded() -> None:
    world = World(only_flush=True, max_blocks=3)
    for key in "abcd":
        world.end(flush([key], True))
    world.end(flush(["b"], True))
    world.end(flush(["e"], True))
    assert world.believed["GPU"] == hashes(["b", "d", "e"])


def test_tokens_name_the_blocks_where_storage_is_token_indexed() -> None:
    tokens = list(range(3 * BLOCK))
    named = block_keys(tokens, BLOCK)
    world = World(keys_of=lambda task: named[: len(task.keys)])
    world.end(write(["engine-0", "engine-1"], [1, 2], token_ids=tokens))
    world.end(read(["engine-0"], [3], token_ids=tokens))
    assert world.believed == {"GPU": hashes(named[:1]), "CPU": set(), "STORAGE": hashes(named[:2])}


def test_another_generation_clears_everything_and_older_results_claim_nothing() -> None:
    world = World()
    world.end(write(["a"], [1]))
    world.end(read(["b"], [2]))
    world.residency.clear()
    assert world.take() == [AllBlocksCleared()]
    for task in (write(["c"], [1]), read(["d"], [2]), swap_out([1], [3]), swap_in([4], [3])):
        assert world.end(task, generation="older") == []
    assert world.end(swap_out([1], [3])) == []
    world.residency.object_left(OBJECTS.ids(["a"])[0])
    assert world.take() == []


def test_lost_memory_is_retracted_and_stored_blocks_stay() -> None:
    world = World()
    world.end(read(["a", "b"], [1, 2]))
    world.end(swap_out([1], [7]))
    world.residency.memory_gone()
    assert world.take() == [BlockRemoved([block_hash("b")], "GPU"), BlockRemoved([block_hash("a")], "CPU")]
    assert world.believed == {"GPU": set(), "CPU": set(), "STORAGE": hashes(["a", "b"])}
    assert world.end(swap_in([1], [7])) == []  # what was in the slot is forgotten, too


def test_a_task_that_never_started_touched_nothing() -> None:
    world = World()
    world.end(read(["a"], [1]))
    error = ErrorInfo("expired", "in the queue")
    assert world.end(read(["b"], [1]), Status.EXPIRED, started=False, error=error) == []


def test_beyond_max_blocks_the_longest_unused_claims_are_withdrawn() -> None:
    world = World(max_blocks=3)
    world.end(write(["a", "b", "c"], [1, 2, 3]))
    world.end(write(["a"], [1]))
    world.end(write(["d"], [4]))
    assert world.believed["STORAGE"] == hashes(["a", "c", "d"])
    assert world.residency.statistics() == {"GPU": 0, "CPU": 0, "STORAGE": 3}


def test_events_are_bounded_in_size() -> None:
    world = World(max_blocks=1, reports_departures=True)
    keys = [f"k{i}" for i in range(HASHES_PER_EVENT + 10)]
    world.residency.task_ended(
        write(keys, list(range(len(keys)))), TaskResult(task_id="w", status=Status.OK, ranks=RANKS), ""
    )
    sizes = [(type(event).__name__, len(event.block_hashes)) for event in world.take()]  # type: ignore[attr-defined]
    full, rest = HASHES_PER_EVENT, 10
    assert sizes == [("BlockStored", full), ("BlockStored", rest), ("BlockRemoved", full), ("BlockRemoved", rest - 1)]


def test_the_sender_is_notified_once_until_it_drains_events() -> None:
    world = World()
    result = TaskResult(task_id="w", status=Status.OK, ranks=RANKS)
    world.residency.task_ended(write(["a"], [1]), result, "")
    world.residency.task_ended(write(["b"], [2]), result, "")
    assert world.told == 1
    world.take()
    world.residency.task_ended(write(["c"], [2]), result, "")
    assert world.told == 2


def test_after_any_history_a_subscriber_has_exactly_the_announced_blocks() -> None:
    """Random histories against a model that keeps whole pools and looks at all of them each time."""
    seed = int(os.environ.get("SEED", "7"))
    print("seed", seed)
    rng = random.Random(seed)
    world = World(max_blocks=10_000)
    pools: dict[str, dict[int, tuple[str, bool]]] = {"GPU": {}, "CPU": {}}
    for _ in range(3000):
        kind = rng.choice(
            ["write", "read", "out", "in", "clear"] if rng.random() < 0.02 else ["write", "read", "out", "in"]
        )
        n = rng.randint(1, 4)
        gpu, cpu = rng.sample(range(8), n), rng.sample(range(8), n)
        keys = rng.sample("abcdefghijkl", n)
        good = rng.random() < 0.8
        status = Status.OK if good else Status.FAILED
        if kind == "clear":
            world.residency.clear()
            world.take()
            pools = {"GPU": {}, "CPU": {}}
        elif kind == "write":
            world.end(write(keys, gpu), status)
            for block, key in zip(gpu, keys, strict=True):
                if pools["GPU"].get(block, ("", False))[0] != key:
                    pools["GPU"][block] = (key, False)
        elif kind == "read":
            world.end(read(keys, gpu), status)
            for block, key in zip(gpu, keys, strict=True):
                pools["GPU"].pop(block, None)
                if good:
                    pools["GPU"][block] = (key, True)
        else:
            source, target = ("GPU", "CPU") if kind == "out" else ("CPU", "GPU")
            ends = (gpu, cpu) if kind == "out" else (cpu, gpu)
            world.end(swap_out(gpu, cpu) if kind == "out" else swap_in(gpu, cpu), status)
            for at, to in zip(*ends, strict=True):
                pools[target].pop(to, None)
                if good and at in pools[source]:
                    pools[target][to] = (pools[source].pop(at)[0], True)
        for medium, pool in pools.items():
            assert world.believed[medium] == hashes([key for key, claimed in pool.values() if claimed])


class Levelled(World):
    """Two levels. there: by digest, which have it."""

    def __init__(self, **more: Any) -> None:
        self.there: dict[str, int] = {}
        super().__init__(levels=["memory", "file"], levels_of=lambda digest: self.there.get(digest, 0), **more)
        self.believed |= {"STORAGE/memory": set(), "STORAGE/file": set()}

    def move(self, key: str, there: int) -> list[KvEvent]:
        (digest,) = OBJECTS.ids([key])
        self.there[digest] = there
        self.residency.object_moved(digest)
        if not there:
            self.residency.object_left(digest)
        return self.take()

    def at(self, key: str) -> set[str]:
        return {medium for medium, held in self.believed.items() if hashes([key]) <= held}


def test_a_block_is_announced_for_each_level_that_has_it() -> None:
    world = Levelled()
    assert world.move("a", 1) == [], "it is not announced before its task has ended"
    world.end(write(["a"], [1]))
    assert world.at("a") == {"STORAGE", "STORAGE/memory"}
    assert len(world.move("a", 3)) == 1
    assert world.at("a") == {"STORAGE", "STORAGE/memory", "STORAGE/file"}
    assert world.move("a", 3) == []
    world.move("a", 2)
    assert world.at("a") == {"STORAGE", "STORAGE/file"}
    assert {
        medium: {block.hash for block in held} for medium, held in world.residency.announced().items()
    } == world.believed
    world.end(write(["a"], [1]))
    world.move("a", 0)
    assert world.at("a") == set()
    world.move("a", 1)
    assert world.at("a") == set(), "another task must prove it"


def test_a_snapshot_of_levels_makes_no_blocks() -> None:
    """There may be millions, and the loop stands still meanwhile."""
    world = Levelled()
    world.move("a", 3)
    world.end(write(["a"], [1]))
    one, two = world.residency.announced(), world.residency.announced()
    for medium in ("STORAGE", "STORAGE/memory", "STORAGE/file"):
        assert one[medium][0] is two[medium][0]
    assert one["STORAGE/memory"][0] is one["STORAGE/file"][0]


def test_a_block_retracted_from_storage_is_retracted_from_its_levels() -> None:
    world = Levelled(max_blocks=1)
    for key in "ab":
        world.move(key, 3)
        world.end(write([key], [1]))
    assert (world.at("a"), world.at("b")) == (set(), {"STORAGE", "STORAGE/memory", "STORAGE/file"})
    world.residency.clear()
    world.take()
    assert not any(world.believed.values())
    assert not any(world.residency.announced().values())
