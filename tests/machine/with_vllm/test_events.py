"""An index that a router builds from an engine's KV events is what the store has, after evictions and resets, too."""

from __future__ import annotations

import queue
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored, EventBatch, KVEventBatch
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from tests.machine.with_vllm.dry import TOKENS, DryEngine, hashes, prompts
from tests.machine.with_vllm.router import Router, routing
from transferd.adapters.vllm import router_events

pytestmark = pytest.mark.timeout(1800)

REQUESTS = 500
Index = set[tuple[Any, int]]  # block hashes and KV groups


def index_of(events: list[Any], medium: str) -> Index:
    """As a router has it, from the bytes on the wire. vLLM's AllBlocksCleared is about every medium."""
    wire = msgspec.msgpack.encode(EventBatch(ts=0.0, events=events))
    index: Index = set()
    for event in msgspec.msgpack.decode(wire, type=KVEventBatch).events:
        if isinstance(event, AllBlocksCleared):
            index.clear()
        if getattr(event, "medium", None) != medium:
            continue
        names = {(block_hash, event.group_idx or 0) for block_hash in event.block_hashes}
        if not isinstance(event, BlockStored):
            index -= names
            continue
        if medium == "STORAGE":
            assert not names & index, "consumers count announcements"
            assert len(event.token_ids) == event.block_size == TOKENS
        index |= names
    return index


class Store:
    """What the daemon has of these prompts' blocks."""

    def __init__(self, engine: DryEngine, asked: Sequence[Sequence[int]], groups: int) -> None:
        self._link = engine.ours._link
        self._keys: dict[tuple[Any, int], str] = {}
        for prompt in asked:
            for name in hashes(engine, prompt):
                for group in range(groups):
                    key = f"{name.hex()}/{group}" if groups > 1 else name.hex()
                    self._keys[maybe_convert_block_hash(name), group] = key

    def known(self, index: Index) -> Index:
        """Those of the prompts: other requests have blocks as well."""
        return index & self._keys.keys()

    def stored(self) -> Index:
        answers: queue.SimpleQueue[list[bool] | None] = queue.SimpleQueue()
        found = None
        while found is None:  # on a busy machine, the link gives up a look-up before the daemon has answered
            self._link.ask(list(self._keys.values()), answers.put, use=False)
            found = answers.get(timeout=60)
        return {place for place, there in zip(self._keys, found, strict=True) if there}

    def __len__(self) -> int:
        return len(self._keys)


def play(engine: DryEngine, asked: list[list[int]]) -> None:
    for start in range(0, len(asked), 50):
        engine.run(asked[start : start + 50])


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine asks about its announcements twenty times a second."""
    monkeypatch.setattr(router_events, "EVERY_S", 0.05)


@pytest.mark.parametrize("groups", [(None,), (None, 100)], ids=["full", "hybrid"])
def test_the_index_is_what_is_stored_after_many_requests_with_evictions(
    place: Path, groups: tuple[int | None, ...]
) -> None:
    asked = prompts(1, *[40 + 37 * i % 150 for i in range(REQUESTS)])
    with DryEngine(place, "connector", blocks=256, events=True, groups=groups, capacity="4MiB") as engine:
        play(engine, asked)
        store = Store(engine, asked, len(groups))

        def agree() -> bool:
            engine.run([asked[-1]])
            return store.known(index_of(engine.published, "STORAGE")) == store.stored()

        engine.until(agree)
        assert 0 < len(store.stored()) < len(store), "the store is full and has evicted"


def test_what_is_stored_is_announced_again_after_vllm_has_cleared_its_cache(place: Path) -> None:
    asked = prompts(3, 170, 130, 100)
    with DryEngine(place, "connector", blocks=256, events=True) as engine:
        engine.run(asked)
        store = Store(engine, asked, 1)
        assert store.known(index_of(engine.published, "STORAGE")) == store.stored()
        assert engine.scheduler.reset_prefix_cache()
        engine.run(asked)
        engine.run(asked)  # what a look-up has found is announced with a later step
        assert any(isinstance(event, AllBlocksCleared) for event in engine.published)
        assert len(store.stored()) == len(store)
        assert store.known(index_of(engine.published, "STORAGE")) == store.stored()


def run_of(names: Sequence[Any], there: Collection[tuple[Any, int]], start: int = 0) -> int:
    """How far the blocks from `start` on are there without a gap."""
    return next((i for i in range(start, len(names)) if (names[i], 0) not in there), len(names))


def test_dynamos_indexer_knows_what_is_stored(place: Path) -> None:
    """From vLLM's own publisher: how many leading blocks of each prompt are on the GPU, and then in storage."""
    asked = prompts(2, *[40 + 37 * i % 150 for i in range(REQUESTS)])
    events = f"ipc://{place}/events"
    settings: dict[str, Any] = {"blocks": 64, "events": True, "events_at": events, "capacity": "4MiB"}
    with DryEngine(place, "connector", **settings) as engine, routing(events, TOKENS) as router:
        (early, *_) = prompts(4, 70)
        while not router.matched(early)[0]:  # a subscriber gets what is published once it has come
            assert engine.scheduler.reset_prefix_cache()
            engine.run([early])
        play(engine, asked)
        store = Store(engine, asked, 1)
        engine.until(lambda: agrees(engine, store, router, asked))
        assert 0 < len(store.stored()) < len(store), "the store is full and has evicted"
        assert engine.scheduler.reset_prefix_cache()
        play(engine, asked[-60:])
        play(engine, asked[-60:])
        engine.until(lambda: agrees(engine, store, router, asked[-60:]))


def agrees(engine: DryEngine, store: Store, router: Router, asked: list[list[int]]) -> bool:
    engine.run([asked[-1]])
    gpu, stored = index_of(engine.published, "GPU"), store.stored()
    for prompt in asked[:: max(1, len(asked) // 60)]:
        names = [maybe_convert_block_hash(name) for name in hashes(engine, prompt)]
        on_gpu = run_of(names, gpu)
        if router.matched(prompt) != (on_gpu * TOKENS, run_of(names, stored, on_gpu) * TOKENS):
            return False
    return True
