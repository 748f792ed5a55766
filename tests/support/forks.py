"""Starts `python -m …` for tests by a fork: imports take four fifths of the time of a daemon that lives for a second.

    install()   `subprocess.Popen` of this process forks where it can

A server, which this process starts when it first needs it, has imported what daemons and commands import, and has no
thread. For each process it forks twice, and the process in between ends. So the new one becomes a child of ours (for
that moment we are the reaper of our orphans): waits, signals and pids are what they always are. It gets the
environment, the standard files and the session that were asked for, and runs the module as `python -m` does. Three
things differ: /proc shows the server's command line, memory that the server has touched counts as the process's, too,
and a daemon's report is never an old one (looking.py).

A start goes the usual way if it is anything else than that: another program, options of the interpreter, files to pass
on, another user or directory, a function to call first, a variable that Python or a library reads when it starts.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.support import looking
from tests.support.orphans import die_with_parent

ROOT = Path(__file__).parents[2]
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
MODULES = ("transferd", "tests.")  # what is forked: this, and what begins with it
# Read by the interpreter, the loader or a library while they start. PYTHONUNBUFFERED is honoured below.
READ_AT_START: tuple[str, ...] = (
    "PYTHON", "LD_", "MALLOC_", "GLIBC_", "LC_", "LANG", "ZMQ_", "UV_", "COVERAGE", "TERMINAL_WIDTH", "_TYPER",
    "FORCE_COLOR", "NO_COLOR", "PY_COLORS", "GITHUB_ACTIONS",
)  # fmt: skip
HONOURED = ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")
IMPORTED = (
    "transferd.cli.main", "transferd.cli.effective", "transferd.client.sync_client", "transferd.daemon.process",
    "transferd.daemon.daemon", "transferd.storage.file", "transferd.storage.memory", "transferd.tiers.shm",
)  # fmt: skip
_LARGEST = 1 << 20  # bytes of a request

_exec = subprocess.Popen
_libc = ctypes.CDLL(None, use_errno=True)


# --- in the process that runs the tests -----------------------------------------------------------------------------


class ForkingPopen(_exec):  # type: ignore[type-arg]
    """A Popen that asks the server where that makes the same process."""

    def _execute_child(self, *given: Any) -> None:
        names = (
            "args", "executable", "preexec_fn", "close_fds", "pass_fds", "cwd", "env", "startupinfo", "creationflags",
            "shell", "p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite", "restore_signals", "gid",
            "gids", "uid", "umask", "start_new_session", "process_group",
        )  # fmt: skip
        asked = dict(zip(names, given, strict=False))  # before 3.11 there is no process group
        if not _usual(asked):
            super()._execute_child(*given)  # type: ignore[misc]
            return
        files = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
        env = os.environ if asked["env"] is None else asked["env"]
        request = {
            "module": asked["args"][2],
            "arguments": [os.fsdecode(word) for word in asked["args"][3:]],
            "environment": {os.fsdecode(name): os.fsdecode(value) for name, value in env.items()},
            "session": asked["start_new_session"],
            "dies": asked["preexec_fn"] is die_with_parent,
            "parent": os.getpid(),
        }
        self.pid = _server().start(request, [own if fd == -1 else fd for own, fd in enumerate(files)])
        self._child_created = True
        self._close_pipe_fds(*(asked[name] for name in names[10:16]))  # type: ignore[attr-defined]


def install() -> None:
    """Make `subprocess.Popen` fork in this process."""
    subprocess.Popen = ForkingPopen  # type: ignore[misc]


@contextlib.contextmanager
def not_forked() -> Iterator[None]:
    """Start processes the usual way meanwhile, in every thread."""
    before, subprocess.Popen = subprocess.Popen, _exec  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = before  # type: ignore[misc]


def _usual(asked: Mapping[str, Any]) -> bool:
    args = asked["args"]
    return (
        isinstance(args, list | tuple)
        and len(args) > 2
        and args[0] == sys.executable
        and args[1] == "-m"
        and str(args[2]).startswith(MODULES)
        and asked["executable"] in (None, sys.executable)
        and asked["preexec_fn"] in (None, die_with_parent)
        and asked["close_fds"]
        and not asked["pass_fds"]
        and not asked["shell"]
        and asked["gid"] is asked["gids"] is asked["uid"] is None
        and asked["umask"] == -1
        and asked.get("process_group", -1) in (-1, None)
        and Path(asked["cwd"] or os.getcwd()) == ROOT  # from where `-m` imports
        and _started_alike(os.environ if asked["env"] is None else asked["env"])
    )


def _started_alike(environment: Mapping[str, str]) -> bool:
    """Whether an interpreter would start with this environment as the server did with ours."""
    ours = _environment_at_import
    names = {name for name in {*ours, *map(os.fsdecode, environment)} if name.startswith(READ_AT_START)}
    return all(ours.get(name) == environment.get(name) for name in names.difference(HONOURED))


_environment_at_import = dict(os.environ)


class _Server:
    """The connection to the server, which ends when that is closed. Thread-safe."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._socket, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LARGEST)
        with theirs:
            self._process = _exec(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, cwd=ROOT,
                # One thread, or a fork is none. OpenBLAS would start some.
                env={**_environment_at_import, "OPENBLAS_NUM_THREADS": "1"},
            )  # fmt: skip

    def start(self, request: Mapping[str, Any], files: Sequence[int]) -> int:
        """The pid of a new child of this process."""
        with self._lock:
            _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], list(files))
                answer = self._socket.recv(64)
            finally:
                _libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not answer:
            raise RuntimeError(f"the server of forks has ended: exit code {self._process.wait()}")
        return int(answer)

    def close(self) -> None:
        """End the server, if it is this process's."""
        if self.owner == os.getpid():
            self._socket.close()
            self._process.wait()


