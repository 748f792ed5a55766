"""Nodes on one machine: a network namespace each, with a cable from it to this process.

A namespace lives as long as the process in it, and that process ends when its input does: whatever becomes of the
tests, nothing is left behind. Cables go with their namespace.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

TIMEOUT_S = 20.0
_numbers = itertools.count()


@dataclass(frozen=True)
class Namespace:
    """address: of the node, as this process reaches it. prefix: what a command is preceded by to run on it."""

    address: str
    prefix: tuple[str, ...]
    cable: str

    def cut(self) -> None:
        """Pull the cable: nothing arrives any more, and nobody is told."""
        _run("ip", "link", "set", self.cable, "down")

    def mend(self) -> None:
        _run("ip", "link", "set", self.cable, "up")


@contextlib.contextmanager
def namespaces(count: int) -> Iterator[list[Namespace]]:
    """So many nodes. Skips the test where network namespaces are not allowed."""
    with contextlib.ExitStack() as stack:
        try:
            nodes = [stack.enter_context(_node()) for _ in range(count)]
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"network namespaces need root, unshare, nsenter and ip: {error}")
        yield nodes


@contextlib.contextmanager
def _node() -> Iterator[Namespace]:
    holder = subprocess.Popen(
        ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError):
            holder.stdin.write(b"\n")  # echoed once `cat` runs, hence in its namespace
            holder.stdin.flush()
        if not holder.stdout.readline():
            raise OSError("no network namespace")
        yield _connected(next(_numbers), holder.pid)
    finally:
        with contextlib.suppress(OSError):
            holder.stdin.close()
        holder.stdout.close()
        holder.wait(TIMEOUT_S)


def _connected(number: int, pid: int) -> Namespace:
    """Lay a cable from here into the namespace.

    Its name and addresses are of this process and not used twice: the kernel takes its time to remove a namespace.
    """
    here, there = (f"10.{214 + number // 60 % 40}.{os.getpid() % 250}.{4 * (number % 60) + host}" for host in (1, 2))
    cable = f"tfd{os.getpid() % 100000}n{number}"
    inside = ("nsenter", f"--net=/proc/{pid}/ns/net")
    _run("ip", "link", "add", cable, "type", "veth", "peer", "name", "cable", "netns", str(pid))
    _run("ip", "address", "add", f"{here}/30", "dev", cable)
    _run("ip", "link", "set", cable, "up")
    _run(*inside, "ip", "address", "add", f"{there}/30", "dev", "cable")
    _run(*inside, "ip", "link", "set", "cable", "up")
    _run(*inside, "ip", "link", "set", "lo", "up")
    return Namespace(there, inside, cable)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=TIMEOUT_S)
