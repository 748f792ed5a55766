"""CURVE: a daemon that proves who it is, lets in only the keys it knows, and says what is wrong with a key file."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog
import zmq
from zmq.utils import z85

from tests.support.memory_core import MemoryCore, serve
from tests.support.named_peers import send
from tests.support.waits import until
from transferd.client.client import Client
from transferd.config import ServerSection
from transferd.config.sections import CurveSection
from transferd.errors import ConfigError, ConnectTimeout
from transferd.runtime.compat import timeout
from transferd.tasks import Status, SwapOutTask
from transferd.wire.curve import ClientCurve
from transferd.wire.transport import ZmqClientTransport, ZmqServerTransport

SERVER_PUBLIC, SERVER_SECRET = zmq.curve_keypair()
KNOWN, STRANGER = zmq.curve_keypair(), zmq.curve_keypair()
TASK = SwapOutTask(task_id="t", gpu_block_ids=[1], cpu_block_ids=[2])


@pytest.fixture
def section(tmp_path: Path) -> CurveSection:
    (tmp_path / "secret").write_bytes(SERVER_SECRET + b"\n")
    (tmp_path / "secret").chmod(0o640)
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients" / "engine").write_bytes(KNOWN[0])
    return CurveSection(secret_key_file=str(tmp_path / "secret"), client_keys_dir=str(tmp_path / "clients"))


class Daemon:
    def __init__(self, curve: CurveSection) -> None:
        core = MemoryCore()
        self.transport = ZmqServerTransport(ServerSection(endpoint="tcp://127.0.0.1:*", curve=curve))
        self.server = serve(self.transport, core)

    def client(self, curve: ClientCurve | None, timeout: float) -> Client:
        endpoint = self.transport.endpoints[0]
        return Client(endpoint, connect_timeout=timeout, transport=ZmqClientTransport(endpoint, curve=curve))


async def test_a_known_key_is_let_in_and_others_are_not(section: CurveSection) -> None:
    daemon = Daemon(section)
    await daemon.server.start()
    async with daemon.client(ClientCurve(SERVER_PUBLIC, *KNOWN), 10) as client:
        assert (await client.submit(TASK)).status is Status.OK
    for stranger in (ClientCurve(SERVER_PUBLIC, *STRANGER), ClientCurve(STRANGER[0], *KNOWN), None):
        with pytest.raises(ConnectTimeout, match="no daemon answered"):
            await daemon.client(stranger, 0.5).connect()
    await daemon.server.close()


async def seen(logs: list[Any], reason: str) -> list[dict[str, Any]]:
    """The log lines of connections refused for this reason, once there is one."""
    async with timeout(20):
        while not (lines := [line for line in logs if line.get("reason") == reason]):  # noqa: ASYNC110 - a thread logs
            await asyncio.sleep(0.01)
    assert {line["event"] for line in lines} == {"connection refused"}
    return lines


@pytest.mark.parametrize(
    ("stranger", "reason"),
    [
        (ClientCurve(SERVER_PUBLIC, *STRANGER), "unknown_key"),
        (ClientCurve(STRANGER[0], *KNOWN), "handshake_failed"),  # not our key: it talks to somebody else
        (None, "handshake_failed"),
    ],
    ids=["unknown", "wrong server", "none"],
)
async def test_a_refused_key_is_counted_and_logged_with_its_address(
    section: CurveSection, stranger: ClientCurve | None, reason: str
) -> None:
    daemon = Daemon(section)
    await daemon.server.start()
    transport = ZmqClientTransport(daemon.transport.endpoints[0], curve=stranger)
    with structlog.testing.capture_logs() as logs:
        transport.start(lambda _: None)
        try:
            lines = await seen(logs, reason)
        finally:
            transport.close()
    assert lines[0]["peer"].startswith("127.0.0.1")
    assert lines[0]["log_level"] == "warning"
    counted = daemon.transport.refused()
    assert counted[reason] >= 1
    assert [other for other, count in counted.items() if count and other != reason] == []
    await daemon.server.close()


async def test_a_handshake_that_is_played_back_is_refused(section: CurveSection) -> None:
    """What a good client sent, recorded on the wire and sent once more: the server's cookie is another by then."""
    daemon = Daemon(section)
    await daemon.server.start()
    host, _, port = daemon.transport.endpoints[0].removeprefix("tcp://").rpartition(":")
    recorded: list[bytes] = []
    open_ends: list[asyncio.StreamWriter] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, out = await asyncio.open_connection(host, int(port))
        open_ends.extend((writer, out))

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter, keep: list[bytes]) -> None:
            while data := await source.read(65536):
                keep.append(data)
                sink.write(data)
            sink.close()

        await asyncio.gather(copy(reader, out, recorded), copy(there, writer, []))

    between = await asyncio.start_server(relay, "127.0.0.1", 0)
    endpoint = f"tcp://127.0.0.1:{between.sockets[0].getsockname()[1]}"
    transport = ZmqClientTransport(endpoint, curve=ClientCurve(SERVER_PUBLIC, *KNOWN))
    async with Client(endpoint, connect_timeout=10, transport=transport) as client:
        assert (await client.submit(TASK)).status is Status.OK
    async with timeout(60):
        while daemon.server.statistics().clients:  # noqa: ASYNC110 - its Bye is on its way
            await asyncio.sleep(0.01)
    between.close()
    heard = daemon.server.statistics().messages
    _, writer = await asyncio.open_connection(host, int(port))
    open_ends.append(writer)
    with structlog.testing.capture_logs() as logs:
        writer.writelines(recorded)
        lines = await seen(logs, "handshake_failed")
    assert lines[0]["peer"] == "{}:{}".format(*writer.get_extra_info("sockname"))
    assert daemon.server.statistics().messages == heard, "nothing of it was taken for a message"
    for end in open_ends:
        end.close()
        with contextlib.suppress(ConnectionError):
            await end.wait_closed()
    await daemon.server.close()


