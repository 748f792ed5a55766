"""TransferdTier under vLLM's own tiering manager, over a real daemon in its own process. `Pool` compares every byte."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext

from tests.machine.with_vllm.pool import Pool, keys
from tests.support.page_cache import forget, tells_what_it_has
from tests.support.waits import wait_until
from transferd.adapters.vllm import router_events, tier
from transferd.client.launch import running
from transferd.errors import ConfigError, StillRunning


def objects(place: Path) -> list[Path]:
    """The stored blocks, one file each."""
    return sorted(
        path for path in (place / "cache/transferd/blocks").rglob("*") if path.is_file() and path.stat().st_size > 8192
    )


def until(true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.02)


def daemon(pool: Pool) -> int:
    pid: int = pool.tier._link._companion.started.process.pid
    return pid


def test_what_was_stored_is_loaded_after_a_restart_of_the_engine(place: Path) -> None:
    wanted = keys("a", 6)
    with Pool() as pool:
        pool.store(wanted)
    with Pool() as pool:
        assert pool.load(wanted) == [True] * 6
        assert pool.load(keys("b", 3)) == [False] * 3


def test_each_missing_chunk_is_a_miss_and_no_other(place: Path) -> None:
    wanted = keys("a", 8)
    with Pool() as pool:
        pool.store(wanted[:2] + wanted[3:5] + wanted[7:])
        pool.forget()
        assert pool.load(wanted) == [True, True, False, True, True, False, False, True]


def found_in_tier(pool: Pool, wanted: Sequence[OffloadKey], *, leased: bool = False) -> ReqContext:
    """Store these chunks, empty the host pool, and let a request find them in the tier. It has loaded none yet.

    leased: the tier may read them itself.
    """
    pool.store(wanted)
    pool.forget()
    context = pool.request()
    until(lambda: (pool.step(), all(pool.tier.lookup(key, context) is LookupResult.HIT for key in wanted))[1])
    if not leased:
        pool.tier._leased.forget()
    return context


def test_a_damaged_object_is_computed_anew_and_the_others_are_loaded(place: Path) -> None:
    wanted = keys("a", 6)
    with Pool() as pool:
        pool.store(wanted)
        pool.forget()
        for path in objects(place)[:2]:
            data = bytearray(path.read_bytes())
            data[100] ^= 1
            path.write_bytes(data)
        assert sorted(pool.load(wanted)) == [False] * 2 + [True] * 4
        pool.forget()
        pool.store(wanted)
        pool.forget()
        assert pool.load(wanted) == [True] * 6


def test_objects_that_vanish_after_the_lookup_do_not_make_a_request_spin(place: Path) -> None:
    wanted = keys("a", 5)
    with Pool() as pool:
        found_in_tier(pool, wanted)
        for path in objects(place):
            path.unlink()
        rounds = pool.rounds
        assert pool.load(wanted) == [False] * 5
        assert pool.rounds < rounds + 2000


def test_a_daemon_killed_at_any_moment_costs_hits_and_no_byte(place: Path) -> None:
    wanted = keys("a", 12)
    with Pool() as pool:
        for repeat in range(3):
            boot = pool.tier._link._entered
            killer = threading.Timer(0.01 * repeat, os.kill, (daemon(pool), signal.SIGKILL))
            killer.start()
            pool.store(keys(f"{repeat}", 12))
            killer.join()
            until(lambda: pool.tier._link.ready and pool.tier._link._entered != boot)  # noqa: B023
            pool.forget()
            pool.load(keys(f"{repeat}", 12))
        pool.store(wanted)
        pool.forget()
        boot = pool.tier._link._entered
        os.kill(daemon(pool), signal.SIGKILL)
        assert pool.load(wanted) == [False] * 12
        until(lambda: pool.tier._link.ready and pool.tier._link._entered != boot)
        assert pool.load(wanted) == [True] * 12


def test_a_suspended_daemon_keeps_the_chunks_that_it_may_still_write(place: Path) -> None:
    wanted = keys("a", 4)
    with Pool() as pool:
        context = found_in_tier(pool, wanted)
        os.kill(daemon(pool), signal.SIGSTOP)
        try:
            assert pool.manager.lookup(wanted[0], context) is LookupResult.HIT_PENDING
            pool.step()
            until(lambda: not pool.tier._link.ready)
            assert pool.load(keys("b", 3)) == [False] * 3, "a request for other blocks goes on"
            assert pool.manager.has_pending_work()
            assert pool.manager.lookup(wanted[0], context) is LookupResult.HIT_PENDING
        finally:
            os.kill(daemon(pool), signal.SIGCONT)
        pool.settle()
        pool.load(wanted)
        pool.manager.on_request_finished(context)
        until(lambda: pool.tier._link.ready)
        pool.forget()
        assert pool.load(wanted) == [True] * 4


def test_what_a_lookup_has_found_is_loaded_under_a_suspended_daemon(place: Path) -> None:
    if not tells_what_it_has(place):
        pytest.skip("the file system cannot say what the page cache has")
    wanted = keys("a", 6)
    with Pool() as pool:
        context = found_in_tier(pool, wanted, leased=True)
        os.kill(daemon(pool), signal.SIGSTOP)
        try:
            until(lambda: (pool.step(), all(pool.manager.lookup(k, context) is LookupResult.HIT for k in wanted))[1])
            assert pool.load(wanted) == [True] * 6, "from the host pool"
        finally:
            os.kill(daemon(pool), signal.SIGCONT)
        pool.manager.on_request_finished(context)


def test_what_the_tier_cannot_read_is_loaded_by_the_daemon(place: Path) -> None:
    wanted = keys("a", 6)
    with Pool() as pool:
        context = found_in_tier(pool, wanted, leased=True)
        first, second, *_ = objects(place)
        forget(first)
        second.unlink()
        for key in wanted:
            pool.manager.lookup(key, context)
        pool.settle()
        pool.manager.on_request_finished(context)
        assert sorted(pool.load(wanted)) == [False] + [True] * 5


def test_a_reset_ends_what_a_lookup_has_found(place: Path) -> None:
    wanted = keys("a", 4)
    with Pool(keep_blocks_on_reset=False) as pool:
        pool.store(wanted)
        context = pool.request()
        until(lambda: (pool.step(), all(pool.tier.lookup(key, context) is LookupResult.HIT for key in wanted))[1])
        assert pool.tier._leased
        pool.forget()
        assert not pool.tier._leased
        assert pool.load(wanted) == [False] * 4


def test_a_reset_does_not_wait_forever_for_a_suspended_daemon(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = keys("a", 4)
    with Pool(timeout=1.0) as pool:
        context = found_in_tier(pool, wanted)
        os.kill(daemon(pool), signal.SIGSTOP)
        try:
            assert pool.manager.lookup(wanted[0], context) is LookupResult.HIT_PENDING
            pool.step()
            monkeypatch.setattr(tier, "NO_ANSWER_S", 0.0)
            with pytest.raises(StillRunning, match=r"1 transfers have not ended after 1 s \(load-"):
                pool.manager.reset_cache()
            assert pool.manager.lookup(wanted[0], context) is LookupResult.HIT_PENDING, "its row is not given away"
        finally:
            os.kill(daemon(pool), signal.SIGCONT)
        monkeypatch.setattr(tier, "NO_ANSWER_S", 60.0)
        pool.forget()
        answers = pool.tier._link.exists  # all False while it has no answer in time
        wait_until(lambda: all(answers([key.hex() for key in wanted])), within=60.0)
        assert pool.load(wanted) == [True] * 4


def test_a_full_store_loses_old_blocks_and_no_byte(place: Path) -> None:
    with Pool(chunks=32, capacity="256KiB") as pool:
        for name in "abcd":
            pool.store(keys(name, 16))
            pool.forget()
        came = [pool.load(keys(name, 16)) for name in "abcd"]
        assert came[-1] == [True] * 16
        assert not all(came[0])


def test_a_touch_reaches_the_stores_order(place: Path) -> None:
    """vLLM serves them from its host pool, and the store would forget them first."""
    used = keys("used", 8)
    with Pool(chunks=64, capacity="256KiB") as pool:
        pool.store(used)
        for name in "abcd":
            pool.manager.touch(used, pool.request())
            pool.store(keys(name, 8))
        pool.forget()
        assert pool.load(used) == [True] * 8
        assert not all(pool.load(keys("a", 8))), "the store has evicted"


def test_what_vllm_publishes_of_a_tier(place: Path) -> None:
    """Since 0.33, on vllm:kv_offload_config_info."""
    with Pool(generation="7") as pool:
        info = pool.tier.config_info()
        assert tuple(info) == type(pool.tier).config_info_keys({})
        assert info["transferd_endpoint"] == pool.tier._link.endpoint
        assert info["transferd_generation"] == "7"
    with Pool(tp=2) as pool:
        other = pool.tier.config_info()
    assert info["transferd_fingerprint"] != other["transferd_fingerprint"]
    assert info["transferd_endpoint"].startswith("ipc://")


def test_what_the_store_evicts_is_retracted(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_events, "EVERY_S", 0.05)
    index: set[OffloadKey] = set()
    with Pool(chunks=64, capacity="256KiB", enable_kv_events=True) as pool:
        for name in "abcdef":
            pool.store(keys(name, 8))
        everything = [key for name in "abcdef" for key in keys(name, 8)]
        stored: list[bool] = []

        def agree() -> bool:
            pool.rounds = 0
            pool.step()
            for event in pool.manager.take_events():
                if event.medium.value == "STORAGE":
                    index.symmetric_difference_update(event.keys)
                    assert index.isdisjoint(event.keys) if event.removed else index >= set(event.keys)
            stored[:] = pool.tier._link.exists([key.hex() for key in everything])
            return index == {key for key, there in zip(everything, stored, strict=True) if there}

        until(agree)
        assert 0 < len(index) < len(everything)


def test_another_model_layout_or_generation_never_sees_the_blocks(place: Path) -> None:
    wanted = keys("a", 3)
    with Pool() as pool:
        pool.store(wanted)
    for other in ({"model": "other"}, {"generation": "2"}, {"tp": 2}):
        with Pool(**other) as pool:
            assert pool.load(wanted) == [False] * 3, other
    with Pool() as pool:
        assert pool.load(wanted) == [True] * 3


def test_two_engines_share_a_daemon_and_what_either_has_stored(place: Path) -> None:
    ours, theirs = keys("a", 6), keys("b", 6)
    with Pool() as one, Pool() as other:
        assert other.tier._link._companion.started.process is None, "the second found the first one's daemon"
        one.store(ours)
        other.store(theirs)
        assert other.load(ours) == [True] * 6
        assert one.load(theirs) == [True] * 6


def test_the_engine_that_stays_keeps_the_daemon_whoever_has_started_it(place: Path) -> None:
    wanted = keys("a", 6)
    with Pool() as stays:
        with Pool() as _:
            pass
        assert stays.tier._link.ready
        stays.store(wanted)
        stays.forget()
        assert stays.load(wanted) == [True] * 6
    first = Pool()
    with Pool() as stays:
        boot = stays.tier._link._entered
        first.__exit__()
        stays.forget()
        assert stays.load(wanted) == [True] * 6
        assert stays.tier._link._entered == boot


def test_without_a_daemon_everything_is_a_miss_at_once(place: Path) -> None:
    with Pool(endpoint=f"ipc://{place}/nobody.sock", start_timeout=0) as pool:
        pool.store(keys("a", 3))
        pool.forget()
        assert pool.load(keys("a", 3)) == [False] * 3
        assert pool.tier.get_stats().data["data"]["vllm:kv_offload_transferd_ready"] == {(): 0}


def test_metrics_say_what_was_not_moved_and_why(place: Path) -> None:
    with Pool(endpoint=f"ipc://{place}/nobody.sock", start_timeout=0) as pool:
        pool.store(keys("a", 3))
        data = pool.tier.get_stats().data["data"]
        assert data["vllm:kv_offload_transferd_chunks_not_moved"] == {("not_connected",): 3}
        assert set(data) <= set(type(pool.tier).build_metric_definitions({}))


def test_an_event_is_told_for_what_was_stored(place: Path) -> None:
    with Pool(enable_kv_events=True) as pool:
        pool.store(keys("a", 3))
        told = [event for event in pool.manager.take_events() if event.medium.value == "STORAGE"]
        assert [(event.keys, event.removed) for event in told] == [(keys("a", 3), False)]


def test_what_is_stored_of_a_store_that_is_not_whole_is_announced(place: Path) -> None:
    """With `storage.admit`, the store takes what it is given a second time."""
    again, new = keys("again", 3), keys("new", 2)
    with (
        running({"storage": {"admit": "second use"}}, place) as process,
        Pool(enable_kv_events=True, endpoint=process.endpoint) as pool,
    ):
        pool.store(again)
        pool.forget()
        pool.store([*again, *new])
        assert pool.tier._link.exists([key.hex() for key in (*again, *new)]) == [True] * 3 + [False] * 2
        told = [event for event in pool.manager.take_events() if event.medium.value == "STORAGE"]
        assert [(key, event.removed) for event in told for key in event.keys] == [(key, False) for key in again]


def test_shutdown_with_jobs_in_flight_is_in_time(place: Path) -> None:
    with Pool() as pool:
        context = pool.request()
        out = pool.manager.prepare_store(keys("a", 8), context)
        pool.manager.complete_store(out.keys_to_store, context)
        before = time.monotonic()
    assert time.monotonic() - before < 20


@pytest.mark.parametrize(
    ("given", "named"),
    [({"tiemout": 3}, "tiemout"), ({"timeout": 0}, "timeout"), ({"capacity": "3 bananas"}, "capacity"),
     ({"endpoint": "ipc:///x", "path": "/y"}, "path, capacity")],
)  # fmt: skip
def test_a_wrong_setting_is_named(place: Path, given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Pool(**given)
