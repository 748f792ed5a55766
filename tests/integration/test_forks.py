"""A process that is forked (tests/support/forks.py) is what the usual way starts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.support import forks
from tests.support.orphans import die_with_parent
from tests.support.waits import wait_until

PROGRAM = [sys.executable, "-m", "tests.integration.forked_program"]
Ways = pytest.mark.parametrize("way", [contextlib.nullcontext, forks.not_forked], ids=["forked", "usual"])
Way = Callable[[], AbstractContextManager[None]]


@pytest.fixture(autouse=True)
def usual_signals() -> None:
    """A child inherits what is ignored, and a fork does not."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        pytest.skip("whoever runs the tests has them ignore SIGINT, as a shell does in the background")


def is_forked(pid: int) -> bool:
    return b"tests.support.forks" in Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.parametrize("how", [{}, {"start_new_session": True}, {"env": {**os.environ, "PYTHONUNBUFFERED": "1"}}])
def test_it_knows_the_same(how: dict[str, Any]) -> None:
    told = []
    for way in (contextlib.nullcontext, forks.not_forked):
        with way():
            done = subprocess.run([*PROGRAM, "a", "ü b"], capture_output=True, text=True, check=True, timeout=60, **how)
        told.append(json.loads(done.stdout))
        assert done.stderr == "and this\n"
        assert told[-1]["parent"] == os.getpid()
    assert told[0] == told[1]


@Ways
@pytest.mark.parametrize(("order", "code"), [("raises", 1), ("exits", 7), ("ends", 0)])
def test_it_ends_the_same(way: Way, order: str, code: int) -> None:
    with way():
        done = subprocess.run([*PROGRAM, order], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == code
    assert (done.stderr.splitlines()[-1] == "ValueError: as ordered") is (order == "raises")


@Ways
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_signals_reach_it(way: Way, number: signal.Signals) -> None:
    with way():
        process = subprocess.Popen([*PROGRAM, "waits"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with process, contextlib.ExitStack() as at_the_end:
        at_the_end.callback(process.kill)
        assert process.stdout is not None
        process.stdout.readline()
        assert is_forked(process.pid) is (way is contextlib.nullcontext)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        process.send_signal(number)
        assert process.wait(60) == -number
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


@Ways
def test_its_input_is_a_pipe(way: Way) -> None:
    with way():
        done = subprocess.run(
            [*PROGRAM, "reads"], input="words", capture_output=True, text=True, check=True, timeout=60
        )
    assert done.stdout.splitlines()[-1] == "words"


@pytest.mark.parametrize(
    "how",
    [
        {"args": [sys.executable, "-I", *PROGRAM[1:]]},
        {"args": [sys.executable, "-c", "import signal; print(flush=True); signal.pause()"]},
        {"args": [*PROGRAM, "waits"], "env": {**os.environ, "PYTHONHASHSEED": "7"}},
        {"args": [*PROGRAM, "waits"], "preexec_fn": os.setpgrp},
        {"args": [*PROGRAM, "waits"], "umask": 0o77},
        {"args": [*PROGRAM, "waits"], "pass_fds": (0,)},
    ],
    ids=["option", "code", "variable", "function", "umask", "files"],
)
def test_processes_that_a_fork_cannot_imitate_are_not_forked(how: dict[str, Any]) -> None:
    process = subprocess.Popen(**how, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with process:
        try:
            assert not is_forked(process.pid)
        finally:
            process.kill()


def test_it_ends_with_the_tests() -> None:
    """A process of tests that is killed leaves neither its server nor what should die with it."""
    code = (
        "import signal, subprocess, sys; from tests.support import forks; from tests.support.orphans import *;"
        "forks.install(); one = subprocess.Popen([sys.executable, '-m', 'tests.integration.forked_program', 'waits'],"
        "stdout=subprocess.PIPE, preexec_fn=die_with_parent); one.stdout.readline();"
        "print(one.pid, forks._servers[0]._process.pid, flush=True); signal.pause()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, preexec_fn=die_with_parent
    )
    with process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        process.kill()
    wait_until(lambda: not any(_runs(pid) for pid in pids), "both end")


def test_a_thread_may_start_the_first_one_and_end() -> None:
    code = (
        "import subprocess, sys, threading; from tests.support import forks; forks.install();"
        "run = lambda: subprocess.run([sys.executable, '-m', 'tests.integration.forked_program', 'ends'], check=True);"
        "one = threading.Thread(target=run); one.start(); one.join(); run(); run()"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, timeout=60)
    assert len(done.stdout.splitlines()) == 3


def _runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except OSError:
        return False
