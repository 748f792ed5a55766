"""CURVE: a daemon that proves who it is, lets in only the keys it knows, and says what is wrong with a key file."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from tests.support.memory_core import MemoryCore
from transferd.client.client import Client
from transferd.config import CurveSection, ServerSection
from transferd.daemon.server import Server
from transferd.errors import ConfigError, ConnectTimeout
from transferd.tasks import Status, SwapOutTask
from transferd.wire.curve import ClientCurve
from transferd.wire.transport import ZmqClientTransport, ZmqServerTransport

SERVER_PUBLIC, SERVER_SECRET = zmq.curve_keypair()
KNOWN, STRANGER = zmq.curve_keypair(), zmq.curve_keypair()
TASK = SwapOutTask(task_id="t", gpu_block_ids=[1], cpu_block_ids=[2])


@pytest.fixture
def section(tmp_path: Path) -> CurveSection:
    (tmp_path / "secret").write_bytes(SERVER_SECRET + b"\n")
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients" / "engine").write_bytes(KNOWN[0])
    return CurveSection(secret_key_file=str(tmp_path / "secret"), client_keys_dir=str(tmp_path / "clients"))


class Daemon:
    def __init__(self, curve: CurveSection) -> None:
        core = MemoryCore()
        self.transport = ZmqServerTransport(ServerSection(endpoint="tcp://127.0.0.1:*", curve=curve))
        self.server = Server(self.transport, core)
        core.deliver = self.server.deliver

    def client(self, curve: ClientCurve | None, timeout: float) -> Client:
        endpoint = self.transport.endpoints[0]
        return Client(endpoint, connect_timeout=timeout, transport=ZmqClientTransport(endpoint, curve=curve))


async def test_a_known_key_is_let_in_and_others_are_not(section: CurveSection) -> None:
    daemon = Daemon(section)
    await daemon.server.start()
    async with daemon.client(ClientCurve(SERVER_PUBLIC, *KNOWN), 10) as client:
        assert (await client.submit(TASK)).status is Status.OK
    for stranger in (ClientCurve(SERVER_PUBLIC, *STRANGER), ClientCurve(STRANGER[0], *KNOWN), None):
        with pytest.raises(ConnectTimeout, match="nobody answers"):
            await daemon.client(stranger, 0.5).connect()
    gate = daemon.transport._gate
    assert gate is not None
    assert gate.refused >= 1
    await daemon.server.close()


async def test_keys_are_for_tcp_and_on_a_unix_socket_of_the_same_daemon_nobody_needs_any(
    section: CurveSection, tmp_path: Path
) -> None:
    unix, window = f"ipc://{tmp_path}/door", f"ipc://{tmp_path}/window"
    core = MemoryCore()
    listens = ServerSection(endpoint=["tcp://127.0.0.1:*", unix], observer_endpoint=window, curve=section)
    transport = ZmqServerTransport(listens)
    server = Server(transport, core)
    core.deliver = server.deliver
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
    with pytest.raises(ConnectTimeout, match="nobody answers"):
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
