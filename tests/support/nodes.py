"""Nodes on one machine: a network namespace each, with a cable from it to this process, a bad one if a test asks.

A namespace lives as long as the process in it, and that process ends when its input does: whatever becomes of the
tests, nothing is left behind. Cables go with their namespace.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.apart import own_number
from tests.support.impairment import Cable, End, cable

TIMEOUT_S = 20.0
_numbers = itertools.count()


@dataclass(frozen=True)
class Namespace:
    """address: of the node, as this process reaches it. prefix: what a command is preceded by to run on it.

    line: with `impaired`, what delays and loses packets. `there` is to the node.
    """

    address: str
    prefix: tuple[str, ...]
    cable: str
    line: Cable | None = None

    def cut(self) -> None:
        """Pull the cable: nothing arrives any more, and nobody is told."""
        _run("ip", "link", "set", self.cable, "down")

    def mend(self) -> None:
        _run("ip", "link", "set", self.cable, "up")


@contextlib.contextmanager
def namespaces(count: int, *, impaired: bool = False, seed: int = 1) -> Iterator[list[Namespace]]:
    """So many nodes, with a `line` each if they are impaired. Skips the test where namespaces are not allowed."""
    with contextlib.ExitStack() as stack:
        try:
            nodes = [stack.enter_context(_node(impaired, seed + number)) for number in range(count)]
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"network namespaces need root, unshare, nsenter and ip: {error}")
        yield nodes


@contextlib.contextmanager
def _node(impaired: bool, seed: int) -> Iterator[Namespace]:
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
        with _connected(next(_numbers), holder.pid, seed if impaired else None) as node:
            yield node
    finally:
        with contextlib.suppress(OSError):
            holder.stdin.close()
        holder.stdout.close()
        holder.wait(TIMEOUT_S)


@contextlib.contextmanager
def _connected(number: int, pid: int, seed: int | None) -> Iterator[Namespace]:
    """Lay a cable from here into the namespace, one that may be impaired with `seed`.

    Its name and addresses are of this process and not used twice: the kernel takes its time to remove a namespace.
    """
    here, there = (f"10.{214 + number // 60 % 40}.{subnet()}.{4 * (number % 60) + host}" for host in (1, 2))
    name = f"tfd{os.getpid() % 100000}n{number}"
    inside = ("nsenter", f"--net=/proc/{pid}/ns/net")
    with contextlib.ExitStack() as stack:
        line = None
        if seed is None:
            _run("ip", "link", "add", name, "type", "veth", "peer", "name", "cable", "netns", str(pid))
        else:
            line = stack.enter_context(cable(End(os.getpid(), name), End(pid, "cable"), seed=seed))
        _run("ip", "address", "add", f"{here}/30", "dev", name)
        _run("ip", "link", "set", name, "up")
        _run(*inside, "ip", "address", "add", f"{there}/30", "dev", "cable")
        _run(*inside, "ip", "link", "set", "cable", "up")
        _run(*inside, "ip", "link", "set", "lo", "up")
        yield Namespace(there, inside, name, line)


@functools.cache
def subnet() -> int:
    """The third part of this process's addresses: two processes with one would reach each other's nodes."""
    own = own_number("subnet", 250)
    return os.getpid() % 250 if own is None else own


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=TIMEOUT_S)
