"""The wire over real sockets: garbage, vanished peers, oversize, endpoints in use, many clients, a killed daemon."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.support.memory_core import MemoryCore, serve
from tests.support.named_peers import send
from tests.support.waits import until
from transferd.client.client import Client
from transferd.config import ServerSection
from transferd.errors import Closed, ConfigError, TransferError
from transferd.runtime.compat import Self, timeout
from transferd.tasks import Status, SwapOutTask, TaskResult, WriteStorageTask
from transferd.wire import protocol as wire
from transferd.wire.transport import ZmqClientTransport, ZmqServerTransport

MAX_MESSAGE = 64 * 1024


class Daemon:
    """A server with a core in memory, on real sockets."""

    def __init__(self, endpoint: str | list[str], boot_id: str = "boot-1", **options: Any) -> None:
        section = ServerSection(endpoint=endpoint, **{"max_message": MAX_MESSAGE, **options})
        self.core = MemoryCore(boot_id)
        self.transport = ZmqServerTransport(section)
        self.server = serve(self.transport, self.core, max_message=section.max_message)

    async def __aenter__(self) -> Self:
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.close()

    @property
    def rejects(self) -> dict[str, int]:
        rejects: dict[str, int] = self.server.statistics().rejects
        return rejects


@pytest.fixture(params=["ipc", "tcp"])
async def daemon(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Daemon]:
    endpoint = f"ipc://{tmp_path}/d.sock" if request.param == "ipc" else "tcp://127.0.0.1:*"
    async with Daemon(endpoint) as running:
        yield running


@pytest.fixture
async def client(daemon: Daemon) -> AsyncIterator[Client]:
    async with Client(daemon.transport.endpoints[0]) as connected:
        yield connected


def task(task_id: str, **more: Any) -> SwapOutTask:
    return SwapOutTask(task_id=task_id, gpu_block_ids=[1], cpu_block_ids=[2], **more)


class Raw:
    """A pyzmq DEALER that says what it likes. Its reads are bounded."""

    def __init__(self, endpoint: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)

    async def replies(self, count: int) -> list[wire.ReplyEnvelope]:
        found: list[wire.ReplyEnvelope] = []

        def read() -> bool:
            while len(found) < count and self.socket.poll(0):
                found.append(wire.decode_reply(self.socket.recv(zmq.DONTWAIT)))
            return len(found) == count

        await until(read, within=60)
        return found

    def close(self) -> None:
        self.socket.close(0)
        self.context.term()


@pytest.fixture
def raw(daemon: Daemon) -> Iterator[Raw]:
    peer = Raw(daemon.transport.endpoints[0])
    yield peer
    peer.close()


# --- good and bad messages ------------------------------------------------------------------------


async def test_tasks_go_there_and_results_come_back(client: Client, daemon: Daemon) -> None:
    results = await asyncio.gather(*(client.submit(task(f"t{i}")) for i in range(1000)))
    assert [r.task_id for r in results] == [f"t{i}" for i in range(1000)]
    assert {r.status for r in results} == {Status.OK}
    daemon.core.hold = True
    future = await client.push(task("held"))
    assert not future.done()
    daemon.core.finish("held")
    assert (await future).block_ids == [1]
    assert (await client.ping())[0] == "boot-1"


async def test_garbage_is_answered_counted_and_disturbs_nobody(daemon: Daemon, client: Client, raw: Raw) -> None:
    good = wire.encode_request(3, task("t"))
    for bad in (
        b"",
        b"\x00",
        b"GET / HTTP/1.1\r\n\r\n",
        good[:-1],
        b"\x02" + good[1:],
        random.Random(7).randbytes(1000),
        b"\x01\x91" * 9,
    ):
        raw.socket.send(bad)
    raw.socket.send_multipart([good, good])
    raw.socket.send(good)
    replies = await raw.replies(9)
    assert all(isinstance(reply.body, wire.Refused) for reply in replies[:-1])
    assert isinstance(replies[-1].body, wire.Result), "the connection stays"
    assert sum(daemon.rejects.values()) == 8
    assert set(daemon.rejects) <= {"malformed", "unsupported_version"}
    assert (await client.submit(task("honest"))).status is Status.OK


async def test_a_bug_behind_a_request_is_answered_and_disturbs_nobody(
    daemon: Daemon, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(daemon.core, "stats", broken)
    with pytest.raises(TransferError, match="ZeroDivisionError: a bug") as refused:
        await client.stats()
    assert refused.value.reason == "internal"
    monkeypatch.setattr(daemon.core, "submit", broken)
    result = await client.submit(task("t"))
    assert (result.status, result.error and result.error.code) == (Status.FAILED, "internal")
    monkeypatch.undo()
    assert (await client.submit(task("u"))).status is Status.OK


async def test_a_peer_that_speaks_no_zeromq_is_shut_out(daemon: Daemon, client: Client) -> None:
    endpoint = daemon.transport.endpoints[0]
    if endpoint.startswith("ipc"):
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(endpoint.removeprefix("ipc://"))
    else:
        peer = socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2])))
    with peer:
        peer.sendall(random.Random(7).randbytes(64) * 100)
        assert (await client.submit(task("honest"))).status is Status.OK


async def test_a_message_past_the_limit_is_answered_and_one_far_past_it_is_cut(
    daemon: Daemon, client: Client, raw: Raw
) -> None:
    big = WriteStorageTask(task_id="big", keys=["k" * (2 * MAX_MESSAGE)], gpu_block_ids=[0])
    raw.socket.send(wire.encode_request(5, big))
    (reply,) = await raw.replies(1)
    assert isinstance(reply.body, wire.Result)
    result = reply.body.result
    assert (reply.seq, result.task_id, result.status) == (5, "big", Status.REJECTED)
    assert result.error is not None
    assert result.error.code == "too_large"
    assert daemon.rejects == {"too_large": 1}
    messages = daemon.server.statistics().messages
    raw.socket.send(bytes(18 * 1024 * 1024))
    raw.socket.send(wire.encode_request(6, wire.Hello()))  # waits for the connection that libzmq makes anew
    (reply,) = await raw.replies(1)
    assert reply.seq == 6
    assert daemon.server.statistics().messages - messages < 10, "the huge one was never read"
    assert (await client.submit(task("honest"))).status is Status.OK


async def test_a_pusher_that_vanishes_costs_nothing(daemon: Daemon, client: Client, raw: Raw) -> None:
    daemon.core.hold = True
    raw.socket.send(wire.encode_request(1, task("orphan"), ack=True))
    await raw.replies(1)
    pusher = list(daemon.server.clients)[-1]  # the honest client was there before
    raw.close()
    await until(lambda: _gone(daemon, pusher, "orphan"), within=60)
    assert daemon.server.statistics().undeliverable > 0
    daemon.core.hold = False
    assert (await client.submit(task("honest"))).status is Status.OK


def _gone(daemon: Daemon, peer: bytes, task_id: str) -> bool:
    """Push and finish one more for the vanished peer, until its connection is known to be away."""
    if task_id in daemon.core.held:
        daemon.core.finish(task_id)
    daemon.server.clients.deliver(peer, 1, TaskResult(task_id=task_id, status=Status.OK))
    return bool(daemon.server.statistics().undeliverable)


async def test_many_clients_get_their_own_results(daemon: Daemon) -> None:
    endpoint = daemon.transport.endpoints[0]

    async def work(number: int) -> None:
        async with Client(endpoint) as mine:
            results = await asyncio.gather(*(mine.submit(task(f"{number}-{i}")) for i in range(50)))
            assert [r.task_id for r in results] == [f"{number}-{i}" for i in range(50)]

    await asyncio.gather(*(work(number) for number in range(24)))
    await until(lambda: daemon.server.statistics().clients == 0, within=60)
    assert daemon.core.ran.total() == 24 * 50


async def test_twenty_thousand_pushed_at_once_are_all_answered(daemon: Daemon, client: Client) -> None:
    """More than any high-water mark: nothing is dropped on either side."""
    results = await asyncio.gather(*(client.submit(task(f"t{i}")) for i in range(20_000)))
    assert len(results) == 20_000
    assert daemon.server.statistics().undeliverable == 0


STOPPED = """
import asyncio, os, signal, sys
from transferd.client.client import Client

