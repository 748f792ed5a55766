"""The doctor compares a daemon and an engine: each difference is made by a real process in a namespace of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from transferd.cli.doctor.checks import Level
from transferd.cli.doctor.sharing import ProcessFacts, look_at, sharing

DAEMON = os.getpid()


@contextlib.contextmanager
def engine(*prefix: str, before: str = "true") -> Iterator[int]:
    """The pid of a process that runs until the end of the block, after `before`, under `prefix`."""
    command = [*prefix, "sh", "-c", f"{before} && echo up && exec cat"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            if process.stdout.readline() != "up\n":
                pytest.skip(f"not allowed here: {process.stderr.read().strip()}")
            inside = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            yield int(inside[0]) if inside else process.pid
        finally:
            process.stdin.close()


def test_a_process_of_the_same_user_and_container_shares_everything() -> None:
    with engine() as pid:
        for device in ("cuda", "shm"):
            finding = sharing(device, look_at(DAEMON), look_at(pid))
            assert (finding.level, finding.remedy) == (Level.OK, "")
            assert finding.name == f"engine {pid}"


OWN_SHM = ["unshare", "--mount", "--propagation", "private"]
ANOTHER = "setpriv --reuid=64123 --regid=64123 --clear-groups"
DIFFERENT = [
    ("shm", OWN_SHM, "mount -t tmpfs none /dev/shm", Level.FAIL, "another /dev/shm: memory is found there by name"),
    ("cuda", OWN_SHM, "mount -t tmpfs none /dev/shm", Level.WARN, "another /dev/shm: the older CUDA event"),
    ("shm", OWN_SHM, "mount -t tmpfs none /dev", Level.FAIL, "another /dev/shm"),
    ("cuda", ["unshare", "--pid", "--fork"], "true", Level.FAIL, "another PID namespace: CUDA IPC does not work"),
    ("shm", ["unshare", "--pid", "--fork"], "true", Level.WARN, "another PID namespace: its death is not seen"),
    ("cuda", ["unshare", "--ipc"], "true", Level.WARN, "another IPC namespace"),
    ("cuda", ["unshare", "--user", "--map-root-user"], "true", Level.WARN, "another user namespace"),
    ("cuda", ANOTHER.split(), "true", Level.WARN, "user 64123, and the daemon is"),
]  # fmt: skip


@pytest.mark.parametrize(("device", "prefix", "before", "level", "told"), DIFFERENT)
def test_each_difference_is_found_and_has_a_remedy(
    device: str, prefix: list[str], before: str, level: Level, told: str
) -> None:
    with engine(*prefix, before=before) as pid:
        finding = sharing(device, look_at(DAEMON), look_at(pid))
    assert (finding.level, told in finding.found) == (level, True), finding
    assert finding.remedy
    assert "\n" not in finding.remedy


def test_the_remedy_is_for_the_worst_of_several_differences() -> None:
    with engine("unshare", "--ipc", "--pid", "--fork") as pid:
        finding = sharing("cuda", look_at(DAEMON), look_at(pid))
    assert finding.level is Level.FAIL
    assert "PID namespace" in finding.found
    assert "IPC namespace" in finding.found
    assert "--pid=host" in finding.remedy


def test_differences_irrelevant_to_shared_memory_are_no_problem() -> None:
    for prefix in (["unshare", "--ipc"], ["setpriv", "--reuid=64123"]):
        with engine(*prefix) as pid:
            assert sharing("shm", look_at(DAEMON), look_at(pid)).level is Level.OK


def test_a_process_that_cannot_be_seen_is_a_warning() -> None:
    with engine() as ended:
        pass
    for pid, told in ((0, "that cannot be seen from here"), (ended, "there is no such process here")):
        finding = sharing("cuda", look_at(DAEMON), look_at(pid))
        assert (finding.level, told in finding.found) == (Level.WARN, True)
        assert "as root" in finding.remedy
    hidden = ProcessFacts(1, problem="it belongs to another user: run the doctor as root")
    assert sharing("shm", hidden, look_at(DAEMON)).level is Level.WARN


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_users_process_is_hidden() -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.setuid(64123)
        os.write(writing, look_at(os.getppid()).problem.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as told:
        assert told.read().startswith("it belongs to another user")