_servers: list[_Server] = []
_starting = threading.Lock()


def _server() -> _Server:
    with _starting:
        if not _servers or _servers[0].owner != os.getpid():
            _servers[:] = [_Server()]
            atexit.register(_servers[0].close)
        return _servers[0]


# --- in the server ---------------------------------------------------------------------------------------------------


def _serve(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Answer requests until there are no more. Returns only in a process that was asked for."""
    while True:
        message, files, _, _ = socket.recv_fds(channel, _LARGEST, 3)
        if not message:
            os._exit(0)
        pid = _forked()
        if pid == 0:
            channel.detach()  # `_become` closes it
            return json.loads(message), files
        for file in files:
            os.close(file)
        channel.send(str(pid).encode())


def _forked() -> int:
    """Fork twice: 0 in the grandchild, its pid here."""
    reading, writing = os.pipe()
    if (middle := os.fork()) == 0:
        if (pid := os.fork()) == 0:
            os.close(reading)
            os.close(writing)
            return 0
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(middle, 0)
    with open(reading, "rb") as pipe:
        return int(pipe.read())


def _become(request: Mapping[str, Any], files: Sequence[int]) -> None:
    """Make this process what was asked for."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    while os.getppid() != request["parent"]:  # the one in between has not ended yet
        time.sleep(0.0001)
    if request["dies"]:
        die_with_parent()
    if request["session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _stream(number, getattr(sys, name))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = ["-m", *request["arguments"]]


def _stream(number: int, before: io.TextIOWrapper) -> io.TextIOWrapper:
    """A standard file as the interpreter opens it. before: the server's, which has the same encoding."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    file: Any = open(number, before.mode + "b", 0 if unbuffered and number else -1, closefd=False)  # noqa: SIM115
    (file if isinstance(file, io.FileIO) else file.raw).name = before.name
    stream: Any = io.TextIOWrapper(
        file,
        encoding=before.encoding,
        errors=before.errors,
        line_buffering=not unbuffered and (number == 2 or file.isatty()),
        write_through=unbuffered,
    )
    stream.mode = before.mode
    return stream  # type: ignore[no-any-return]


def main() -> NoReturn:
    """The server, and the processes that it makes."""
    for name in IMPORTED:
        importlib.import_module(name)
    looking.costs_nothing()
    gc.collect()
    gc.freeze()  # no collection in a child writes to the pages of what it shares
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    request, files = _serve(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _become(request, files)
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    raise SystemExit(0)


if __name__ == "__main__":
    main()
