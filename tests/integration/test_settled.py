"""Blocks are free when a result is settled, whatever happens to the daemon: seen from outside, byte by byte.

Each test stops a copy halfway, suspends, kills or restarts the daemon, or cancels the task. The engine writes to the
task's blocks as soon as it holds a settled result (held_tasks.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.caches import attach, snapshot
from tests.integration.held_tasks import CHECK, GATES, HOST, KINDS, REACH_S, SOURCE, World, task_of, tree, world
from tests.support.freezing import Freezer, freeze, noticed_soon, thaw
from tests.support.waits import stats_until, until
from transferd import (
    Client,
    GroupClient,
    ReadStorageTask,
    Status,
    SwapOutTask,
    SyncClient,
    TaskResult,
    WriteStorageTask,
)
from transferd.adapters.common.companion import DaemonFinder
from transferd.adapters.common.link import Link
from transferd.adapters.fastdeploy import EngineCacheQueue
from transferd.adapters.vllm.settings import VLLM
from transferd.client import client as client_module
from transferd.client.launch import running, start
from transferd.errors import HandoverFailed, TransferError
from transferd.runtime.compat import wait_for
from transferd.tiers.owner import WatchedProcess
from transferd.wire.obstacle import listener_of

pytestmark = pytest.mark.one_loop

LOST = {"daemon_lost", "no_answer"}


@contextlib.contextmanager
def suspended(how: str, pid: int) -> Iterator[Callable[[], None]]:
    """Suspend a process. Yields what resumes it."""
    if how == "SIGSTOP":
        freeze(pid)
        try:
            yield lambda: thaw(pid)
        finally:
            with contextlib.suppress(ProcessLookupError):  # the test has killed it
                thaw(pid)
        return
    try:
        freezer = Freezer(str(pid))
    except OSError as error:
        pytest.skip(f"no cgroup freezer: {error}")
    try:
        freezer.freeze(pid)
        yield freezer.thaw
    finally:
        freezer.close()


async def given_up(here: World, kind: str) -> asyncio.Future[Any]:
    """Push a task and wait until its copy stands halfway."""
    await here.hold(GATES[kind])
    future = await here.client.push(task_of(kind))
    await here.arrived()
    return future


@pytest.mark.parametrize("how", ["SIGSTOP", "freezer"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_suspended_daemon_touches_no_block_after_the_settled_result(
    kind: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path, monkeypatch) as here:
        future = await given_up(here, kind)
        with suspended(how, here.daemon.pid) as resume:
            here.keeper.release()
            with noticed_soon():
                result = await future
            assert result.error.code in LOST
            assert not result.settled
            assert here.client.unsettled == ["t"]
            assert not await here.client.settled("t", timeout=0.2)
            waiting = asyncio.ensure_future(here.client.settled("t"))
            resume()
            assert await waiting
            here.scribble(task_of(kind))
            assert here.client.unsettled == []
            await here.nothing_was_touched(kind)


@pytest.mark.parametrize("kind", KINDS)
async def test_submit_of_settled_results_only_returns_when_the_daemon_is_awake(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path, monkeypatch) as here:
        await here.hold(GATES[kind])
        submitted = asyncio.ensure_future(here.client.submit(task_of(kind), settled=True))
        await here.arrived()
        with suspended("SIGSTOP", here.daemon.pid) as resume:
            here.keeper.release()
            with noticed_soon():
                await until(lambda: submitted.done() or not here.client.connected)
                await until(lambda: submitted.done() or here.client.unsettled)
            assert not submitted.done()
            resume()
            result = await submitted
            here.scribble(task_of(kind))
            assert result.settled
            await here.nothing_was_touched(kind)


async def test_a_sync_client_gives_settled_results_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(tmp_path, monkeypatch) as here:
        await here.hold("scatter")
        with SyncClient(here.daemon.endpoint) as client:
            for rank in range(2):
                await asyncio.to_thread(client.attach, rank)
            started = client.start(task_of("read"), settled=True)
            bounded = client.start(task_of("swap_in", "b"), settled=True, settle_timeout=0.1)
            await here.arrived()
            with suspended("SIGSTOP", here.daemon.pid) as resume:
                here.keeper.release()
                with noticed_soon():
                    given = await asyncio.wrap_future(bounded)
                assert given.error is not None
                assert (given.status, given.error.code, given.settled) == (Status.FAILED, "unsettled", False)
                assert not started.done()
                assert set(client.unsettled) == {"t", "b"}
                resume()
                assert (await asyncio.wrap_future(started)).settled
                here.scribble(task_of("read"))
                await here.nothing_was_touched("read")
                assert await asyncio.to_thread(client.settled, "b")


async def test_a_killed_daemon_settles_its_tasks_without_a_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path, monkeypatch) as here:
        future = await given_up(here, "read")
        with suspended("SIGSTOP", here.daemon.pid):
            here.keeper.release()
            with noticed_soon():
                assert not (await future).settled
            waiting = asyncio.ensure_future(here.client.settled("t"))
            os.kill(here.daemon.pid, signal.SIGKILL)
            assert await waiting
            here.scribble(task_of("read"))
            dead = WatchedProcess.of_pid(here.daemon.pid)
            assert dead is None or dead.ended
        assert not here.client.connected


async def test_a_kill_settles_the_result_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(tmp_path, monkeypatch) as here:
        future = await given_up(here, "write")
        here.daemon.kill()
        result = await future
        assert (result.error.code, result.settled) == ("daemon_lost", True)
        assert await here.client.settled("t")


@pytest.mark.parametrize("kind", ["read", "write"])
async def test_a_restarted_daemon_settles_the_tasks_of_the_one_before(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path, monkeypatch) as here:
        future = await given_up(here, kind)
        with suspended("SIGSTOP", here.daemon.pid):
            with noticed_soon():
                assert not (await future).settled
            waiting = asyncio.ensure_future(here.client.settled("t"))
            here.daemon.kill()
        here.keeper.release()
        with running(tree(endpoint=here.daemon.endpoint), tmp_path, name="after"):
            assert await waiting
            here.caches = [arrays for _, arrays in sorted((await here.client.reattach(REACH_S)).items())]
            here.scribble(task_of(kind))
            await here.nothing_was_touched(kind)


IN_A_CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


@pytest.mark.parametrize("where", [(), IN_A_CONTAINER], ids=["here", "in another PID namespace"])
async def test_a_daemon_that_is_seen_beside_its_successor_settles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[str, ...]
) -> None:
    """Somebody has removed the lock and the socket of a suspended daemon, and started another one."""
    if where and os.geteuid() != 0:
        pytest.skip("only root can make a PID namespace")
    async with world(tmp_path, monkeypatch) as here:
        future = await given_up(here, "read")
        with suspended("SIGSTOP", here.daemon.pid) as resume:
            here.keeper.release()
            with noticed_soon():
                assert not (await future).settled
            path = here.daemon.endpoint.removeprefix("ipc://")
            os.unlink(path)
            os.unlink(f"{path}.lock")
            other = tree(endpoint=here.daemon.endpoint)
            other["storage"]["file"] = {"path": str(tmp_path / "other")}
            with contextlib.ExitStack() as stack:
                stack.callback(start(other, tmp_path, name="after", prefix=where).kill)
                boot_id = here.client.boot_id
                await here.client.close()  # else it stays connected to the first one
                await here.client.connect()
                assert here.client.boot_id != boot_id
                assert not await here.client.settled("t", timeout=0.2)
                os.kill(here.daemon.pid, signal.SIGKILL)
                assert await here.client.settled("t", timeout=REACH_S)
                here.scribble(task_of("read"))
                resume()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancelled_submit_raises_when_no_byte_moves_any_more(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path, monkeypatch) as here:
        await here.hold(GATES[kind])
        submitted = asyncio.ensure_future(wait_for(here.client.submit(task_of(kind)), REACH_S))
        await here.arrived()
        submitted.cancel()
        await stopping(here, "t")
        assert not submitted.done()
        here.keeper.release()
        with pytest.raises(asyncio.CancelledError):
            await submitted
        here.scribble(task_of(kind))
        await here.nothing_was_touched(kind)


async def stopping(here: World, task_id: str) -> None:
    """Wait until the daemon has cancelled the task, which runs on to the end of its copy."""

    async def told() -> bool:
        story = await here.client.explain(task_id)
        return "stopping" in str(story)

    for _ in range(1000):
        if await told():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the task was not cancelled")


@pytest.mark.parametrize("side", ["read_all", "write_all"])
async def test_a_handover_that_times_out_gives_its_blocks_back_when_no_byte_moves_any_more(
    side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = list(range(4 * 8))
    async with world(tmp_path, monkeypatch) as here:
        kind = side.removesuffix("_all")
        task = task_of(kind)
        if kind == "read":
            await here.client.write_all("r", tokens, SOURCE)
        await here.hold(GATES[kind])
        call = here.client.read_all if kind == "read" else here.client.write_all
        handed = asyncio.ensure_future(call("r", tokens, task.gpu_block_ids))
        await here.arrived()
        handed.cancel()
        (task_id,) = [row["task_id"] for row in await here.client.tasks("running")]
        await stopping(here, task_id)
        assert not handed.done()
        here.keeper.release()
        with pytest.raises(asyncio.CancelledError):
            await handed
        here.scribble(task)
        await here.nothing_was_touched("read")
        if kind == "write":
            with contextlib.suppress(HandoverFailed):
                await here.client.read_all("r", tokens, CHECK)
                assert snapshot(here.caches, CHECK) == here.original


async def test_a_call_that_is_cancelled_while_the_daemon_is_suspended_ends_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(tmp_path, monkeypatch) as here:
        monkeypatch.setattr(client_module, "CANCEL_SETTLE_S", 0.2)
        await here.hold("scatter")
        submitted = asyncio.ensure_future(here.client.submit(task_of("read")))
        await here.arrived()
        with suspended("SIGSTOP", here.daemon.pid) as resume:
            here.keeper.release()
            submitted.cancel()
            with noticed_soon(), pytest.raises(asyncio.CancelledError):
                await submitted
            assert here.client.unsettled == ["t"]
            assert "it is not known whether the daemon still touches its blocks" in caplog.text
            resume()
            assert await here.client.settled("t")
            here.scribble(task_of("read"))
            await here.nothing_was_touched("read")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_result_that_leaves_a_rank_behind_is_settled_when_the_rank_is_done(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path, monkeypatch, deadline_slack=0.1) as here:
        await here.hold(GATES[kind])
        arrived = asyncio.ensure_future(here.arrived())
        for number in range(100):  # a deadline may pass before the copy has begun
            task = task_of(kind, f"t{number}", timeout=0.5)
            result = await here.client.submit(task)
            assert result.status is Status.EXPIRED
            waiting = asyncio.ensure_future(here.client.settled(task.task_id))
            await asyncio.wait({arrived, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if arrived.done():
                break
        await arrived
        assert not result.settled
        assert not await here.client.settled(task.task_id, timeout=0.2)
        again = await here.client.submit(task)
        assert not again.settled
        here.keeper.release()
        assert await waiting
        here.scribble(task)
        assert (await here.client.submit(task)).settled, "the kept result"
        await here.nothing_was_touched(kind)


async def test_a_daemon_that_stops_with_a_hung_copy_settles_its_task_when_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path, monkeypatch, deadline_slack=0.1, shutdown_timeout=0.5) as here:
        future = await given_up(here, "read")
        process = WatchedProcess.of_pid(here.daemon.pid)
        assert process is not None
        here.daemon.signal(signal.SIGTERM)
        result = await future
        assert not result.settled or process.ended
        assert await here.client.settled("t")
        assert process.ended
        here.scribble(task_of("read"))


async def test_many_tasks_of_a_suspended_daemon_settle_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the daemon lets one client ask for at a time."""
    async with world(tmp_path, monkeypatch) as here:
        await here.hold("scatter")
        futures = [await here.client.push(task_of("read", f"t{i}")) for i in range(300)]
        await here.arrived()
        with suspended("SIGSTOP", here.daemon.pid) as resume:
            with noticed_soon():
                assert not any(result.settled for result in await asyncio.gather(*futures))
            waiting = asyncio.gather(*(here.client.settled(f"t{i}") for i in range(300)))
            resume()
            await here.client.wait_ready(REACH_S)
            await stats_until(here.client, lambda stats: stats["queued"] == 0)
            assert await here.client.match(["x"]) == 0, "it can ask for other things meanwhile"
            assert not waiting.done()
            here.keeper.release()
            assert all(await waiting)
            here.scribble(task_of("read"))
            await here.nothing_was_touched("read")