async def main(endpoint):
    async with Client(endpoint) as client:
        asking = asyncio.ensure_future(client.pause())
        await asyncio.sleep(0.1)
        client._conversation._greet()  # a Hello whose answer comes while nobody reads
        os.kill(os.getpid(), signal.SIGSTOP)
        await asyncio.sleep(0.5)
        assert not asking.done() and client.connected, "lost"
        await client.resume()
        await asking

asyncio.run(main(sys.argv[1]))
"""


async def test_an_engine_that_was_stopped_does_not_take_the_daemon_for_dead(tmp_path: Path) -> None:
    async with Daemon(f"ipc://{tmp_path}/d.sock") as daemon:
        engine = subprocess.Popen([sys.executable, "-c", STOPPED, daemon.transport.endpoints[0]])  # noqa: ASYNC220
        await until(lambda: Path(f"/proc/{engine.pid}/stat").read_text().split(") ")[1].startswith("T"), within=60)
        await asyncio.sleep(4)
        engine.send_signal(signal.SIGCONT)
        await until(lambda: engine.poll() is not None, within=60)
        assert engine.returncode == 0


# --- endpoints ------------------------------------------------------------------------------------


async def test_one_daemon_listens_on_several_endpoints(tmp_path: Path) -> None:
    async with Daemon([f"ipc://{tmp_path}/a.sock", f"ipc://{tmp_path}/b.sock", "tcp://127.0.0.1:*"]) as daemon:
        assert not daemon.transport.endpoints[2].endswith("*")
        for endpoint in daemon.transport.endpoints:
            async with Client(endpoint) as client:
                assert (await client.submit(task(endpoint))).status is Status.OK


async def test_a_second_daemon_on_the_same_socket_refuses_and_the_first_is_not_disturbed(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/d.sock"
    async with Daemon(endpoint) as first:
        second = Daemon(endpoint, "boot-2")
        with pytest.raises(ConfigError, match=r"^server\.endpoint: is in use by another daemon \(.*d\.sock'\)$"):
            await second.server.start()
        await second.server.close()
        async with Client(endpoint) as client:
            assert client.boot_id == first.core.boot_id
    async with Daemon(endpoint, "boot-3"), Client(endpoint) as client:
        assert client.boot_id == "boot-3"


async def test_a_tcp_port_in_use_is_one_clear_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        daemon = Daemon([f"ipc://{tmp_path}/d.sock", endpoint])
        with pytest.raises(ConfigError, match=rf"^server\.endpoint: is in use \('{endpoint}'\)$"):
            await daemon.server.start()
    assert not (tmp_path / "d.sock").exists(), "what was bound before is given back"
    async with Daemon(f"ipc://{tmp_path}/d.sock"):
        pass


async def test_a_stale_socket_file_does_not_hinder(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with Daemon(f"ipc://{path}"), Client(f"ipc://{path}") as client:
        assert (await client.submit(task("t"))).status is Status.OK
    assert not path.exists(), "a daemon removes its own socket"


async def test_a_file_that_is_no_socket_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(ConfigError, match="exists and is not a socket"):
        await Daemon(f"ipc://{path}").server.start()
    assert path.read_text() == "data"


@pytest.mark.parametrize("directory", ["missing/too", "file"])
async def test_a_socket_that_cannot_be_made_is_one_clear_line(tmp_path: Path, directory: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"^server\.endpoint: cannot create the lock file .*\.lock: .* \('ipc://.*'\)$"
    ):
        await Daemon(f"ipc://{tmp_path}/{directory}/d.sock").server.start()


@pytest.mark.parametrize("mode", ["0600", "0660", "0666"])
async def test_the_socket_has_the_mode_that_was_asked_for(tmp_path: Path, mode: str) -> None:
    async with Daemon(f"ipc://{tmp_path}/d.sock", socket_mode=mode):
        assert (tmp_path / "d.sock").stat().st_mode & 0o777 == int(mode, 8)


async def test_an_abstract_socket_needs_no_file(tmp_path: Path) -> None:
    endpoint = f"ipc://@transferd-test-{os.getpid()}-{tmp_path.name}"
    async with Daemon(endpoint), Client(endpoint) as client:
        assert (await client.submit(task("t"))).status is Status.OK


# --- transports -----------------------------------------------------------------------------------


async def test_answers_sent_before_a_close_are_read_after_it(tmp_path: Path) -> None:
    """A daemon that shuts down answers, then closes; the client may have had no turn in between."""
    endpoint = f"ipc://{tmp_path}/t.sock"
    server, client = ZmqServerTransport(ServerSection(endpoint=endpoint)), ZmqClientTransport(endpoint)
    peers: list[bytes] = []
    got: list[bytes] = []
    server.start(lambda peer, _: peers.append(peer))
    client.start(lambda payload: got.append(bytes(payload)))
    client.send(b"hello")
    await until(lambda: bool(peers), within=60)
    for number in range(100):
        assert send(server, peers[0], bytes([number]))
    server.close()
    await until(lambda: len(got) == 100, within=60)
    assert got == [bytes([number]) for number in range(100)]
    client.close()
    with pytest.raises(Closed):
        client.send(b"late")
    assert not send(server, peers[0], b"late")


async def test_a_callback_that_raises_loses_one_message_and_no_other(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/t.sock"
    server, client = ZmqServerTransport(ServerSection(endpoint=endpoint)), ZmqClientTransport(endpoint)
    got: list[bytes] = []
    raised: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context["exception"]))

    def on_message(_: bytes, payload: bytes | memoryview) -> None:
        got.append(bytes(payload))
        if payload == b"3":
            raise ZeroDivisionError

    server.start(on_message)
    client.start(lambda payload: got.append(bytes(payload)))
    for number in range(200):
        client.send(str(number).encode())
    await until(lambda: len(got) == 200, within=60)
    assert [type(error) for error in raised] == [ZeroDivisionError]
    client.close()
    server.close()


async def test_closing_a_client_of_a_stopped_daemon_does_not_hang(tmp_path: Path) -> None:
    with daemon_process(tmp_path) as process:
        client = Client(process.endpoint)
        await client.connect()
        process.send(signal.SIGSTOP)
        before = time.monotonic()
        await client.close()
        assert time.monotonic() - before < 20
        process.send(signal.SIGCONT)


# --- a process that dies --------------------------------------------------------------------------

SERVE = """
import asyncio, sys
from transferd.config import ServerSection
from tests.support.memory_core import MemoryCore, serve
from transferd.wire.transport import ZmqServerTransport

