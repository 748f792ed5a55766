"""The curve of hits over size: it says what the store would do, within a MiB of memory, and engines share its order."""

from __future__ import annotations

import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from transferd.cli.replay.engine import Tiers
from transferd.cli.replay.predicted import GivenLevel, PredictedDaemon, predict
from transferd.cli.replay.trace import TraceRequest, generated_workload, read_trace
from transferd.observability.what_if import HALVES_S, MOST, WhatIf
from transferd.runtime.loop_turns import finished
from transferd.tasks import Task, TaskResult, WriteStorageTask

SHARED_TRACE = Path(__file__).parents[3] / "shared" / "traces" / "conversation_trace.jsonl"


def hashed(key: str) -> int:
    return zlib.crc32(f"{key}.".encode()) * 0x9E3779B1 >> 8  # crc32 alone is too regular for such keys


def curve(most: int = MOST, now: Callable[[], float] = lambda: 0.0) -> WhatIf:
    return WhatIf(now, hashed, most)


def share(one: WhatIf, capacity: float, engine: str | None = None) -> float | None:
    return next(iter(one.shares([int(capacity)], engine)), None)


def predicted(
    monkeypatch: pytest.MonkeyPatch, requests: Sequence[TraceRequest], capacity: int, watched: WhatIf | None = None
) -> float:
    """The share of hits that `replay --simulate` predicts for a store of so many blocks. watched: sees its traffic."""
    asked = found = 0
    match, submit = PredictedDaemon.match, PredictedDaemon.submit

    async def look_up(self: PredictedDaemon, keys: Sequence[str]) -> int:
        nonlocal asked, found
        there = await match(self, keys)
        asked, found = asked + len(keys), found + there
        if watched is not None:
            finished(watched.looked_up("e", keys, 1))
        return there

    async def run(self: PredictedDaemon, task: Task) -> TaskResult:
        result = await submit(self, task)
        if watched is not None and isinstance(task, WriteStorageTask):
            finished(watched.stored("e", task.keys, 1))
        return result

    with monkeypatch.context() as patched:
        patched.setattr(PredictedDaemon, "match", look_up)
        patched.setattr(PredictedDaemon, "submit", run)
        predict(requests, Tiers(1000, 0, storage=True), [GivenLevel(capacity)])
    return found / asked


@pytest.mark.skipif(not SHARED_TRACE.exists(), reason="the conversation trace is not here")
def test_a_sample_of_a_conversation_trace_is_within_two_points_of_its_simulation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = read_trace(SHARED_TRACE, 1000)
    capacity = len({block for request in requests for block in request.hash_ids}) // 8
    sampled = curve()
    now = predicted(monkeypatch, requests, capacity, sampled)
    assert sampled._scale > 5, "most keys are not followed"
    for times, true in [(1.0, now), *((t, predicted(monkeypatch, requests, int(t * capacity))) for t in (0.5, 2, 4))]:
        assert share(sampled, times * capacity) == pytest.approx(true, abs=0.02), f"{times} times the size"


@pytest.mark.parametrize("capacity", [40, 80, 160])
def test_with_all_keys_followed_it_is_the_simulation(monkeypatch: pytest.MonkeyPatch, capacity: int) -> None:
    requests = generated_workload(7, 60)
    whole = curve()
    true = predicted(monkeypatch, requests, capacity, whole)
    assert share(whole, capacity) == pytest.approx(true, abs=0.01)


def test_a_chain_ends_at_the_first_block_that_is_not_there_and_what_is_not_stored_never_comes() -> None:
    whole = curve()
    finished(whole.stored("e", ["a", "b", "c"], 10))
    finished(whole.looked_up("e", ["a", "x", "c"], 10))
    assert share(whole, 1000.0) == pytest.approx(1 / 3)
    finished(whole.looked_up("e", ["x"], 10))
    assert share(whole, 1000.0) == pytest.approx(1 / 4)


def test_the_root_of_a_chain_is_the_last_to_go() -> None:
    whole = curve()
    finished(whole.stored("e", ["root", "leaf"], 10))
    finished(whole.looked_up("e", ["root", "leaf"], 10))
    assert share(whole, 10.0) == 0.5, "the smaller store would have kept the root"
    assert share(whole, 20.0) == 1.0


def test_engines_share_the_room_and_each_has_its_own_share_of_hits() -> None:
    whole = curve()
    finished(whole.stored("a", ["k"], 100))
    finished(whole.stored("b", ["k"], 400))  # another block, as its engine is another one
    finished(whole.looked_up("a", ["k"], 100))
    finished(whole.looked_up("b", ["none"], 400))
    assert share(whole, 479.0, "a") == 0.0
    assert share(whole, 520.0, "a") == 1.0, "its own block and the other engine's"
    assert share(whole, 520.0, "b") == 0.0
    assert share(whole, 520.0) == 0.5
    assert share(whole, 520.0, "nobody") is None
    finished(whole.left("b"))
    assert share(whole, 110.0, "a") == 0.0, "what was measured stays"
    finished(whole.stored("b", ["k"], 400))  # it has come again
    finished(whole.looked_up("a", ["k"], 100))
    assert share(whole, 520.0, "a") == 1.0


def test_what_came_long_ago_counts_less() -> None:
    time = [0.0]
    whole = curve(now=lambda: time[0])
    finished(whole.stored("e", ["k"], 1))
    finished(whole.looked_up("e", ["k"], 1))
    time[0] += HALVES_S
    finished(whole.looked_up("e", ["absent"], 1))
    assert share(whole, 10.0) == pytest.approx(1 / 3)


def test_it_takes_less_than_a_mib() -> None:
    names = [f"{number:x}" for number in range(8000)]
    tracemalloc.start()
    sampled = curve()
    for engine in ("a", "b"):
        for start in range(0, len(names), 100):
            finished(sampled.stored(engine, names[start : start + 100], 1000))
            finished(sampled.looked_up(engine, names[max(0, start - 100) : start + 100], 1000))
    nbytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(sampled._last) == MOST
    assert nbytes < 1024**2
