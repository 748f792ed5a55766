"""An index that a router builds from an engine's KV events is what the store has, after evictions, too."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored, EventBatch, KVEventBatch
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from tests.with_vllm.dry import TOKENS, DryEngine, hashes, prompts
from transferd.adapters.vllm import router_events

pytestmark = pytest.mark.timeout(1200)

REQUESTS = 500


def index_of(events: list[Any]) -> set[tuple[Any, int]]:
    """As a router has it, from the bytes on the wire: block hash and KV group."""
    wire = msgspec.msgpack.encode(EventBatch(ts=0.0, events=events))
    index: set[tuple[Any, int]] = set()
    for event in msgspec.msgpack.decode(wire, type=KVEventBatch).events:
        if getattr(event, "medium", None) != "STORAGE":
            continue
        names = {(block_hash, event.group_idx) for block_hash in event.block_hashes}
        if isinstance(event, BlockStored):
            assert not names & index, "consumers count announcements"
            assert len(event.token_ids) == event.block_size == TOKENS
            index |= names
        else:
            assert isinstance(event, BlockRemoved)
            assert names <= index
            index -= names
    return index


@pytest.mark.parametrize("windows", [(None,), (None, 100)], ids=["full", "hybrid"])
def test_the_index_is_what_is_stored_after_many_requests_with_evictions(
    place: Path, windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_events, "EVERY_S", 0.05)
    asked = prompts(1, *[40 + 37 * i % 150 for i in range(REQUESTS)])
    with DryEngine(place, "connector", blocks=256, events=True, windows=windows, capacity="4MiB") as engine:
        known: dict[Any, str] = {}
        for start in range(0, REQUESTS, 50):
            batch = asked[start : start + 50]
            for prompt in batch:
                for name in hashes(engine, prompt):
                    known |= {(maybe_convert_block_hash(name), group): name.hex() for group in range(len(windows))}
            engine.run(batch)
        keys = {place: f"{name}/{place[1]}" if len(windows) > 1 else name for place, name in known.items()}
        link = engine.ours._link

        def stored() -> set[tuple[Any, int]]:
            found: list[list[bool] | None] = []
            link.ask(list(keys.values()), found.append, use=False)
            give_up = time.monotonic() + 60
            while not found:
                assert time.monotonic() < give_up
                time.sleep(0.01)
            assert found[0] is not None
            return {place for place, there in zip(keys, found[0], strict=True) if there}

        def agree() -> bool:
            engine.run([asked[-1]])
            return {one for one in index_of(engine.published) if one in keys} == stored()

        engine.until(agree)
        assert 0 < len(stored()) < len(keys), "the store is full and has evicted"
