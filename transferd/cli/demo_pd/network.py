"""Two nodes on one machine: two network namespaces with a cable between them, or loopback without the privilege.

A namespace lives as long as the process in it, and that process ends when its standard input closes. So nothing is
left behind, in whatever way this process ends.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

TIMEOUT_S = 10.0
CABLE = "cable"


@dataclass(frozen=True, slots=True)
class Node:
    """A node. address: where the other node reaches this one. prefix: put before a command, runs it on this node."""

    address: str
    prefix: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Network:
    """Two nodes. kind: what connects them, in words."""

    prefill: Node
    decode: Node
    kind: str


@contextlib.contextmanager
def two_nodes() -> Iterator[Network]:
    """Two nodes that exist as long as the context."""
    loopback = Node("127.0.0.1")
    with contextlib.ExitStack() as stack:
        try:
            network = _joined(*(stack.enter_context(_namespace()) for _ in range(2)))
        except (OSError, subprocess.SubprocessError):  # not root, no capability, no iproute2
            network = Network(loopback, loopback, "loopback (network namespaces need root)")
        yield network


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    """Create a network namespace; yields the pid of a process in it."""
    holder = subprocess.Popen(
        ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        holder.stdin.write(b"\n")  # echoed once `cat` runs, hence in its namespace
        holder.stdin.flush()
        if not holder.stdout.readline():
            raise OSError("no network namespace")
        yield holder.pid
    finally:
        with contextlib.suppress(OSError):
            holder.stdin.close()
        holder.stdout.close()
        holder.wait(TIMEOUT_S)


def _joined(prefill: int, decode: int) -> Network:
    """Connect two namespaces with a cable. Raises CalledProcessError."""
    _run(*_inside(prefill), "ip", "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", str(decode))
    nodes = []
    for number, pid in enumerate((prefill, decode), start=1):
        node = Node(f"10.213.77.{number}", _inside(pid))
        _run(*node.prefix, "ip", "address", "add", f"{node.address}/30", "dev", CABLE)
        _run(*node.prefix, "ip", "link", "set", CABLE, "up")
        _run(*node.prefix, "ip", "link", "set", "lo", "up")
        nodes.append(node)
    return Network(nodes[0], nodes[1], "two network namespaces")


def _inside(pid: int) -> tuple[str, ...]:
    return ("nsenter", f"--net=/proc/{pid}/ns/net")


def _run(*command: str) -> str:
    return subprocess.run(
        command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=TIMEOUT_S
    ).stdout