async def test_keys_are_added_and_revoked_while_it_runs(section: CurveSection) -> None:
    """A revoked key's connection ends; one with a good key comes back by itself and loses nothing."""
    daemon = Daemon(section)
    await daemon.server.start()
    keys = Path(section.client_keys_dir)
    (keys / "other").write_bytes(STRANGER[0])
    assert daemon.transport.read_keys() == (1, 0)
    async with daemon.client(ClientCurve(SERVER_PUBLIC, *STRANGER), 10) as other:
        assert (await other.submit(TASK)).status is Status.OK
        async with daemon.client(ClientCurve(SERVER_PUBLIC, *KNOWN), 10) as engine:
            assert (await engine.submit(TASK)).status is Status.OK
            (keys / "engine").unlink()
            assert daemon.transport.read_keys() == (0, 1)
            again = SwapOutTask(task_id="again", gpu_block_ids=[1], cpu_block_ids=[2])
            assert (await other.submit(again)).status is Status.OK
            lost = SwapOutTask(task_id="lost", gpu_block_ids=[1], cpu_block_ids=[2])
            assert (await engine.submit(lost)).error.code == "daemon_lost"  # type: ignore[union-attr]
    (keys / "other").write_bytes(b"no key")
    with pytest.raises(ConfigError, match=r"client_keys_dir: expected one CURVE key"):
        daemon.transport.read_keys()
    async with daemon.client(ClientCurve(SERVER_PUBLIC, *STRANGER), 10) as other:
        assert (await other.submit(TASK)).status is Status.OK
    await daemon.server.close()


async def test_a_revoked_key_ends_its_own_connections_and_no_others(section: CurveSection) -> None:
    daemon = Daemon(section)
    await daemon.server.start()
    keys = Path(section.client_keys_dir)
    (keys / "other").write_bytes(STRANGER[0])
    daemon.transport.read_keys()
    acceptor = daemon.transport._acceptor
    assert acceptor is not None
    async with (
        daemon.client(ClientCurve(SERVER_PUBLIC, *STRANGER), 10) as other,
        daemon.client(ClientCurve(SERVER_PUBLIC, *KNOWN), 10),
    ):
        before = dict(acceptor.connections)
        assert len(before) == 2
        (keys / "engine").unlink()
        assert daemon.transport.read_keys() == (0, 1)
        [stays] = acceptor.connections.values()
        assert before[stays.peer] is stays
        assert stays.key == z85.decode(STRANGER[0])
        assert (await other.submit(TASK)).status is Status.OK
    await daemon.server.close()


