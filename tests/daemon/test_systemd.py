"""sd_notify and the watchdog: real datagram sockets, no supervisor needed."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from transferd.daemon.systemd import Notifier, feed_watchdog
from transferd.runtime.compat import timeout


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.setblocking(False)
        yield sock


def heard(sock: socket.socket) -> list[str]:
    messages: list[str] = []
    while True:
        try:
            messages.append(sock.recv(4096).decode())
        except BlockingIOError:
            return messages


def test_states_arrive_as_one_datagram(supervisor: socket.socket) -> None:
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": supervisor.getsockname()})
    notifier.notify("READY=1", "STATUS=serving")
    assert heard(supervisor) == ["READY=1\nSTATUS=serving"]


def test_text_with_line_breaks_stays_within_its_state(supervisor: socket.socket) -> None:
    """Text of clients is in them, and a line of its own is an order to systemd."""
    Notifier(supervisor.getsockname()).notify("READY=1", "STATUS=a\nSTOPPING=1\r\nb\0\udcff")
    assert heard(supervisor) == ["READY=1\nSTATUS=a\\nSTOPPING=1\\r\\nb\\x00\\udcff"]


def test_an_abstract_address_is_understood() -> None:
    name = f"transferd-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0{name}")
        sock.setblocking(False)
        Notifier(f"@{name}").notify("READY=1")
        assert heard(sock) == ["READY=1"]


def test_a_missing_or_absent_supervisor_is_never_fatal(tmp_path: Path) -> None:
    with capture_logs() as logged:
        Notifier.from_environment({}).notify("READY=1")
        assert not logged
        Notifier(str(tmp_path / "nobody")).notify("READY=1")
    assert [line["event"] for line in logged] == ["cannot notify the supervisor"]


def test_reloading_carries_the_time_stamp_that_systemd_asks_for(supervisor: socket.socket) -> None:
    Notifier(supervisor.getsockname()).reloading()
    (message,) = heard(supervisor)
    assert message.startswith("RELOADING=1\nMONOTONIC_USEC=")


async def test_the_watchdog_is_fed_while_the_daemon_is_alive_and_only_then(supervisor: socket.socket) -> None:
    alive = True
    notifier = Notifier(supervisor.getsockname())
    env = {"WATCHDOG_USEC": "20000"}
    watchdog = asyncio.ensure_future(feed_watchdog(notifier, lambda: alive, lambda: "serving", env))
    async with timeout(60):
        while len(messages := heard(supervisor)) == 0:  # noqa: ASYNC110 - a datagram socket has no event here
            await asyncio.sleep(0.005)
    assert set(messages) == {"WATCHDOG=1\nSTATUS=serving"}
    alive = False
    heard(supervisor)
    await asyncio.sleep(0.05)
    assert heard(supervisor) == []
    watchdog.cancel()


@pytest.mark.parametrize("env", [{}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}])
async def test_without_a_watchdog_of_ours_nothing_is_sent(supervisor: socket.socket, env: dict[str, str]) -> None:
    async with timeout(60):
        await feed_watchdog(Notifier(supervisor.getsockname()), lambda: True, lambda: "serving", env)
    assert heard(supervisor) == []
