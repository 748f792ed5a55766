"""What a caller gets wrong is said to the caller at once, before anything is pushed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.client.test_many_tasks import connected, ended
from tests.client.test_session import Recorder
from tests.support.simulation.clock import SimClock
from tests.support.simulation.loop import SimLoop, simulate
from tests.support.waits import until
from transferd import Client, ReadStorageTask, Status, SwapOutTask
from transferd.client.launch import running
from transferd.errors import Closed, ConfigError, ConnectRefused, RequestError
from transferd.tasks import FAILED, ErrorInfo
from transferd.wire import protocol as wire

TASK = SwapOutTask(task_id="t", gpu_block_ids=[1], cpu_block_ids=[2])


@pytest.mark.parametrize("named", [{"engine": "x" * 65}, {"engine": 7}, {"token": "t" * 65}, {"generation": "g" * 257}])
def test_a_name_that_no_hello_may_carry_makes_no_client(named: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is text of at most"):
        Client("ipc:///d", **named)


async def test_a_refused_hello_reaches_who_waits_and_later_ones_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    daemon = Recorder()
    client = Client("ipc:///d", transport=daemon, connect_timeout=60.0)
    entering = asyncio.ensure_future(client.connect())
    await until(lambda: daemon.hellos)
    refused = wire.Refused(ErrorInfo("bad_value", "no such field"), permanent=True)
    daemon.say(daemon.hellos[-1], refused)
    with pytest.raises(ConnectRefused, match="no such field") as error:
        await entering
    assert error.value.reason == "bad_value"
    assert caplog.text.count("the daemon refuses this client: no such field (bad_value)") == 1


async def test_a_count_that_a_daemon_would_refuse_is_refused_here() -> None:
    daemon = Recorder()
    async with connected(daemon) as client:
        for reason, blocks in (("because", 1), (FAILED, -1), (FAILED, "1")):
            with pytest.raises(RequestError, match="expected one of"):
                client.count_not_stored(reason, blocks)  # type: ignore[arg-type]
        client.count_not_stored(FAILED, 0)
        client.count_not_stored(FAILED, 2**40)
        client._conversation._greet()
        hello = daemon.said[-1].body
        assert isinstance(hello, wire.Hello)
        assert hello.not_stored == {FAILED: 2**31 - 1}, "the rest goes with the next ones"


async def test_one_text_is_no_list_of_keys() -> None:
    daemon = Recorder()
    async with connected(daemon) as client:
        for call in (
            client.match("abc"),
            client.exists("abc"),
            client.locate(keys="abc"),
            client.pin("abc", 1.0),
            client.unpin("abc"),
            client.purge("abc"),
            client.prefetch("abc"),
        ):
            with pytest.raises(RequestError, match="keys must be a list of keys, not 'abc'"):
                await call
        assert daemon.others == []


@pytest.mark.parametrize("limit", ["5", float("nan"), None])
async def test_a_limit_that_is_none_is_found_before_the_push(limit: Any) -> None:
    daemon = Recorder()
    async with connected(daemon) as client:
        call = asyncio.ensure_future(client.submit(TASK, settled=True, settle_timeout=limit))
        if limit is None:
            await until(lambda: daemon.others)
            daemon.say(daemon.others[-1].seq, ended("t", Status.OK))
            assert (await call).status is Status.OK
            return
        with pytest.raises(ConfigError, match="settle_timeout"):
            await call
        assert daemon.others == []


class Attentive(Recorder):
    """Answers each Hello by itself."""

    def send(self, payload: bytes) -> bool:
        taken = super().send(payload)
        if isinstance(self.said[-1].body, wire.Hello):
            asyncio.get_running_loop().call_soon(self.welcome)
        return taken


def test_a_question_may_take_as_long_as_its_caller_says() -> None:
    async def main(loop: SimLoop) -> None:
        daemon = Attentive()
        async with Client("sim://daemon", transport=daemon, clock=SimClock(loop)) as client:
            asking = asyncio.ensure_future(client.match(["a"], timeout=90.0))
            await asyncio.sleep(80.0)
            assert not asking.done()
            daemon.say(daemon.others[-1].seq, wire.Value(1))
            assert await asking == 1

    simulate(main, 0)


async def test_block_ids_may_be_a_range() -> None:
    task = ReadStorageTask(task_id="r", keys=["a", "b"], gpu_block_ids=range(3, 5))  # type: ignore[arg-type]
    body = wire.decode_request(wire.encode_request(1, task)).body
    assert isinstance(body, ReadStorageTask)
    assert body.gpu_block_ids == [3, 4]


def test_another_loop_is_refused_and_nothing_is_pushed() -> None:
    daemon = Recorder()

    async def at_home() -> Client:
        made = connected(daemon)
        return await made.__aenter__()

    async def away(client: Client) -> None:
        with pytest.raises(RequestError, match="belongs to the event loop") as refused:
            await client.submit(TASK)
        assert refused.value.reason == "wrong_loop"
        with pytest.raises(RequestError, match="belongs to the event loop"):
            await client.close()

    home = asyncio.new_event_loop()
    try:
        client = home.run_until_complete(at_home())
        asyncio.run(away(client))
        assert daemon.others == []
        home.run_until_complete(client.close())
    finally:
        home.close()


def test_a_close_that_is_refused_forgets_nothing() -> None:
    daemon, home = Recorder(), asyncio.new_event_loop()
    try:
        client = home.run_until_complete(connected(daemon).__aenter__())
        client._holds._held.add(held := wire.Pause("me"))
        with pytest.raises(RequestError, match="belongs to the event loop"):
            asyncio.run(client.close())
        assert client._holds.again() == [held], "which a new session repeats"
        home.run_until_complete(client.close())
        assert client._holds.again() == []
    finally:
        home.close()


async def test_settled_in_a_forked_child_raises_as_all_else_does() -> None:
    daemon = Recorder()
    async with connected(daemon) as client:
        child = os.fork()
        if not child:
            code = 1
            try:
                client.settled("unknown").send(None)
            except Closed:
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0  # noqa: ASYNC222 - it ends at once


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running({"cache": {"ranks": 1, "layers": 1, "device_blocks": 4}}, tmp_path_factory.mktemp("d")) as daemon:
        yield daemon.endpoint


async def test_after_wait_ready_the_daemon_that_answered_is_there(endpoint: str) -> None:
    async with Client(endpoint) as client:
        greeted: list[int] = []
        welcomed = client._conversation._welcomed

        def heard(seq: int, welcome: wire.Welcome) -> None:
            greeted.append(seq)
            welcomed(seq, welcome)

        client._conversation._welcomed = heard  # type: ignore[method-assign]
        await client.wait_ready()
        assert greeted, "it asked anew"