async def test_without_its_package_curve_is_one_clear_line(
    section: CurveSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transferd.wire.curve_server", None)
    with pytest.raises(ConfigError, match=r"^server\.curve: needs the Python package PyNaCl \(pip install pynacl\)"):
        await Daemon(section).server.start()


@pytest.mark.parametrize("size", [0, 1, 254, 255, 256, 65535, 300_000])
async def test_messages_of_every_size_pass_encrypted(section: CurveSection, size: int) -> None:
    transport = ZmqServerTransport(ServerSection(endpoint="tcp://127.0.0.1:*", curve=section))
    transport.start(lambda peer, payload: (send(transport, peer, bytes(payload)), None)[1])
    client = ZmqClientTransport(transport.endpoints[0], curve=ClientCurve(SERVER_PUBLIC, *KNOWN))
    answers: list[bytes] = []
    client.start(lambda payload: answers.append(bytes(payload)))
    sent = [bytes([number]) * size for number in range(5)]
    for payload in sent:
        client.send(payload)
    await until(lambda: len(answers) == len(sent), within=30)
    assert answers == sent
    client.close()
    transport.close()


async def test_a_secret_that_every_user_can_read_is_refused(section: CurveSection) -> None:
    Path(section.secret_key_file).chmod(0o644)
    with pytest.raises(ConfigError, match=r"secret_key_file: is readable by every user \(mode 0644\); run chmod 640"):
        await Daemon(section).server.start()


async def test_a_directory_to_which_every_user_can_add_a_key_is_refused(section: CurveSection) -> None:
    Path(section.client_keys_dir).chmod(0o777)
    with pytest.raises(ConfigError, match=r"client_keys_dir: is writable by every user; run chmod o-w"):
        await Daemon(section).server.start()


async def test_keys_are_for_tcp_and_on_a_unix_socket_of_the_same_daemon_nobody_needs_any(
    section: CurveSection, tmp_path: Path
) -> None:
    unix, window = f"ipc://{tmp_path}/door", f"ipc://{tmp_path}/window"
    core = MemoryCore()
    listens = ServerSection(endpoint=["tcp://127.0.0.1:*", unix], observer_endpoint=window, curve=section)
    transport = ZmqServerTransport(listens)
    server = serve(transport, core)
    await server.start()
    tcp = transport.endpoints[0]
    assert (tcp.startswith("tcp://"), transport.endpoints[1]) == (True, unix)
    for endpoint in (unix, window):
        async with Client(endpoint) as client:
            assert (await client.stats())["boot_id"] == core.boot_id
    keys = ClientCurve(SERVER_PUBLIC, *KNOWN)
    for endpoint in (unix, tcp):
        async with Client(endpoint, transport=ZmqClientTransport(endpoint, curve=keys)) as client:
            assert (await client.submit(TASK)).status is Status.OK
    with pytest.raises(ConnectTimeout, match="no daemon answered"):
        await Client(tcp, connect_timeout=0.5).connect()
    await server.close()


async def test_without_a_directory_of_keys_everybody_who_knows_the_daemon_is_let_in(section: CurveSection) -> None:
    daemon = Daemon(CurveSection(secret_key_file=section.secret_key_file))
    await daemon.server.start()
    async with daemon.client(ClientCurve(SERVER_PUBLIC, *STRANGER), 10) as client:
        assert (await client.submit(TASK)).status is Status.OK
    await daemon.server.close()


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 40, b"~" * 40])
async def test_a_file_that_is_no_key_is_named_and_its_content_is_not(section: CurveSection, content: bytes) -> None:
    Path(section.secret_key_file).write_bytes(content)
    with pytest.raises(ConfigError, match=r"^server\.curve\.secret_key_file: expected one CURVE key .*secret'\)$"):
        await Daemon(section).server.start()


async def test_a_missing_file_or_directory_is_named(section: CurveSection) -> None:
    missing = CurveSection(secret_key_file="/nonexistent/key")
    with pytest.raises(ConfigError, match=r"^server\.curve\.secret_key_file: cannot be read: No such file"):
        await Daemon(missing).server.start()
    missing = CurveSection(secret_key_file=section.secret_key_file, client_keys_dir="/nonexistent")
    with pytest.raises(ConfigError, match=r"^server\.curve\.client_keys_dir: cannot be read: No such file"):
        await Daemon(missing).server.start()


@pytest.mark.parametrize(
    ("key", "found"),
    [
        (b"abc", "3 characters"),
        ("é" * 40, "other characters"),
        (b"~" * 40, "other characters"),
        (None, "NoneType"),
        pytest.param(SERVER_PUBLIC + b"\n", "41 characters", id="drawn at import: the same name for every worker"),
    ],
)
def test_a_clients_key_that_is_none_is_named_and_not_shown(key: Any, found: str) -> None:
    for name in ("server_key", "public_key", "secret_key"):
        keys = {"server_key": SERVER_PUBLIC, "public_key": KNOWN[0], "secret_key": KNOWN[1]} | {name: key}
        with pytest.raises(ConfigError) as caught:
            ClientCurve(**keys)
        assert str(caught.value) == f"curve.{name}: expected a CURVE key of 40 characters in Z85, got {found}"


def test_a_clients_keys_may_be_text() -> None:
    assert ClientCurve(SERVER_PUBLIC.decode(), *KNOWN) == ClientCurve(SERVER_PUBLIC, *KNOWN)  # type: ignore[arg-type]
