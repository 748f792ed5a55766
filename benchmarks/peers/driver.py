"""Starts peers as processes, asks them in turn, and takes the time and the CPU of each with all its children.

A peer that cannot be installed, does not start, dies, answers with an error, or not in time, or returns wrong bytes is
a row that says so; the others go on without it.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import ROOT, Interpreter

START_S = 180.0
ANSWER_S = 120.0
STOP_S = 40.0


class Gone(Exception):
    """A peer is out of the run; the text says why, in one line."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A row. command: what its interpreter runs. The first peer of a group is the limit of the others.

    keeps: its files stay from round to round, because it is full and writes over them.
    """

    name: str
    command: Sequence[str]
    interpreter: Interpreter
    checksum: bool = False
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Peers that do the same. direct: past the page cache. calls: tasks that move nothing, so many a round.

    blocks, block_bytes: what a round moves.
    """

    name: str
    peers: Sequence[Peer]
    direct: bool = False
    calls: int = 0
    blocks: int = 256
    block_bytes: int = 2 * 1024**2

    @property
    def what(self) -> tuple[str, ...]:
        return ("task",) if self.calls else ("store", "load")


@dataclass(slots=True)
class Found:
    """What a peer did: seconds and CPU seconds of each round, by what it did. why_not: why it has no figures."""

    peer: Peer
    version: str = ""
    why_not: str = ""
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    cpu: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


