"""Limits of descriptors and the three standard ones, in processes whose limits and descriptors a test may change."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys

import pytest

from transferd.errors import ConfigError
from transferd.runtime.descriptors import LEAST, hard_limit, most_connections, never_waiting, raise_limit, spare


def limited(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> list[tuple[int, int]]:
    """A process with these limits. Returns what it sets."""
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: limits.append(both))
    return limits


def test_the_limit_is_raised_in_a_real_process() -> None:
    code = (
        "import os, resource;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096));"
        "from transferd.runtime.descriptors import raise_limit;"
        "raised = raise_limit(); held = [os.open('/dev/null', 0) for _ in range(200)]; print(raised, len(held))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.split() == ["4096", "200"]


def test_a_hard_limit_below_what_a_daemon_needs_is_refused_with_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 64, LEAST - 1)
    with pytest.raises(ConfigError, match=rf"^RLIMIT_NOFILE: the limit must be at least {LEAST} .*\({LEAST - 1}\)"):
        hard_limit()
    limits = limited(monkeypatch, LEAST, LEAST)
    assert raise_limit() == LEAST
    assert limits == [(LEAST, LEAST)], "nothing was set"


@pytest.mark.parametrize("limit", [LEAST, 4096, 1 << 20, resource.RLIM_INFINITY])
@pytest.mark.parametrize("wanted", [1, 4096, 1 << 20])
def test_connections_leave_descriptors_for_files(monkeypatch: pytest.MonkeyPatch, limit: int, wanted: int) -> None:
    limited(monkeypatch, limit, limit)
    connections, others = most_connections(wanted), spare(wanted)
    if limit == resource.RLIM_INFINITY:
        assert (connections, others) == (wanted, wanted)
    else:
        assert connections == wanted or limit // 3 < connections < limit // 2
        assert others <= limit // 8


@pytest.mark.parametrize("closed", [[0], [1], [2], [0, 1, 2], []])
def test_a_closed_standard_descriptor_is_filled_and_the_next_file_gets_another_number(closed: list[int]) -> None:
    read, write = os.pipe()
    code = (
        "import os, sys\n"
        "from transferd.runtime.descriptors import fill_standard\n"
        "fill_standard()\n"
        "number = os.open('/dev/zero', os.O_RDONLY)\n"
        "print('lost', file=sys.stdout, flush=True); print('lost', file=sys.stderr, flush=True)\n"
        f"os.write({write}, str(number).encode())\n"
    )
    shut = "".join(f" {number}>&-" for number in closed)
    with os.fdopen(read, "rb") as told:
        command = ["sh", "-c", f'exec "$0" -c "$1"{shut}', sys.executable, code]
        done = subprocess.run(command, pass_fds=[write], capture_output=True, timeout=60, check=False)
        os.close(write)
        number = int(told.read() or b"-1")
    assert done.returncode == 0
    assert number > 2
    assert (b"lost" in done.stdout, b"lost" in done.stderr) == (1 not in closed, 2 not in closed)


def test_a_pipe_that_is_full_is_not_waited_for_and_the_other_end_keeps_waiting() -> None:
    read, write = os.pipe()
    ours = never_waiting(write)
    try:
        assert ours != write
        assert (os.get_blocking(write), os.get_blocking(ours)) == (True, False)
        room = fcntl.fcntl(write, fcntl.F_GETPIPE_SZ)
        assert os.write(ours, bytes(room)) == room
        with pytest.raises(BlockingIOError):
            os.write(ours, b"x")
        assert os.read(read, 4) == bytes(4), "it is the same pipe"
    finally:
        for fd in (read, write, ours):
            os.close(fd)


def test_a_descriptor_that_is_no_pipe_stays_as_it_is() -> None:
    fd = os.open(os.devnull, os.O_WRONLY)
    try:
        assert never_waiting(fd) == fd
        assert os.get_blocking(fd)
    finally:
        os.close(fd)
