"""Engines of one name on one daemon: no half is taken for a half of another engine. Each in its own process."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.own_memory import code, read, write
from tests.machine.hostile.half import Half
from tests.support.looking import new_sync_stats
from tests.support.waits import stats_until, until, wait_until
from transferd import Client, Engine, Pages, Status
from transferd.adapters.vllm.settings import AdapterSettings, engine_name
from transferd.client.launch import DaemonProcess, running, start
from transferd.client.sync_client import SyncClient
from transferd.errors import ConnectTimeout, RequestError

pytestmark = pytest.mark.one_loop

TREE = {"storage": {"backend": "file"}, "host": {"staging": "1MiB"}}
ONE, OTHER = "1" * 32, "2" * 32  # tokens
NAME = "llama"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with running(TREE, tmp_path) as process:
        yield process


@contextlib.contextmanager
def engine(endpoint: str, token: str, ranks: int = 1) -> Iterator[tuple[list[Half], Half]]:
    """The workers of an engine, and its scheduler's half, which gets the token once the workers run.

    All keep their name, so a test that takes long sees what one that takes no time sees.
    """
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(Half(endpoint, NAME, rank, token=token, ranks=ranks, stays=True))
            for rank in range(ranks)
        ]
        scheduler = stack.enter_context(Half(endpoint, NAME, None, stays=True))
        scheduler.ask("belong", token)
        yield workers, scheduler


def ready(*halves: Half) -> None:
    wait_until(lambda: all(half.ask("ready") for half in halves), "an engine is not served", within=60.0)


def moves_its_own_bytes(workers: list[Half], scheduler: Half, key: str, value: int) -> None:
    before = [worker.ask("paint", 1, value + rank) for rank, worker in enumerate(workers)]
    assert scheduler.ask("save", key, 1) == ["ok", None, [1]]
    assert scheduler.ask("load", key, 2) == ["ok", None, [2]]
    assert [worker.ask("digest", 2) for worker in workers] == before


def why_out(half: Half) -> set[str]:
    """Why the daemon keeps it out, said once. That a daemon answered late, on a busy machine, it may have said, too."""
    lines = half.ask("lines")
    assert all(one != other for one, other in itertools.pairwise(lines)), lines
    return {line for line in lines if "not in use yet" in line and "no daemon answered" not in line}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_replica_under_a_name_that_is_taken_stays_out_until_the_other_one_has_gone(
    daemon: DaemonProcess, ranks: int
) -> None:
    with contextlib.ExitStack() as old:
        workers, scheduler = old.enter_context(engine(daemon.endpoint, ONE, ranks))
        ready(*workers, scheduler)
        with engine(daemon.endpoint, OTHER, ranks) as (late, late_scheduler):
            halves = [*late, late_scheduler]
            wait_until(lambda: all(why_out(half) for half in halves), "each says why it stays out", within=60.0)
            mine = [worker.ask("paint", 3, 0x77) for worker in late]
            assert late_scheduler.ask("save", "late", 3)[:2] == ["failed", "not_connected"]
            moves_its_own_bytes(workers, scheduler, "k", 0x10)
            assert scheduler.ask("exists", "late", "k") == [False, True]
            assert late_scheduler.ask("load", "k", 3)[:2] == ["failed", "not_connected"]
            assert [worker.ask("digest", 3) for worker in late] == mine
            assert not any(half.ask("ready") for half in halves)
            for half in halves:
                (line,) = why_out(half)
                assert NAME in line
                assert ONE not in line
                assert OTHER not in line
            for half in (*workers, scheduler):
                half.kill()
            ready(*halves)
            moves_its_own_bytes(late, late_scheduler, "again", 0x30)


def test_a_restarted_daemon_knows_the_halves_of_its_engines_apart(tmp_path: Path) -> None:
    daemon = start(TREE, tmp_path, wait=False)
    try:
        with (
            engine(daemon.endpoint, ONE, 2) as (workers, scheduler),
            Half(daemon.endpoint, NAME, None, token=OTHER) as stranger,
        ):
            ready(*workers, scheduler)
            moves_its_own_bytes(workers, scheduler, "k", 0x10)
            (boot,) = {half.ask("boot") for half in (*workers, scheduler)}
            daemon.kill()
            daemon = start(TREE, tmp_path, wait=False)
            wait_until(lambda: all(half.ask("boot") not in ("", boot) for half in (*workers, scheduler)), within=60.0)
            moves_its_own_bytes(workers, scheduler, "l", 0x20)
            assert not stranger.ask("ready")
    finally:
        daemon.stop()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can put a daemon into a PID namespace of its own")
@pytest.mark.parametrize("model", ["m", "o"])
def test_an_engine_whose_name_was_taken_while_it_was_suspended_takes_another(tmp_path: Path, model: str) -> None:
    """And it serves the weights that it had. The daemon cannot see that the process lives, as in another container."""
    tree = TREE | {"server": {"client_timeout": 5.0}}  # a busy machine lets a process stand still for 3 s
    with contextlib.ExitStack() as stack:
        daemon = start(tree, tmp_path, prefix=("unshare", "--pid", "--mount-proc", "--fork", "--kill-child"))
        stack.callback(daemon.kill)
        watcher = stack.enter_context(SyncClient(daemon.endpoint, await_ready=False))
        half = stack.enter_context(Half(daemon.endpoint, NAME, 0, token=ONE))
        ready(half)
        assert half.ask("reset")
        generation = new_sync_stats(watcher)["engines"][NAME]["generation"]
        with half.suspended():
            wait_until(lambda: not watcher.stats()["engines"], "it is given up", within=60.0)
            ready(stack.enter_context(Half(daemon.endpoint, NAME, 0, token=OTHER, model=model)))
        wait_until(lambda: len(watcher.stats()["engines"]) == 2, "it takes another name", within=60.0)
        ready(half)
        engines = new_sync_stats(watcher)["engines"]  # of now: the looks before have used up what reports may cost
        (name,) = engines.keys() - {NAME}
        assert (name[: len(NAME) + 1], engines[name]["generation"]) == (f"{NAME}-", generation)


async def test_who_only_names_an_engine_may_control_it_and_nothing_else(daemon: DaemonProcess) -> None:
    with Half(daemon.endpoint, NAME, 0, token=ONE) as worker, Half(daemon.endpoint, NAME, None, token=ONE) as scheduler:
        ready(worker, scheduler)
        before = worker.ask("paint", 1, 5)
        assert scheduler.ask("save", "k", 1)[0] == "ok"
        async with Client(daemon.endpoint, engine=NAME, await_ready=False) as stranger:
            with pytest.raises(ConnectTimeout, match="is another one: it is registration"):
                await stranger.wait_ready(60.0)
            for task in (write("w", ["x"], [1]), read("r", ["k"], [1])):
                result = await stranger.submit(task)
                assert (result.status, code(result)) == (Status.REJECTED, "not_this_engine")
            for ask in (
                stranger.match(["k"]), stranger.exists(["k"]), stranger.cancel("any"), stranger.device_handle(0),
                stranger.offer(0, {"kind": "shm", "data": {}}), stranger.unregister(),
            ):  # fmt: skip
                with pytest.raises(RequestError) as refused:
                    await ask
                assert refused.value.reason == "not_this_engine"
            described = Engine(ranks=1, model="m", layout=Pages(layers=1, page_bytes=4096, blocks=8, identity="i"))
            with pytest.raises(RequestError) as refused:
                await stranger.register(described)
            assert refused.value.reason == "engine_exists"
            await stranger.pause()
            assert (await stranger.stats())["engines"][NAME]["paused"]
            await stranger.resume()
            await stranger.drain()
            await stranger.resume()
            await stranger.set_generation("new")
            assert scheduler.ask("load", "k", 1) == ["miss", None, []]
            await stranger.clear_cache()
            await stranger.restore_cache("newer")
            await stranger.pause()
            assert (await stranger.stats())["engines"][NAME]["generation"] == "newer"
        async with Client(daemon.endpoint, engine=NAME, token=ONE, await_ready=False) as member:
            await stats_until(member, lambda report: not report["engines"][NAME]["paused"])
        assert worker.ask("digest", 1) == before


async def test_the_token_is_shown_nowhere(daemon: DaemonProcess, tmp_path: Path) -> None:
    with Half(daemon.endpoint, NAME, 0, token=ONE) as worker, Half(daemon.endpoint, NAME, None, token=ONE) as scheduler:
        ready(worker, scheduler)
        assert scheduler.ask("save", "k", 1)[0] == "ok"
        async with Client(daemon.endpoint, engine=NAME, await_ready=False) as stranger:
            said: list[Any] = [await stranger.stats(), await stranger.clients(), await stranger.tasks()]
            said += [await stranger.explain("sk1", NAME), repr(stranger._conversation.session)]
            which = said[0]["engines"][NAME]["registration"]
        assert ONE not in json.dumps(said)
        digest = f'"registration":"{which}"'
        await until(lambda: digest in daemon.log.replace(" ", ""), "the digest says which")
        assert ONE not in daemon.log


@pytest.mark.parametrize(
    ("given", "engine_id", "parallel", "name"),
    [
        ("", "ab12_dp1", {}, "vllm-ab12_dp1"),
        ("llama", "ab12", {}, "llama"),
        ("llama", "ab12", {"data_parallel_size": 1, "data_parallel_rank": 0}, "llama"),
        ("llama", "ab12", {"data_parallel_size": 2, "data_parallel_rank": 0}, "llama-dp0"),
        ("llama", "ab12", {"data_parallel_size": 2, "data_parallel_rank": 1}, "llama-dp1"),
        ("llama", "ab12", {"data_parallel_size": 1, "data_parallel_rank": 0, "data_parallel_index": 3}, "llama-dp3"),
        ("llama", "ab12_dp0", None, "llama-dp0"),
        ("llama", "ab12_dp1", None, "llama-dp1"),
    ],
)
def test_data_parallel_engines_of_one_configuration_have_names_of_their_own(
    given: str, engine_id: str, parallel: dict[str, int] | None, name: str
) -> None:
    config = None if parallel is None else SimpleNamespace(**parallel)
    assert engine_name(AdapterSettings(name=given), "vllm", engine_id, config) == name
