"""A transfer that failed leaves FastDeploy's books right: no node in transit, no block lost, nothing wrong claimed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.machine.with_fastdeploy.engine import CREATES_FOR_HOST, TIMEOUT_S, Engine, engine, wait_for
from tests.machine.with_fastdeploy.test_control import Service
from tests.machine.with_fastdeploy.test_tiers import prompts
from tests.support.sabotage import FILE_VARIABLE, Operation, Saboteur

SWAPPING: dict[str, Any] = {"gpu_blocks": 24, "cpu_blocks": 48}
STORING: dict[str, Any] = {"gpu_blocks": 16, "cpu_blocks": 0, "backend": "file"}


@pytest.fixture
def saboteur(place: Path, monkeypatch: pytest.MonkeyPatch) -> Saboteur:
    """The daemon's device and storage, which fail when they are told to."""
    made = Saboteur(place / "order")
    monkeypatch.setenv(FILE_VARIABLE, str(made.file))
    monkeypatch.setenv("TRANSFERD_CACHE__DEVICE", "tests.support.sabotage:SabotagedDevice")
    return made


def fill(made: Engine, asked: list[list[int]]) -> None:
    for tokens in asked:
        made.run(tokens)
    made.settle()


@contextlib.contextmanager
def filled(count: int, first: int | None = None, **how: Any) -> Iterator[tuple[Engine, list[list[int]]]]:
    """An engine that ran the first of `count` prompts, and the prompts. It must settle again at the end."""
    with engine(**how) as made:
        asked = prompts(count)
        fill(made, asked[:first])
        yield made, asked
        made.settle()


@pytest.mark.parametrize("tp", [1, 2])
def test_a_failed_swap_out_gives_its_blocks_up(saboteur: Saboteur, tp: int) -> None:
    with filled(4, 2, tp=tp, **SWAPPING) as (made, asked):
        with saboteur.order("copy_out", tp - 1):
            fill(made, asked[2:])  # needs room that an eviction cannot make by moving
        assert all(node.has_in_gpu for node in made.manager.node_map.values()), "a failed swap claims host blocks"
        fill(made, asked)
        assert sum(made.run(tokens)["cpu_match_token_num"] for tokens in asked) > 0


@pytest.mark.parametrize("tp", [1, 2])
def test_a_failed_swap_in_is_computed_anew(saboteur: Saboteur, tp: int) -> None:
    with filled(4, tp=tp, **SWAPPING) as (made, asked):
        with saboteur.order("copy_in", tp - 1):
            metrics = made.run(asked[0])
        assert metrics["cpu_match_token_num"] == 0
        made.settle()
        assert made.run(asked[1])["cpu_match_token_num"] > 0