async def test_a_group_settles_when_every_node_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"cache": {"first_rank": 2, "group_ranks": 4}}
    async with world(tmp_path, monkeypatch, more={"cache": {"group_ranks": 4}}) as here:
        (tmp_path / "second").mkdir()
        other = tree(more=more)
        with running(other, tmp_path / "second") as second:
            async with GroupClient([here.daemon.endpoint, second.endpoint]) as group:
                await attach(group.clients[0])
                await attach(group.clients[1])
                swapped = await group.clients[1].submit(
                    SwapOutTask(task_id="s", gpu_block_ids=SOURCE, cpu_block_ids=HOST)
                )
                assert swapped.status is Status.OK
                await here.hold("scatter")
                submitted = asyncio.ensure_future(group.submit(task_of("swap_in"), settled=True))
                await here.arrived()
                with suspended("SIGSTOP", here.daemon.pid) as resume:
                    here.keeper.release()
                    await until(lambda: submitted.done() or group.clients[0].unsettled)
                    assert not submitted.done()
                    assert not await group.settled("t", timeout=0.2)
                    resume()
                    result = await submitted
                    here.scribble(task_of("swap_in"))
                    assert result.settled
                    assert result.status is Status.FAILED
                    await here.nothing_was_touched("swap_in")
                await here.hold("scatter")
                submitted = asyncio.ensure_future(group.submit(task_of("swap_in", "t2")))
                await here.arrived()  # in one of the two daemons
                await stats_until(here.client, lambda stats: bool(stats["running"]))
                submitted.cancel()
                await stopping(here, "t2")
                assert not submitted.done()
                here.keeper.release()
                with pytest.raises(asyncio.CancelledError):
                    await submitted
                here.scribble(task_of("swap_in"))
                await here.nothing_was_touched("swap_in")