class Process:
    """A peer's program. Every process that it starts ends with it."""

    def __init__(self, python: str, command: Sequence[str], directory: Path, pass_fds: Sequence[int] = ()) -> None:
        self._log = directory.with_suffix(".log")
        with self._log.open("wb") as log:
            self._child = subprocess.Popen(
                [python, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
                pass_fds=pass_fds,
            )
        assert self._child.stdout is not None
        self._from = self._child.stdout
        os.set_blocking(self._from.fileno(), False)
        self._rest = b""

    @property
    def pid(self) -> int:
        return self._child.pid

    def ask(self, do: str, timeout: float = ANSWER_S, **more: Any) -> dict[str, Any]:
        """Its answer. Raises Gone if it dies, fails or does not answer in time."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps({"do": do} | more).encode() + b"\n")
            self._child.stdin.flush()
        except OSError:
            raise Gone(self._how_it_ended()) from None
        answer: dict[str, Any] = json.loads(self._line(do, timeout))
        if "error" in answer:
            raise Gone(f"{do}: {one_line(answer['error'])}")
        return answer

    def cpu_s(self) -> float:
        """CPU seconds of the program and everything that it has started, so far."""
        return sum(map(cpu_of, tree_of(self._child.pid)))

    def stop(self, timeout: float = STOP_S) -> None:
        """Close its stdin and wait; then kill what is left of it and its children. A second call does nothing."""
        assert self._child.stdin is not None
        if self._from.closed:
            return
        with contextlib.suppress(OSError):  # it has ended
            self._child.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        self._from.close()
        self._log.unlink()

    def _line(self, do: str, timeout: float) -> bytes:
        give_up = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._from, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, give_up - time.monotonic())):
                    raise Gone(f"no answer to {do} within {timeout:g} s")
                piece = self._from.read()
                if piece == b"":
                    raise Gone(self._how_it_ended())
                self._rest += piece or b""
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _how_it_ended(self) -> str:
        code = self._child.wait(STOP_S)
        log = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"it ended with {code}: {one_line(log[-1])}" if log else f"it ended with {code}"


def run(
    group: Group, place: Path, rounds: int, blocks: int, block_bytes: int, told: Callable[[str], None]
) -> list[Found]:
    """All peers of a group. One round before the first does not count.

    place: a directory on the disk in question. Peers leave their files in it, empty; the caller removes them after the
    last group, because freed inodes slow the files down that the next one makes.
    """
    found = [Found(peer) for peer in group.peers]
    with contextlib.ExitStack() as open_:
        alive: dict[int, Process] = {}
        for index, one in enumerate(found):
            told(f"{group.name}: {one.peer.name}")
            directory = place / f"peer-{index}"
            try:
                alive[index] = open_.enter_context(_started(one.peer, directory))
                order = {"directory": str(directory), "blocks": blocks, "block_bytes": block_bytes}
                answer = alive[index].ask("prepare", START_S, **order, direct=group.direct)
                one.version = str(answer["version"])
            except Gone as why:
                one.why_not = str(why)
                if index in alive:
                    alive.pop(index).stop()
        for number in range(rounds + 1):
            turns = [(number + shift) % len(found) for shift in range(len(found))]
            for index in turns:
                if index in alive:
                    try:
                        figures = _round(alive[index], group, number, place, blocks * block_bytes)
                        if not found[index].peer.keeps:
                            empty_files(place / f"peer-{index}")
                    except Gone as why:
                        found[index].why_not = f"round {number}: {why}"
                        alive.pop(index).stop()
                    else:
                        if number:
                            _keep(found[index], figures)
            told(f"{group.name}: round {number} of {rounds}, load {os.getloadavg()[0]:.1f}")
    return found


@contextlib.contextmanager
def _started(peer: Peer, directory: Path) -> Iterator[Process]:
    python, why_not = peer.interpreter()
    if not python:
        raise Gone(f"cannot be installed: {one_line(why_not)}")
    directory.mkdir()
    process = Process(python, peer.command, directory)
    try:
        yield process
    finally:
        process.stop()
        empty_files(directory)


def _round(process: Process, group: Group, number: int, place: Path, nbytes: int) -> dict[str, tuple[float, float]]:
    """Seconds and CPU seconds of all blocks' store and load, or of one task. Raises Gone also if bytes are wrong."""
    if group.calls:
        before = process.cpu_s()
        seconds = float(process.ask("task", calls=group.calls)["seconds"])
        return {"task": (seconds, (process.cpu_s() - before) / group.calls)}
    figures = {}
    process.ask("fill", round=number)
    for what in group.what:
        if what == "store":
            warm(place / "warm", nbytes)
        else:
            process.ask("poison", round=number)
        before = process.cpu_s()
        seconds = float(process.ask(what, round=number)["seconds"])
        figures[what] = seconds, process.cpu_s() - before
    if wrong := process.ask("check", round=number)["wrong"]:
        raise Gone(f"it returned wrong bytes in {wrong} blocks")
    process.ask("forget", round=number)
    return figures


def _keep(found: Found, figures: dict[str, tuple[float, float]]) -> None:
    for what, (seconds, cpu) in figures.items():
        found.seconds[what].append(seconds)
        found.cpu[what].append(cpu)


def warm(path: Path, nbytes: int) -> None:
    """Write and truncate as many bytes: a virtual machine's pages that were free for long cost a fault in its host."""
    piece = b"\x5a" * 2**21
    with path.open("wb", buffering=0) as file:
        for _ in range(nbytes // len(piece)):
            file.write(piece)
        file.truncate(0)


def empty_files(directory: Path) -> None:
    """Make room, but remove no file: for up to six minutes, ext4 passes over each freed inode when it makes a file."""
    for path in directory.rglob("*"):
        if path.is_file():
            os.truncate(path, 0)


def rows(group: Group, found: Sequence[Found], nbytes: int) -> list[dict[str, Any]]:
    """As JSON, the limit first. ratio: of the limit's time and the peer's, by round; its median and spread.

    The limit's own spread is that of its time.
    """
    return [_row(group, one, found[0], nbytes) for one in found]


def _row(group: Group, one: Found, limit: Found, nbytes: int) -> dict[str, Any]:
    row: dict[str, Any] = {"name": one.peer.name, "group": group.name, "version": one.version}
    why_not = one.why_not or (f"the limit, {limit.peer.name}, has no figures" if limit.why_not else "")
    if why_not:
        return row | {"why_not": why_not}
    row["checksum"] = one.peer.checksum
    for what in group.what:
        own, base = one.seconds[what], limit.seconds[what]
        if one is limit:
            base = [statistics.median(own)] * len(own)
        ratios = [mine / its if group.calls else its / mine for mine, its in zip(own, base, strict=True)]
        ratio = statistics.median(ratios)
        row[what] = {"ratio": ratio, "spread": (max(ratios) - min(ratios)) / ratio, "ratios": ratios}
        seconds, cpu = statistics.median(own), statistics.median(one.cpu[what])
        if group.calls:
            row[what] |= {"us": seconds * 1e6, "CPU us": cpu * 1e6}
        else:
            row[what] |= {"GB/s": nbytes / seconds / 1e9, "CPU s/GB": cpu / (nbytes / 1e9)}
    return row


def one_line(text: str) -> str:
    """For a table: no line breaks, no bars, and an end."""
    line = " ".join(text.split()).replace("|", "/")
    return line if len(line) <= 160 else line[:159] + "…"


def tree_of(pid: int) -> list[int]:
    """A process and all that descend from it."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ends as we look
                after_name = (entry / "stat").read_text().rpartition(")")[2].split()
                parents.setdefault(int(after_name[1]), []).append(int(entry.name))
    found = [pid]
    for known in found:
        found += parents.get(known, [])
    return found


def cpu_of(pid: int) -> float:
    """CPU seconds of all its threads, also of those that have ended, by its CPU clock: /proc counts in 10 ms."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # the kernel's encoding of a process' CPU clock
    except OSError:
        return 0.0  # it has ended