def test_an_eviction_that_cannot_be_stored_frees_its_blocks(
    saboteur: Saboteur, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSFERD_STORAGE__BACKEND", "tests.support.sabotage:SabotagedStorage")
    monkeypatch.setenv("TRANSFERD_STORE_EVICTED", "1")
    with filled(8, 3, tp=2, gpu_blocks=24, cpu_blocks=24, backend="file") as (made, asked):
        made.client().purge()
        with saboteur.order("put", 1):
            fill(made, asked[3:])
        assert sum(made.run(tokens)["cpu_match_token_num"] for tokens in reversed(asked)) > 0


@pytest.mark.parametrize("operation", ["get", "copy_in"])
def test_a_failed_read_is_computed_anew(
    saboteur: Saboteur, monkeypatch: pytest.MonkeyPatch, operation: Operation
) -> None:
    monkeypatch.setenv("TRANSFERD_STORAGE__BACKEND", "tests.support.sabotage:SabotagedStorage")
    with filled(3, tp=2, **STORING) as (made, asked):
        with saboteur.order(operation, 1):
            assert made.run(asked[0])["storage_match_token_num"] == 0
        made.settle()
        assert made.run(asked[1])["storage_match_token_num"] == 40


@pytest.mark.parametrize("operation", ["put", "copy_out"])
def test_a_failed_write_says_so_at_once(
    saboteur: Saboteur, monkeypatch: pytest.MonkeyPatch, operation: Operation
) -> None:
    monkeypatch.setenv("TRANSFERD_STORAGE__BACKEND", "tests.support.sabotage:SabotagedStorage")
    with engine(tp=2, **STORING) as made:
        asked = prompts(3)
        with saboteur.order(operation, 0):
            made.run(asked[0])
        made.settle()
        made.run(asked[1])
        made.run(asked[2])
        assert made.run(asked[0])["storage_match_token_num"] == 0
        made.settle()


@pytest.mark.skipif(CREATES_FOR_HOST, reason="in this FastDeploy no worker creates the cache")
@pytest.mark.parametrize("tp", [1, 2])
def test_a_daemon_that_was_killed_comes_back_and_serves_the_workers_memory(place: Path, tp: int) -> None:
    with filled(4, tp=tp, **SWAPPING) as (made, asked):
        before = made.queue.client.boot_id
        made.kill_daemon()
        made.run(asked[0])  # nothing is on the host any more, and nothing is claimed to be
        wait_for(lambda: made.queue.connected and made.queue.client.boot_id != before)
        made.offer()  # a GPU's memory has names, under which the group offers it again by itself
        made.queue.client.wait_ready(30.0)
        made.settle()
        fill(made, asked)
        assert sum(made.run(tokens)["cpu_match_token_num"] for tokens in asked) > 0


def test_a_daemon_that_created_the_memory_comes_back_and_moves_nothing_of_workers_that_map_another(
    place: Path,
) -> None:
    with filled(3, tp=2, **STORING) as (made, asked):
        assert made.run(asked[0])["storage_match_token_num"] == 40
        before = made.queue.client.boot_id
        made.kill_daemon()
        wait_for(lambda: made.queue.connected and made.queue.client.boot_id != before)
        for tokens in asked:
            assert made.run(tokens)["storage_match_token_num"] == 0, "its bytes would not be where the workers look"
        made.settle()
        with contextlib.closing(Service(made)) as service:  # until the workers map anew, as after a sleep
            service.ask("pause")
            made.unmap()
            service.transfer("sleep", tags="kv_cache")
            service.transfer("wakeup", tags="kv_cache")
            made.attach(again=True)
            service.ask("resume")
        assert made.run(asked[0])["storage_match_token_num"] == 40


@pytest.mark.parametrize("tp", [1, 2])
def test_a_daemon_that_is_killed_costs_hits_and_nothing_else(place: Path, tp: int) -> None:
    with filled(6, 4, tp=tp, **SWAPPING) as (made, asked):
        made.kill_daemon()
        for tokens in asked:
            made.run(tokens)  # bytes of what is on the device are checked all the while
        made.settle()
        assert all(made.run(tokens)["cpu_match_token_num"] == 0 for tokens in asked)


@pytest.mark.parametrize("operation", ["copy_in", "get"])
def test_a_daemon_that_is_suspended_in_a_load_is_answered_when_it_can_write_no_more(
    saboteur: Saboteur, monkeypatch: pytest.MonkeyPatch, operation: Operation
) -> None:
    """FastDeploy gives the blocks of an answered transfer to others, and the daemon would write over theirs."""
    if operation == "get":
        monkeypatch.setenv("TRANSFERD_STORAGE__BACKEND", "tests.support.sabotage:SabotagedStorage")
    shape = STORING if operation == "get" else SWAPPING
    with filled(4, tp=2, **shape) as (made, asked), ThreadPoolExecutor(1) as other:
        daemon = made.daemon.pid
        with saboteur.order(operation, 1, "stall"):
            under_way = other.submit(made.run, asked[0])
            wait_for(lambda: saboteur.stalls)
            os.kill(daemon, signal.SIGSTOP)
            try:
                wait_for(lambda: not made.queue.connected)
                assert not made.queue.empty()
                assert not under_way.done()
            finally:
                os.kill(daemon, signal.SIGCONT)
        under_way.result(TIMEOUT_S)
        made.settle()
        for tokens in asked:
            made.run(tokens)


@pytest.mark.parametrize("operation", ["copy_out", "copy_in", "put", "get"])
def test_a_daemon_that_is_killed_in_the_middle_of_a_transfer(
    saboteur: Saboteur, monkeypatch: pytest.MonkeyPatch, operation: Operation
) -> None:
    """One rank has done its part, the other stands still: the transfer is told as failed, and computed anew."""
    swaps = operation.startswith("copy")
    if not swaps:
        monkeypatch.setenv("TRANSFERD_STORAGE__BACKEND", "tests.support.sabotage:SabotagedStorage")
    before = 2 if operation in ("copy_out", "put") else 4
    with filled(4, before, tp=2, **(SWAPPING if swaps else STORING)) as (made, asked), ThreadPoolExecutor(1) as other:
        with saboteur.order(operation, 1, "stall"):
            under_way = other.submit(lambda: [made.run(tokens) for tokens in asked[before:] or asked[:1]])
            wait_for(lambda: saboteur.stalls)
            made.kill_daemon()
        for metrics in under_way.result(TIMEOUT_S):
            assert metrics["cpu_match_token_num"] == metrics["storage_match_token_num"] == 0
        made.settle()
        for tokens in asked:
            made.run(tokens)