class CacheStatus(enum.Enum):
    SWAP2CPU = 1
    SWAP2GPU = 2
    STORAGE2GPU = 4
    GPU2STORAGE = 5


def fastdeploy_item(kind: str) -> tuple[Any, ...]:
    task: Any = task_of(kind)
    if kind in ("swap_in", "swap_out"):
        event = CacheStatus.SWAP2GPU if kind == "swap_in" else CacheStatus.SWAP2CPU
        return event, "f", ["n"] * 4, task.gpu_block_ids, task.cpu_block_ids
    event = CacheStatus.STORAGE2GPU if kind == "read" else CacheStatus.GPU2STORAGE
    return event, "f", task.keys, task.gpu_block_ids, 30.0


@pytest.mark.parametrize("kind", KINDS)
async def test_fastdeploys_queue_answers_when_the_blocks_are_free(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path, monkeypatch) as here:
        queue = await asyncio.to_thread(EngineCacheQueue, here.daemon.endpoint, num_client=2, client_id=0)
        for rank in range(2):
            await asyncio.to_thread(queue.client.attach, rank)
        await here.hold(GATES[kind])
        queue.put_transfer_task(fastdeploy_item(kind))
        await here.arrived()
        with suspended("SIGSTOP", here.daemon.pid) as resume:
            here.keeper.release()
            with noticed_soon():
                await until(lambda: queue.client.unsettled or not queue.result_queue_empty())
            assert queue.get_transfer_done_signal() is None
            resume()
            assert await asyncio.to_thread(queue.get_transfer_done_signal, REACH_S) is not None
            here.scribble(task_of(kind))
            await here.nothing_was_touched(kind)
        await asyncio.to_thread(queue.close)


