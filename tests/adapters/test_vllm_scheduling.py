"""The scheduler's half of TransferdConnector, without vLLM: a pool, requests and a link that answer as told."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from transferd.adapters.common.link import StorageTask
from transferd.adapters.vllm import scheduling
from transferd.adapters.vllm.groups import KvGroup, KvGroups
from transferd.adapters.vllm.scheduling import Scheduling
from transferd.tasks import ErrorInfo, ReadStorageTask, Status, TaskResult, WriteStorageTask

TOKENS = 4  # of a block


class FakeLink:
    """Answers a look-up, or a task, when the test says so."""

    def __init__(self) -> None:
        self.ready = True
        self.asked: list[tuple[list[str], Callable[[list[bool] | None], None]]] = []
        self.tasks: list[tuple[StorageTask, Callable[[TaskResult], None]]] = []
        self.cancelled: list[str] = []
        self.not_stored: Counter[str] = Counter()

    def count_not_stored(self, reason: str, blocks: int) -> None:
        self.not_stored[reason] += blocks

    def ask(
        self, keys: Sequence[str], answer: Callable[[list[bool] | None], None] = lambda _: None, *, use: bool = True
    ) -> None:
        self.asked.append((list(keys), answer))
        self.used = use

    def submit(
        self,
        task: StorageTask,
        done: Callable[[TaskResult], None],
        progressed: Callable[[int], object] | None = None,
    ) -> None:
        self.tasks.append((task, done))

    def cancel(self, task_ids: Sequence[str]) -> None:
        self.cancelled += task_ids
        for name in task_ids:
            (found,) = [task for task in self.tasks if task[0].task_id == name]
            self.tasks.remove(found)
            found[1](TaskResult(task_id=name, status=Status.CANCELLED, error=ErrorInfo("cancelled", "told so")))

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

    def reset_prefix_cache(self) -> bool:
        return not self.pinned

    @property
    def pinned(self) -> set[int]:
        return {block.block_id for block in self.blocks if block.references}


@dataclass
class Request:
    request_id: str
    num_tokens: int
    block_hashes: list[bytes] = field(default_factory=list)
    lora_request: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    num_prompt_tokens: int = 0
    shared_prefix_boundary: int = 0
    all_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or self.num_tokens
        self.all_token_ids = self.all_token_ids or range(self.num_tokens)
        self.block_hashes = self.block_hashes or [f"hash {i}".encode() for i in range(self.num_tokens // TOKENS)]

    @property
    def keys(self) -> list[str]:
        return [block_hash.hex() for block_hash in self.block_hashes]


class Forms:
    """Events as tuples."""

    def name(self, request: Any, group: int, i: int) -> tuple[str, int]:
        return request.block_hashes[i].decode(), group

    def stored(self, request: Any, group: int, i: int) -> Any:
        return ("stored", *self.name(request, group, i))

    def removed(self, names: Sequence[Any]) -> list[Any]:
        return [("removed", *name) for name in names]


class World:
    def __init__(self, blocks: int = 400, **more: Any) -> None:
        self.link, self.pool = FakeLink(), FakePool(blocks)
        self.ids: dict[str, list[int]] = {}
        self.groups = more.pop("groups", (KvGroup(TOKENS),))
        model = KvGroups(self.groups, more.pop("unit", TOKENS), TOKENS, more.pop("every", None))
        self.it = Scheduling(self.link, model=model, timeout=5.0, prefix="t", events=Forms(), **more)  # type: ignore[arg-type]
        self.it.bind(SimpleNamespace(block_pool=self.pool, get_block_ids=self.blocks_of))

    def blocks_of(self, request_id: str) -> tuple[list[int], ...]:
        """For each group; a second one has blocks 100 behind those of the first."""
        return tuple([block and block + 100 * i for block in self.ids[request_id]] for i in range(len(self.groups)))

    def step(
        self,
        new: dict[str, int] | None = None,
        cached: dict[str, int] | None = None,
        scheduled: int = 0,
        preempted: Sequence[str] = (),
    ) -> Any:
        """One step of vLLM: requests by name with what was computed before; `scheduled` tokens for each."""
        new, cached = new or {}, cached or {}
        return self.it.stepped(
            SimpleNamespace(
                scheduled_new_reqs=[SimpleNamespace(req_id=r, num_computed_tokens=n) for r, n in new.items()],
                scheduled_cached_reqs=SimpleNamespace(req_ids=list(cached), num_computed_tokens=list(cached.values())),
                num_scheduled_tokens=dict.fromkeys([*new, *cached], scheduled),
                preempted_req_ids=set(preempted),
                kv_connector_block_state=None,
            )
        )

    def asks(self, request: Request, there: set[str] | None = None) -> int | None:
        """Look up, have the daemon answer, and say how many blocks can be loaded."""
        self.it.matched(request, 0)
        self.link.answer(there or set())
        tokens, _ = self.it.matched(request, 0)
        return None if tokens is None else tokens // TOKENS

    def load(self, request: Request, there: set[str], computed: int = 0) -> int:
        """Look up and allocate; the number of blocks that are to be loaded."""
        assert self.it.matched(request, computed) == (None, False)
        self.link.answer(there)
        tokens, later = self.it.matched(request, computed)
        assert tokens is not None
        assert later == (tokens > 0)
        self.ids[request.request_id] = list(range(10, 10 + request.num_tokens // TOKENS + 1))
        self.it.allocated(request, self.blocks_of(request.request_id), tokens)
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


def test_without_a_daemon_no_look_up_is_sent() -> None:
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


def test_only_missing_blocks_are_bad_and_they_are_never_looked_up_again() -> None:
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
            world.it.allocated(request, world.blocks_of("a"), tokens)
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
    assert list(world.it.take_events()) == [("stored", f"hash {i}", 0) for i in (0, 1, 2)]
    assert not world.it.take_events()


def test_a_block_is_saved_once_and_only_once_it_is_full() -> None:
    world, request = World(), Request("a", 40)
    world.it.matched(request, 0)
    world.link.answer(set(request.keys[:2]))
    world.ids["a"] = list(range(20, 30))
    world.step(new={"a": 8}, scheduled=6)  # blocks 0 and 1 are stored; 2 is full now, 3 is not
    world.step(cached={"a": 14}, scheduled=1)
    world.step(cached={"a": 15}, scheduled=1)
    world.it.ready(3)
    saves = [task for task, _ in world.link.tasks if isinstance(task, WriteStorageTask)]
    assert [(task.gpu_block_ids, task.start_write_block_idx) for task in saves] == [([22], 2), ([23], 3)]
    assert [task.chains for task in saves] == [[(0, 2, request.keys[1])], [(0, 3, request.keys[2])]]


def test_a_save_says_where_its_chain_begins_unless_it_has_several() -> None:
    world, chains = World(), {"a": Request("a", 40, [b"a%d" % i for i in range(10)]), "b": Request("b", 40)}
    for first, (name, request) in zip((20, 60), chains.items(), strict=True):
        world.asks(request)
        world.ids[name] = list(range(first, first + 10))
    world.step(new={"a": 0}, scheduled=12)
    world.step(cached={"a": 12, "b": 0}, scheduled=8)
    world.step(cached={"a": 20}, scheduled=4)
    world.it.ready(3)
    saves = [task for task, _ in world.link.tasks if isinstance(task, WriteStorageTask)]
    assert [(len(task.keys), task.start_write_block_idx) for task in saves] == [(3, 0), (4, 0), (1, 5)]
    a, b = chains["a"].keys, chains["b"].keys
    assert [task.keys for task in saves] == [a[:3], [*a[3:5], *b[:2]], [a[5]]]
    assert [task.chains for task in saves] == [[(0, 0, "")], [(0, 3, a[2]), (2, 0, "")], [(0, 5, a[4])]]


def test_a_look_up_of_several_groups_goes_from_the_root() -> None:
    world, request = World(groups=(KvGroup(TOKENS), KvGroup(TOKENS))), Request("a", 17)
    world.it.matched(request, 0)
    keys = world.link.asked[0][0]
    blocks = [next(i for i, one in enumerate(request.keys) if one in key) for key in keys]
    assert blocks == [0, 0, 1, 1, 2, 2, 3, 3]


def test_two_requests_with_one_prefix_save_it_once() -> None:
    world = World()
    for name, first in (("a", 20), ("b", 30)):
        world.asks(Request(name, 17))
        world.ids[name] = list(range(first, first + 5))
    world.step(new={"a": 0, "b": 0}, scheduled=16)
    world.it.ready(1)
    assert [task.gpu_block_ids for task, _ in world.link.tasks] == [[20, 21, 22, 23]]


def test_tokens_that_nobody_has_confirmed_are_not_saved() -> None:
    """A step may compute guesses of a draft model; only what has a hash is known."""
    world, request = World(), Request("a", 9)
    world.asks(request)
    world.ids["a"] = list(range(20, 30))
    world.step(new={"a": 0}, scheduled=16)
    world.it.ready(1)
    assert [task.gpu_block_ids for task, _ in world.link.tasks] == [[20, 21]]


def test_saves_leave_most_of_the_pool_alone() -> None:
    world, request = World(blocks=40), Request("a", 121)
    world.asks(request)
    world.ids["a"] = list(range(1, 32))
    world.step(new={"a": 0}, scheduled=120)
    assert len(world.pool.pinned) == 10
    world.it.ready(1)
    world.link.end()
    world.step(cached={"a": 120}, scheduled=1)
    assert world.pool.pinned == set(range(11, 21)), "the next ones, once the first ones have ended"
    world.it.finished("a")
    assert world.it.counts["blocks_not_saved/no_room"] == world.link.not_stored["no_room"] == 10
    world.it.release()
    assert not world.pool.pinned


def test_an_aborted_load_is_still_reported() -> None:
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
    world.it.allocated(request, world.blocks_of("r"), TOKENS)
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


# --- what is not in storage is saved again --------------------------------------------------------


def save_all(world: World, request: Request, there: set[str], computed: int) -> list[list[int]]:
    """Find `there` and compute the rest of a request of which vLLM has `computed` tokens; the blocks of each save."""
    if world.it.matched(request, computed) == (None, False) or world.link.asked:
        world.link.answer(there)
        world.it.matched(request, computed)
    world.ids[request.request_id] = list(range(20, 20 + request.num_tokens // TOKENS + 1))
    news = world.step(new={request.request_id: computed}, scheduled=request.num_tokens - computed)
    world.it.ready(news.step)
    return [list(task.gpu_block_ids) for task, _ in world.link.tasks]


def test_holes_are_filled_from_what_the_gpu_still_has() -> None:
    """vLLM has five blocks from the turn before, of which the daemon lost one and never got another."""
    world, request = World(), Request("a", 29)
    there = {request.keys[i] for i in (0, 2, 3)}
    assert save_all(world, request, there, computed=20) == [[21, 24, 25, 26]]


def test_a_prompt_that_vllm_has_completely_is_repaired_too() -> None:
    world, request = World(), Request("a", 13)
    assert save_all(world, request, {request.keys[0]}, computed=12) == [[21, 22]]


def test_computed_blocks_are_saved_before_the_daemon_answers_and_the_rest_after() -> None:
    """A request of one step could not wait."""
    world, request = World(), Request("a", 17)
    world.it.matched(request, 16)
    world.it.finished("a")
    request = Request("b", 16)
    world.it.matched(request, 12)
    world.ids["b"] = [20, 21, 22, 23, 24]
    world.it.ready(world.step(new={"b": 12}, scheduled=4).step)
    assert world.link.end().gpu_block_ids == [23]
    for _ in range(2):
        world.link.answer({request.keys[1]})
    world.it.ready(world.step(cached={"b": 16}, scheduled=1).step)
    assert world.link.end().gpu_block_ids == [20, 22]
    world.it.finished("b")
    assert not world.it.counts["blocks_not_saved/no_room"]


class Answering(list[Block]):
    """A pool's blocks; the first look at one lets the daemon's answer arrive, which comes in another thread."""

    answer: Callable[[], None]

    def __getitem__(self, i: Any) -> Any:
        if answer := self.__dict__.pop("answer", None):
            answer()
        return super().__getitem__(i)


def test_an_answer_in_the_middle_of_a_step_hides_no_block() -> None:
    world, request = World(), Request("a", 20)
    world.it.matched(request, 16)
    world.ids["a"] = [20, 21, 22, 23, 24]
    blocks = Answering(world.pool.blocks)
    blocks.answer = lambda: world.link.answer(set())
    world.pool.blocks = blocks
    world.it.ready(world.step(new={"a": 16}, scheduled=4).step)
    world.it.ready(world.step(cached={"a": 20}, scheduled=1).step)
    assert [task.gpu_block_ids for task, _ in world.link.tasks] == [[24], [20, 21, 22, 23]]


def test_a_running_request_is_not_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world, request = World(), Request("a", 40)
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    assert world.asks(request) == 0
    world.ids["a"] = list(range(20, 31))
    for computed in (0, 20):
        now[0] += 10
        world.it.ready(world.step(cached={"a": computed}, scheduled=20).step)
    assert not world.link.asked
    assert [task.gpu_block_ids for task, _ in world.link.tasks] == [[20, 21, 22, 23, 24], [25, 26, 27, 28, 29]]


def test_a_turn_while_the_daemon_is_down_is_saved_by_the_next_one() -> None:
    world, request = World(), Request("a", 13)
    world.link.ready = False
    assert world.it.matched(request, 0) == (0, False)
    world.ids["a"] = [20, 21, 22, 23]
    world.step(new={"a": 0}, scheduled=13)
    world.it.finished("a")
    assert world.it.counts == {"blocks_not_saved/not_ready": 3}
    assert world.link.not_stored == {"not_ready": 3}
    world.link.ready = True
    assert save_all(world, Request("b", 17), set(), computed=12) == [[20, 21, 22, 23]]


def test_a_daemon_that_comes_during_a_request_gets_all_of_its_blocks() -> None:
    world, request = World(), Request("a", 13)
    world.link.ready = False
    world.it.matched(request, 0)
    world.ids["a"] = [20, 21, 22, 23, 24]
    world.step(new={"a": 0}, scheduled=13)
    world.link.ready = True
    world.it.ready(world.step(cached={"a": 13}, scheduled=1).step)
    assert [task.gpu_block_ids for task, _ in world.link.tasks] == [[20, 21, 22]]
    world.link.answer(set())
    world.it.ready(world.step(cached={"a": 14}, scheduled=1).step)
    assert len(world.link.tasks) == 1
    world.it.finished("a")
    assert not world.it.counts


def test_a_failed_save_is_counted_and_repaired_by_the_next_turn() -> None:
    world, request = World(), Request("a", 13)
    assert save_all(world, request, set(), computed=0) == [[20, 21, 22]]
    world.link.end([20])
    world.it.collect()
    assert world.it.counts["blocks_not_saved/failed"] == world.link.not_stored["failed"] == 2
    assert not world.pool.pinned
    world.it.finished("a")
    assert save_all(world, Request("b", 13), {request.keys[0]}, computed=12) == [[21, 22]]


def test_a_preempted_request_asks_again() -> None:
    world, request = World(), Request("a", 21)
    assert world.asks(request) == 0
    world.ids["a"] = [20, 21, 22, 23, 24, 25]
    world.step(new={"a": 0}, scheduled=20)
    world.step(preempted=["a"])
    assert world.asks(request, set(request.keys[:5])) == 5


def test_a_request_that_waits_long_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world, request = World(), Request("a", 21)
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    assert world.asks(request) == 0
    assert world.it.matched(request, 0) == (0, False)
    now[0] += 10
    assert world.asks(request, set(request.keys[:3])) == 3
    now[0] += 10
    assert world.it.matched(request, 0) == (None, False)
    now[0] += 10  # a slow answer is used all the same, or a slow engine would ask for ever
    world.link.answer(set(request.keys[:4]))
    assert world.it.matched(request, 0) == (16, True)


# --- roles and limits -----------------------------------------------------------------------------


def test_a_producer_loads_nothing_and_saves_only_what_is_not_there() -> None:
    world, request = World(loads=False), Request("a", 13)
    assert world.it.matched(request, 0) == (0, False)
    world.link.answer({request.keys[0]})
    assert world.it.matched(request, 0) == (0, False)
    assert save_all(world, request, set(), computed=0) == [[21, 22]]


def test_a_consumer_saves_nothing() -> None:
    world, request = World(saves=False), Request("a", 13)
    assert world.asks(request, set(request.keys)) == 3
    assert save_all(world, Request("b", 13), set(), computed=0) == []
    world.it.finished("b")
    assert not world.it.counts


@pytest.mark.parametrize(("most", "loaded"), [(0, 0), (3, 0), (8, 2), (400, 5), (-1, 5), ("8", 5), (True, 5)])
def test_a_requests_own_limit_of_loads(most: Any, loaded: int) -> None:
    world, request = World(), Request("a", 21, kv_transfer_params={"max_load_tokens": most})
    assert world.asks(request, set(request.keys)) == loaded


@pytest.mark.parametrize(("most", "saved"), [(0, []), (9, [[20, 21]]), (400, [[20, 21, 22]])])
def test_a_requests_own_limit_of_saves(most: int, saved: list[list[int]]) -> None:
    world, request = World(), Request("a", 13, kv_transfer_params={"max_offload_tokens": most})
    assert save_all(world, request, set(), computed=0) == saved
    world.it.finished("a")
    assert not world.it.counts


# --- windows and groups ---------------------------------------------------------------------------


def test_null_blocks_are_neither_loaded_nor_reported() -> None:
    """A window of 6 tokens needs two blocks of 4: those before are null, and not in storage any more either."""
    world, request = World(groups=(KvGroup(TOKENS, 6),)), Request("a", 21)
    assert world.asks(request, set(request.keys[3:5])) == 5
    world.it.allocated(request, ([0, 0, 0, 13, 14, 15],), 20)
    world.it.ready(world.step().step)
    task = world.link.end([13])
    assert (task.keys, task.gpu_block_ids) == (request.keys[3:5], [13, 14])
    news = world.step()
    assert (news.loaded, news.failed, news.bad_blocks) == ({"a"}, {"a"}, frozenset()), "block 3 alone is no prefix"
    assert world.it.matched(request, 0) == (0, False)


def test_null_blocks_are_not_saved() -> None:
    world, request = World(groups=(KvGroup(TOKENS, 6),)), Request("a", 21)
    world.asks(request)
    world.ids["a"] = [0, 0, 22, 23, 24, 25]
    world.it.ready(world.step(new={"a": 0}, scheduled=21).step)
    assert [task.gpu_block_ids for task, _ in world.link.tasks] == [[22, 23, 24]]
    assert not world.pool.blocks[0].references


def test_every_group_has_keys_and_blocks_of_its_own() -> None:
    world, request = World(groups=(KvGroup(TOKENS), KvGroup(TOKENS, 6))), Request("a", 13)
    world.asks(request)
    world.ids["a"] = [20, 21, 22, 23]
    world.it.ready(world.step(new={"a": 0}, scheduled=13).step)
    saved = world.link.end()
    assert saved.gpu_block_ids == [20, 120, 21, 121, 22, 122]
    assert saved.keys == [f"{key}/{group}" for key in request.keys for group in (0, 1)]
    other = Request("b", 13)
    needed = {f"{key}/0" for key in request.keys} | {f"{key}/1" for key in request.keys[1:]}
    assert world.asks(other, needed) == 3, "the window does not reach the first block"
    world.it.allocated(other, ([30, 31, 32, 33], [0, 131, 132, 133]), 12)
    world.it.ready(world.step().step)
    assert world.link.end().gpu_block_ids == [30, 31, 32, 131, 132]


def windows(world: World) -> Request:
    """A request of 9 tokens of prompt and 10 of answer, whose window of 6 has passed all but the last two blocks."""
    request = Request("a", 9)
    world.asks(request)
    world.ids["a"] = [20, 21, 22]
    world.it.ready(world.step(new={"a": 0}, scheduled=9).step)
    for tokens, ids in ((13, [20, 21, 22, 23]), (17, [0, 21, 22, 23, 24]), (19, [0, 0, 0, 23, 24])):
        computed, request.num_tokens = request.num_tokens, tokens
        request.block_hashes = [f"hash {i}".encode() for i in range(tokens // TOKENS)]
        world.ids["a"] = ids
        world.it.ready(world.step(cached={"a": computed}, scheduled=tokens - computed - 1).step)
    return request


def test_what_a_next_turn_needs_of_a_window_is_kept_until_the_request_ends() -> None:
    world = World(groups=(KvGroup(TOKENS, 6),), every=0)
    windows(world)
    assert world.link.end().gpu_block_ids == [20, 21], "at the prompt's end"
    world.it.collect()
    assert world.pool.pinned == {22}, "vLLM has given it up, and the token behind block 3 needs it"
    world.it.finished("a", ([0, 0, 0, 23, 24],))
    world.it.ready(10)
    assert world.link.end().gpu_block_ids == [22, 23]
    world.it.collect()
    assert not world.pool.pinned
    assert not world.it.counts["blocks_not_saved/unreachable"]
    assert not world.it.counts["blocks_not_saved/no_room"]


def test_a_reset_gives_back_what_was_kept_for_a_next_turn() -> None:
    world = World(groups=(KvGroup(TOKENS, 6),), every=0)
    windows(world)
    world.link.end()
    assert world.pool.reset_prefix_cache()
    assert not world.pool.pinned
    world.step(preempted=["a"])
    world.it.finished("a", ([],))
    assert not world.pool.pinned


def test_windows_that_vllm_has_given_up_are_counted() -> None:
    """No room in the step that computes them: null blocks are in their place in the next one."""
    world, request = World(20, groups=(KvGroup(TOKENS, 6),)), Request("a", 41)
    world.asks(request)
    world.ids["a"] = list(range(1, 12))
    world.it.ready(world.step(new={"a": 0}, scheduled=40).step)
    assert len(world.link.end().gpu_block_ids) == 20 // 4
    world.ids["a"] = [0] * 8 + [9, 10, 11]
    world.it.ready(world.step(cached={"a": 40}, scheduled=1).step)
    world.it.finished("a", (world.ids["a"],))
    assert world.it.counts["blocks_not_saved/no_room"] == world.link.not_stored["no_room"] > 0
    saved = world.it.counts["blocks_saved"] + sum(len(task.keys) for task, _ in world.link.tasks)
    assert saved + world.it.counts["blocks_not_saved/no_room"] == 10


# --- resets ---------------------------------------------------------------------------------------


def test_a_reset_waits_for_running_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    world, request = World(), Request("a", 13)
    save_all(world, request, set(), computed=0)
    ended = threading.Timer(0.05, world.link.end)
    ended.start()
    assert world.pool.reset_prefix_cache()
    ended.join()
    assert not world.link.cancelled
    assert world.it.counts["blocks_saved"] == 3


def test_a_reset_cancels_saves_that_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "SAVES_END_S", 0.01)
    world, request = World(), Request("a", 13)
    save_all(world, request, set(), computed=0)
    assert world.pool.reset_prefix_cache()
    assert len(world.link.cancelled) == 1
    assert world.it.counts["blocks_not_saved/failed"] == 3


def test_a_reset_gives_up_saves_that_have_not_begun() -> None:
    world, request = World(), Request("a", 13)
    world.asks(request)
    world.ids["a"] = [20, 21, 22, 23]
    world.step(new={"a": 0}, scheduled=13)
    assert world.pool.reset_prefix_cache()
    assert not world.it.busy
    world.it.ready(1)
    assert not world.link.tasks


def test_a_reset_leaves_blocks_alone_that_a_silent_daemon_may_touch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "SAVES_END_S", 0.01)
    monkeypatch.setattr(scheduling, "SAVES_CANCELLED_S", 0.01)
    world, request = World(), Request("a", 13)
    save_all(world, request, set(), computed=0)
    monkeypatch.setattr(world.link, "cancel", lambda _: None)
    assert not world.pool.reset_prefix_cache()
    assert world.pool.pinned == {20, 21, 22}


# --- events ---------------------------------------------------------------------------------------


def test_evicted_blocks_are_retracted_and_found_ones_announced() -> None:
    world, request = World(), Request("a", 13)
    save_all(world, request, {request.keys[0]}, computed=0)
    world.link.end()
    world.it.collect()
    assert sorted(world.it.take_events()) == [("stored", f"hash {i}", 0) for i in range(3)]
    world.step()
    assert not world.link.used, "the store would keep what nobody wants"
    asked, answer = world.link.asked.pop()
    assert sorted(asked) == sorted(request.keys)
    answer([key != request.keys[1] for key in asked])
    assert world.it.take_events() == [("removed", "hash 1", 0)]
    world.it.forget()
    assert sorted(world.it.take_events()) == [("removed", f"hash {i}", 0) for i in (0, 2)]


def test_a_daemon_that_does_not_answer_retracts_nothing() -> None:
    world, request = World(), Request("a", 13)
    save_all(world, request, set(), computed=0)
    world.link.end()
    world.step()
    assert len(list(world.it.take_events())) == 3
    _, answer = world.link.asked.pop()
    answer(None)
    assert not world.it.take_events()


@pytest.mark.parametrize("taken", [True, False])
def test_after_vllm_has_cleared_its_cache_a_look_up_announces_what_is_stored_again(taken: bool) -> None:
    """Routers drop it: AllBlocksCleared names no medium. It comes in front of what was not taken yet."""
    world, request = World(), Request("a", 13)
    save_all(world, request, set(), computed=0)
    world.link.end()
    world.it.collect()
    stored = [("stored", f"hash {i}", 0) for i in range(3)]
    if taken:
        assert sorted(world.it.take_events()) == stored
    assert world.pool.reset_prefix_cache()
    assert sorted(world.it.take_events()) == ([] if taken else stored)
    world.link.asked.clear()
    assert world.asks(Request("b", 13), set(request.keys)) == 3
    assert sorted(world.it.take_events()) == (stored if taken else [])


# --- models with states, and with drafts ------------------------------------------------------------


def handed(world: World, request: Request, states: list[tuple[int, int, int]], computed: int, tokens: int) -> None:
    """A step of one request in which vLLM hands over states: each a group, a block and a boundary."""
    output = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=request.request_id, num_computed_tokens=computed)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        num_scheduled_tokens={request.request_id: tokens},
        preempted_req_ids=None,
        kv_connector_block_state=SimpleNamespace(boundary_state_offloads={request.request_id: states}),
    )
    world.it.ready(world.it.stepped(output).step)


def test_a_state_is_saved_from_the_block_that_vllm_hands_over() -> None:
    world, request = World(groups=(KvGroup(TOKENS), KvGroup(TOKENS, state=True))), Request("a", 13)
    world.asks(request)
    world.ids["a"] = [20, 21, 22, 23]  # of states, vLLM's table has other blocks in these places
    handed(world, request, [(1, 77, 12), (1, 78, 10), (1, 79, 16)], 0, 13)
    saved = world.link.end()
    assert saved.keys == [*(f"{key}/0" for key in request.keys), f"{request.keys[2]}/1"]
    assert saved.gpu_block_ids == [20, 21, 22, 77], "no state within a block, none that is not computed"
    other = Request("b", 13)
    assert world.asks(other, {*saved.keys}) == 3
    world.it.allocated(other, ([30, 31, 32, 33], [0, 0, 132, 133]), 12)
    world.it.ready(world.step().step)
    loaded = world.link.end()
    assert loaded.gpu_block_ids == [30, 31, 32, 132]
    assert loaded.chains == [(0, 0, ""), (3, 5, saved.keys[2])], "no state before it is stored, but attention is"
    world.link.asked.clear()  # of the events
    assert world.asks(Request("c", 13), {*saved.keys} - {f"{request.keys[2]}/1"}) == 0


def test_states_without_room_or_a_daemon_are_counted() -> None:
    world, request = World(8, groups=(KvGroup(TOKENS, state=True),)), Request("a", 13)
    world.asks(request)
    world.ids["a"] = [0, 0, 1, 2]
    handed(world, request, [(0, 5, 4), (0, 6, 8), (0, 7, 12)], 0, 13)
    assert world.it.counts == {"blocks_not_saved/no_room": 1}
    world.link.ready = False
    handed(world, request, [(0, 5, 4)], 0, 13)
    assert world.it.counts["blocks_not_saved/not_ready"] == 1


def test_with_drafts_a_key_has_what_the_draft_model_sees_behind_a_block() -> None:
    """Two prompts that part behind a block: its draft's KV differs, and vLLM's hash of it does not."""
    world, hashes = World(groups=(KvGroup(TOKENS, ahead=1),)), [b"h0", b"h1", b"h2"]
    one = Request("a", 12, hashes, all_token_ids=[*range(8), 70, *range(9, 12)])
    other = Request("b", 12, [*hashes[:2], b"other"], all_token_ids=[*range(8), 80, *range(9, 12)])
    assert save_all(world, one, set(), computed=0) == [[20, 21]], "what follows the last block is not known"
    keys = world.link.end().keys
    assert keys == [f"{b'h0'.hex()}~4", f"{b'h1'.hex()}~70"]
    assert world.asks(other, set(keys)) == 1
    one.all_token_ids, one.num_tokens = [*one.all_token_ids, 7], 13
    world.it.ready(world.step(cached={"a": 12}, scheduled=1).step)
    assert world.link.end().keys == [f"{b'h2'.hex()}~7"]


def test_of_several_drafts_a_block_is_final_once_the_last_one_has_seen_what_follows() -> None:
    world = World(groups=(KvGroup(TOKENS, ahead=3),))
    request = Request("a", 20)
    world.asks(request)
    world.ids["a"] = list(range(20, 26))
    world.it.ready(world.step(new={"a": 0}, scheduled=8).step)
    assert world.link.end().gpu_block_ids == [20]
    world.it.ready(world.step(cached={"a": 8}, scheduled=2).step)
    assert world.link.end().gpu_block_ids == [21]
