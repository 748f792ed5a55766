"""Who listens on an endpoint, and whether it wants the CPU or waits in the kernel: with real processes."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from transferd.wire import obstacle as listener
from transferd.wire.obstacle import listener_of, wants_machine

pytestmark = pytest.mark.one_loop

LISTEN = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1].replace("@", "\\0"))
listener.listen()
memory = os.urandom(1 << 24) if sys.argv[2] == "has much memory" else b""
print("listening", flush=True)
while sys.argv[2] == "works" or memory: pass
if sys.argv[2] != "waits":
    # As if it waited for a disk, a parent waits in the kernel until its child has called exec. This child opens a FIFO
    # before, and so waits, too.
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, sys.argv[2], os.O_RDONLY, 0)])
sys.stdin.read()
"""


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def listen(started: list[subprocess.Popen[bytes]], address: str, what: str) -> int:
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", LISTEN, address, what], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    started.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == b"listening\n"
    return process.pid


def comes_to(pid: int, wants: bool) -> bool:
    """Whether it soon wants the CPU, or does not: it may be on its way to its loop or its read, or wait for a page."""
    give_up = time.monotonic() + 60
    while not (found := wants_machine(pid) is wants) and time.monotonic() < give_up:
        time.sleep(0)  # it may need this CPU to get there
    return found


def test_a_process_that_works_wants_the_cpu_until_it_is_stopped_or_dies(
    listening: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    address = str(tmp_path / "s")
    pid = listen(listening, address, "works")
    assert listener_of(f"ipc://{address}") == pid
    assert comes_to(pid, True)
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    assert listener_of(f"ipc://{address}") == pid, "the kernel still accepts for it"
    assert not wants_machine(pid)
    os.kill(pid, signal.SIGKILL)
    listening[0].wait(20)
    assert listener_of(f"ipc://{address}") == 0
    assert not wants_machine(pid)


def test_a_process_that_waits_for_something_else_does_not(
    listening: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    address = f"@transferd-test-{os.getpid()}-{tmp_path.name}"
    pid = listen(listening, address, "waits")
    assert listener_of(f"ipc://{address}") == pid
    assert comes_to(pid, False)


def test_a_process_that_waits_in_the_kernel_does(listening: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    pid = listen(listening, str(tmp_path / "s"), str(fifo))
    assert all(comes_to(pid, True) for _ in range(3))
    with fifo.open("wb"):
        assert comes_to(pid, False)


def test_a_process_that_was_killed_does_not_even_while_it_writes_its_core(
    listening: list[subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = resource.getrlimit(resource.RLIMIT_CORE)[1]
    if most == 0 or Path("/proc/sys/kernel/core_pattern").read_text().startswith("|"):
        pytest.skip("this machine writes no core into a process's directory")
    monkeypatch.chdir(tmp_path)
    pid = listen(listening, str(tmp_path / "s"), "has much memory")
    assert comes_to(pid, True)
    resource.prlimit(pid, resource.RLIMIT_CORE, (most, most))
    os.kill(pid, signal.SIGABRT)
    told = []
    while listening[0].poll() is None:
        told.append(wants_machine(pid))
    assert False in told, "before it has ended"
    assert True not in told[told.index(False) :]
    for core in tmp_path.glob("core*"):
        core.unlink()


@pytest.mark.parametrize(("flag", "wants"), [(0, True), (listener.EXITING, False), (listener.KILLED, False)])
def test_a_process_that_frees_its_memory_at_its_end_does_not(
    flag: int, wants: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freeing takes a moment only, so what /proc says of this thread gets the flag that it has then."""
    state, rest = Path("/proc/thread-self/stat").read_text().rsplit(") ", 1)
    fields = rest.split(" ")
    assert fields[0] == "R"
    fields[6] = str(int(fields[6]) | flag)
    thread = tmp_path / "17" / "task" / "17"
    thread.mkdir(parents=True)
    (thread / "stat").write_text(f"{state}) {' '.join(fields)}")
    monkeypatch.setattr(listener, "PROC", tmp_path)
    assert wants_machine(17) is wants


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:1", "sim://daemon", "ipc://", "ipc:///nowhere", "ipc://\0", "x"])
def test_an_unknown_listener_has_pid_0_and_wants_no_cpu(endpoint: str) -> None:
    assert listener_of(endpoint) == 0
    assert not wants_machine(0)


def test_a_listener_with_a_full_backlog_is_unknown_and_not_waited_for(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(str(tmp_path / "s"))
        listener.listen(0)
        first.connect(str(tmp_path / "s"))
        assert listener_of(f"ipc://{tmp_path / 's'}") == 0