async def test_fastdeploys_queue_never_frees_what_is_unsettled_after_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSFERD_SETTLE_TIMEOUT", "0.2")
    async with world(tmp_path, monkeypatch) as here:
        queue = await asyncio.to_thread(EngineCacheQueue, here.daemon.endpoint, num_client=2, client_id=0)
        for rank in range(2):
            await asyncio.to_thread(queue.client.attach, rank)
        await here.hold("scatter")
        queue.put_transfer_task(fastdeploy_item("read"))
        await here.arrived()
        with suspended("SIGSTOP", here.daemon.pid):
            here.keeper.release()
            with noticed_soon():
                await until(lambda: queue.transfer_result("f") is not None)
            told = queue.transfer_result("f")
            assert told is not None
            assert (told.error and told.error.code, told.settled) == ("unsettled", False)
            assert queue.get_transfer_done_signal() is None
            with pytest.raises(TransferError) as refused:
                await asyncio.to_thread(queue.hold)
            assert refused.value.reason == "unsettled"
        await until(lambda: queue.connected)
        await asyncio.to_thread(queue.close)
        assert queue.get_transfer_done_signal() is None


@pytest.mark.parametrize("kind", ["read", "write"])
async def test_vllms_link_answers_when_the_blocks_are_free(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path, monkeypatch) as here:
        finder = DaemonFinder(VLLM, endpoint=here.daemon.endpoint)
        link = Link(finder, "", attach_all)
        assert await asyncio.to_thread(link.wait_ready, REACH_S)
        ended: list[TaskResult] = []
        await here.hold(GATES[kind])
        task = task_of(kind)
        assert isinstance(task, ReadStorageTask | WriteStorageTask)
        link.submit(task, ended.append)
        await here.arrived()
        with suspended("SIGSTOP", here.daemon.pid) as resume:
            here.keeper.release()
            with noticed_soon():
                await until(lambda: not link.ready)
            assert not ended
            resume()
            await until(lambda: ended)
            here.scribble(task)
            assert ended[0].settled
            await here.nothing_was_touched(kind)
        await asyncio.to_thread(link.close, 10.0)


async def attach_all(client: Client) -> None:
    for rank in range(2):
        await client.attach(rank)


def subprocess_fails(command: list[str]) -> bool:
    return shutil.which(command[0]) is None or subprocess.run(command, capture_output=True).returncode != 0


async def test_a_daemon_in_another_pid_namespace_is_seen_by_its_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says of its process means nothing here; the kernel's word about its socket does."""
    prefix = ("unshare", "--pid", "--fork", "--kill-child")
    if subprocess_fails([*prefix, "true"]):
        pytest.skip("no PID namespace can be made here")
    async with world(tmp_path, monkeypatch, prefix=prefix) as here:
        future = await given_up(here, "read")
        pid = listener_of(here.daemon.endpoint)
        assert pid not in (0, here.daemon.pid)
        os.kill(pid, signal.SIGSTOP)
        here.keeper.release()
        with noticed_soon():
            assert not (await future).settled
        assert not await here.client.settled("t", timeout=0.2)
        waiting = asyncio.ensure_future(here.client.settled("t"))
        os.kill(pid, signal.SIGKILL)
        assert await waiting
        here.scribble(task_of("read"))