async def main(endpoint, boot_id):
    core = MemoryCore(boot_id, hold=True)
    server = serve(ZmqServerTransport(ServerSection(endpoint=endpoint)), core)
    await server.start()
    print("listening", flush=True)
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


class DaemonProcess:
    def __init__(self, directory: Path, boot_id: str) -> None:
        self.endpoint = f"ipc://{directory}/p.sock"
        command = [sys.executable, "-c", SERVE, self.endpoint, boot_id]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"listening\n"

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()


def daemon_process(directory: Path, boot_id: str = "boot-1") -> DaemonProcess:
    return DaemonProcess(directory, boot_id)


async def test_a_killed_daemon_ends_pending_futures_and_its_successor_serves(tmp_path: Path) -> None:
    with daemon_process(tmp_path) as first:
        async with Client(first.endpoint) as client:
            pending = [await client.push(task(f"t{i}", timeout=3600)) for i in range(100)]
            asking = asyncio.ensure_future(client.pause())
            await asyncio.sleep(0.05)
            first.send(signal.SIGKILL)
            async with timeout(30):  # 5, and a slow machine; tests/sim/test_conversation.py measures exactly
                results = await asyncio.gather(*pending)
            assert {(r.status, r.error and r.error.code) for r in results} == {(Status.FAILED, "daemon_lost")}
            error = (await asyncio.gather(asking, return_exceptions=True))[0]
            assert getattr(error, "reason", None) == "daemon_lost"
            with daemon_process(tmp_path, "boot-2"):
                await client.wait_ready(60)
                assert client.boot_id == "boot-2"
                assert (await client.stats())["boot_id"] == "boot-2"


async def test_a_daemon_that_is_stopped_and_goes_on_within_3_seconds_loses_nothing(tmp_path: Path) -> None:
    with daemon_process(tmp_path) as process:
        async with Client(process.endpoint) as client:
            future = await client.push(task("t"))
            process.send(signal.SIGSTOP)
            asking = asyncio.ensure_future(client.match(["a", "b"]))
            await asyncio.sleep(1.5)
            process.send(signal.SIGCONT)
            assert await asking == 2
            assert not future.done()
            assert await client.cancel("t")
            assert (await future).status is Status.CANCELLED


# --- without a client, without work ---------------------------------------------------------------


async def test_an_idle_daemon_and_its_client_do_next_to_nothing(daemon: Daemon, client: Client) -> None:
    """Counted in wake-ups for its connection, of which two heartbeats need a few."""
    acceptor = daemon.transport._acceptor
    assert acceptor is not None
    wake_ups = 0

    def counted() -> None:
        nonlocal wake_ups
        wake_ups += 1
        acceptor._ready()

    asyncio.get_running_loop().add_reader(acceptor._epoll.fileno(), counted)
    await asyncio.sleep(2.2)
    assert 1 <= wake_ups <= 20
