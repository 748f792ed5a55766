"""The scheduler's half of TransferdConnector, without vLLM: a pool, requests and a link that answer as told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from transferd.adapters.vllm.link import StorageTask
from transferd.adapters.vllm.scheduling import Scheduling
from transferd.tasks import ErrorInfo, ReadStorageTask, Status, TaskResult, WriteStorageTask

TOKENS = 4  # of a block


class FakeLink:
    """Answers a look-up, or a task, when the test says so."""

    def __init__(self) -> None:
        self.ready = True
        self.asked: list[tuple[list[str], Callable[[list[bool]], None]]] = []
        self.tasks: list[tuple[StorageTask, Callable[[TaskResult], None]]] = []

    def ask(self, keys: Sequence[str], answer: Callable[[list[bool]], None]) -> None:
        self.asked.append((list(keys), answer))

    def submit(self, task: StorageTask, done: Callable[[TaskResult], None]) -> None:
        self.tasks.append((task, done))

    def answer(self, there: set[str]) -> None:
        keys, answer = self.asked.pop(0)
        answer([key in there for key in keys])

    def end(self, blocks: Sequence[int] | None = None) -> StorageTask:
        """End the oldest task; blocks: those that moved, all if None."""
        task, done = self.tasks.pop(0)
        moved = list(task.gpu_block_ids if blocks is None else blocks)
        whole = len(moved) == len(task.keys)
        status = Status.OK if whole else Status.PARTIAL if moved else Status.FAILED
        error = None if whole else ErrorInfo("storage_error", "told so")
        done(TaskResult(task_id=task.task_id, status=status, block_ids=moved, error=error, bytes=100 * len(moved)))
        return task


@dataclass
class Block:
    block_id: int
    references: int = 0
    is_null: bool = False


class FakePool:
    def __init__(self, blocks: int) -> None:
        self.blocks = [Block(i) for i in range(blocks)]
        self.blocks[0].is_null = True

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.references += 1

    def free_blocks(self, ordered_blocks: Sequence[Block]) -> None:
        for block in ordered_blocks:
            block.references -= 1
            assert block.references >= 0

    @property
    def pinned(self) -> set[int]:
        return {block.block_id for block in self.blocks if block.references}


@dataclass
class Request:
    request_id: str
    num_tokens: int
    block_hashes: list[bytes] = field(default_factory=list)
    lora_request: Any = None

    def __post_init__(self) -> None:
        self.block_hashes = self.block_hashes or [f"hash {i}".encode() for i in range(self.num_tokens // TOKENS)]

    @property
    def keys(self) -> list[str]:
        return [block_hash.hex() for block_hash in self.block_hashes]


class World:
    def __init__(self, blocks: int = 400, adapters: Any = None) -> None:
        self.link, self.pool = FakeLink(), FakePool(blocks)
        self.ids: dict[str, list[int]] = {}
        made = lambda request, i: (request.request_id, i)  # noqa: E731
        self.it = Scheduling(self.link, tokens=TOKENS, timeout=5.0, prefix="t", event=made, adapters=adapters)  # type: ignore[arg-type]
        self.it.bind(SimpleNamespace(block_pool=self.pool, get_block_ids=lambda request_id: (self.ids[request_id],)))

    def step(self, new: dict[str, int] | None = None, cached: dict[str, int] | None = None, scheduled: int = 0) -> Any:
        """One step of vLLM: requests by name with what was computed before; `scheduled` tokens for each."""
        new, cached = new or {}, cached or {}
        return self.it.stepped(
            SimpleNamespace(
                scheduled_new_reqs=[SimpleNamespace(req_id=r, num_computed_tokens=n) for r, n in new.items()],
                scheduled_cached_reqs=SimpleNamespace(req_ids=list(cached), num_computed_tokens=list(cached.values())),
                num_scheduled_tokens=dict.fromkeys([*new, *cached], scheduled),
            )
        )

    def load(self, request: Request, there: set[str], computed: int = 0) -> int:
        """Look up and allocate; the number of blocks that are to be loaded."""
        assert self.it.matched(request, computed) == (None, False)
        self.link.answer(there)
        tokens, later = self.it.matched(request, computed)
        assert tokens is not None
        assert later == (tokens > 0)
        self.ids[request.request_id] = list(range(10, 10 + request.num_tokens // TOKENS + 1))
        self.it.allocated(request, self.ids[request.request_id], tokens)
        return tokens // TOKENS


def test_a_lookup_never_waits_and_asks_once() -> None:
    world, request = World(), Request("a", 21)
    for _ in range(5):
        assert world.it.matched(request, 0) == (None, False)
    assert len(world.link.asked) == 1
    world.link.answer(set(request.keys[:3]) | {request.keys[4]})
    assert world.it.matched(request, 0) == (12, True)
    assert world.it.matched(request, 8) == (4, True)
    assert world.it.matched(request, 12) == (0, False)
    assert not world.link.asked


def test_the_last_token_is_always_computed() -> None:
    world, request = World(), Request("a", 16)
    assert world.load(request, set(request.keys)) == 3


def test_without_a_daemon_nothing_is_asked() -> None:
    world, request = World(), Request("a", 21)
    world.link.ready = False
    assert world.it.matched(request, 0) == (0, False)
    world.ids["a"] = list(range(10, 16))
    world.step(new={"a": 0}, scheduled=20)
    assert not world.it.busy
    assert not world.link.asked


def test_a_load_starts_when_every_rank_has_passed_its_step() -> None:
    world, request = World(), Request("a", 21)
    world.step()
    assert world.load(request, set(request.keys)) == 5
    news = world.step()
    assert news.step == 2
    world.it.ready(1)
    assert not world.link.tasks
    assert world.it.busy
    world.it.ready(2)
    task = world.link.end()
    assert isinstance(task, ReadStorageTask)
    assert not task.prefix
    assert (task.keys, task.gpu_block_ids) == (request.keys[:5], [10, 11, 12, 13, 14])
    assert world.step().loaded == {"a"}
    assert not world.it.busy
    assert not world.step().loaded


def test_only_what_did_not_come_is_bad_and_it_is_never_asked_for_again() -> None:
    world, request = World(), Request("a", 21)
    world.load(request, set(request.keys))
    world.step()
    world.it.ready(1)
    world.link.end([10, 11, 13])
    news = world.step()
    assert (news.loaded, news.bad_blocks) == ({"a"}, {12, 14})
    assert world.it.matched(request, 0) == (8, True)
    assert world.it.matched(request, 8) == (0, False)
    assert world.it.counts["blocks_not_loaded"] == 2


def test_failing_loads_end() -> None:
    """However often vLLM asks again, each failure takes something away."""
    world, request = World(), Request("a", 81)
    rounds = 0
    count = world.load(request, set(request.keys))
    while count:
        rounds += 1
        news = world.step()
        world.it.ready(news.step)
        world.link.end([10])  # the first block comes, no other
        world.step()
        tokens, _ = world.it.matched(request, 0)
        assert tokens is not None
        count = tokens // TOKENS - 1
        if count > 0:
            world.it.allocated(request, world.ids["a"], tokens)
    assert rounds == 1


def test_a_save_starts_late_and_keeps_its_blocks_until_it_has_ended() -> None:
    world, request = World(), Request("a", 17)
    world.it.matched(request, 0)
    world.link.answer(set())
    world.ids["a"] = [20, 21, 22, 23, 24]
    world.step(new={"a": 0}, scheduled=13)
    assert world.pool.pinned == {20, 21, 22}
    world.it.finished("a")
    world.it.ready(0)
    assert not world.link.tasks
    world.it.ready(1)
    assert world.pool.pinned == {20, 21, 22}
    task = world.link.end()
    assert isinstance(task, WriteStorageTask)
    assert (task.keys, task.gpu_block_ids) == (request.keys[:3], [20, 21, 22])
    world.it.collect()
    assert not world.pool.pinned
    assert not world.it.busy
    assert list(world.it.take_events()) == [("a", 0), ("a", 1), ("a", 2)]
    assert not world.it.take_events()


def test_a_block_is_saved_once_and_only_once_it_is_full() -> None:
    world, request = World(), Request("a", 40)
    world.it.matched(request, 0)
    world.link.answer(set())
    world.ids["a"] = list(range(20, 30))
    world.step(new={"a": 8}, scheduled=6)  # blocks 0 and 1 were there; 2 is full now, 3 is not
    world.step(cached={"a": 14}, scheduled=1)
    world.step(cached={"a": 15}, scheduled=1)
    world.it.ready(3)
    assert [task.gpu_block_ids for task, _ in world.link.tasks] == [[22], [23]]


def test_two_requests_with_one_prefix_save_it_once() -> None:
    world = World()
    for name, first in (("a", 20), ("b", 30)):
        world.it.matched(Request(name, 17), 0)
        world.ids[name] = list(range(first, first + 5))
    world.step(new={"a": 0, "b": 0}, scheduled=16)
    world.it.ready(1)
    assert [task.gpu_block_ids for task, _ in world.link.tasks] == [[20, 21, 22, 23]]


def test_tokens_that_nobody_has_confirmed_are_not_saved() -> None:
    """A step may compute guesses of a draft model; only what has a hash is known."""
    world, request = World(), Request("a", 9)
    world.it.matched(request, 0)
    world.ids["a"] = list(range(20, 30))
    world.step(new={"a": 0}, scheduled=16)
    world.it.ready(1)
    assert [task.gpu_block_ids for task, _ in world.link.tasks] == [[20, 21]]


def test_saves_leave_most_of_the_pool_alone() -> None:
    world, request = World(blocks=40), Request("a", 121)
    world.it.matched(request, 0)
    world.ids["a"] = list(range(1, 32))
    world.step(new={"a": 0}, scheduled=120)
    assert len(world.pool.pinned) == 10
    world.it.ready(1)
    world.link.end()
    world.step(cached={"a": 120}, scheduled=1)
    assert world.pool.pinned == set(range(11, 21)), "the next ones, once the first ones have ended"
    world.it.finished("a")
    assert world.it.counts["blocks_not_saved"] == 10
    world.it.release()
    assert not world.pool.pinned


def test_an_aborted_load_is_told_all_the_same() -> None:
    """vLLM keeps the blocks of an aborted request until it hears that nothing is written there any more."""
    world, request = World(), Request("a", 21)
    world.load(request, set(request.keys))
    world.step()
    world.it.finished("a")
    world.it.ready(1)
    assert world.it.busy
    world.link.end([])
    assert world.step().loaded == {"a"}


@pytest.mark.parametrize("computed", [0, 4])
def test_a_load_goes_behind_what_vllm_has(computed: int) -> None:
    world, request = World(), Request("a", 21)
    world.load(request, set(request.keys), computed)
    world.it.ready(world.step().step)
    task = world.link.end()
    first = computed // TOKENS
    assert task.keys == request.keys[first:5]
    assert task.gpu_block_ids == list(range(10 + first, 15))


class Salts:
    """Adapters by path; None: must not be shared."""

    def __init__(self, **salts: str | None) -> None:
        self.salts = salts

    def salt(self, path: str) -> str | None:
        return self.salts[path]


def test_blocks_of_an_adapter_have_keys_of_their_own() -> None:
    world = World(adapters=Salts(a="one"))
    request = Request("r", 10, lora_request=SimpleNamespace(lora_path="a"))
    world.ids["r"] = [5, 6, 7]
    assert world.it.matched(request, 0) == (None, False)
    assert world.link.asked[0][0] == [f"{key}+one" for key in request.keys[:2]]
    world.link.answer({f"{request.keys[0]}+one"})
    assert world.it.matched(request, 0) == (TOKENS, True)
    world.it.allocated(request, world.ids["r"], TOKENS)
    world.it.ready(world.step({"r": 4}, scheduled=4).step)
    assert [task.keys for task, _ in world.link.tasks] == [[f"{request.keys[0]}+one"], [f"{request.keys[1]}+one"]]


def test_blocks_of_an_adapter_that_changed_are_neither_loaded_nor_saved() -> None:
    world = World(adapters=Salts(a=None))
    request = Request("r", 10, lora_request=SimpleNamespace(lora_path="a"))
    world.ids["r"] = [5, 6, 7]
    assert world.it.matched(request, 0) == (0, False)
    world.it.ready(world.step({"r": 0}, scheduled=8).step)
    assert not world.link.asked
    assert not world.link.tasks
    world.it.finished("r")
    assert not world.it.busy
