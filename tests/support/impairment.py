"""A cable between two network namespaces that delays, loses and reorders packets, each way as a test asks.

    with cable(End(pid, "eth0"), End(other, "port1")) as line:     two devices; addresses are the caller's part
        line.impair(Impairment(delay=0.02, loss=0.01))             both ways
        line.impair(there=Impairment(loss=1.0))                    to the second end only; the way back is clean
        line.impair()                                              a good cable again

The kernel does it (netem) where it can. Elsewhere both ends are TAP devices, and a process of its own carries the
packets (`tap_relay.py`); its draws come from `seed`, which is printed. It carries some 55 MB/s of TCP in packets of
1,500 bytes, 180 in packets of 9,000 and 560 in packets of 65,000 (two cores that others use). Both kinds need root.
Devices go with the cable, and with its namespaces, and when the tests are killed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

TIMEOUT_S = 20.0
MTU = 1500
LIMIT = 100_000  # packets that netem holds; its default of 1,000 would lose more than it was asked to
RELAY = Path(__file__).with_name("tap_relay.py")


@dataclass(frozen=True)
class Impairment:
    """Of one way. delay, jitter: seconds; a packet takes delay ± jitter. loss, reorder: shares of 1.

    reorder: the share that takes no time and so overtakes what is delayed. Jitter reorders, too.
    """

    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    reorder: float = 0.0


CLEAN = Impairment()


@dataclass(frozen=True)
class End:
    """A device that a cable gets: its name, and a process in the network namespace where it is made."""

    pid: int
    device: str

    @property
    def namespace(self) -> str:
        return f"/proc/{self.pid}/ns/net"

    def run(self, *command: str) -> None:
        """Run a command in the namespace. Raises OSError, subprocess.SubprocessError."""
        line = ["nsenter", f"--net={self.namespace}", *command]
        subprocess.run(line, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=TIMEOUT_S)


class Cable(Protocol):
    def impair(
        self, both: Impairment = CLEAN, *, there: Impairment | None = None, back: Impairment | None = None
    ) -> None:
        """From now on. there: from the first end to the second, if not as `both`; back: the other way."""


class NetemCable:
    """Two ends of a veth whose egress the kernel impairs."""

    def __init__(self, ends: tuple[End, End]) -> None:
        self._ends = ends

    def impair(
        self, both: Impairment = CLEAN, *, there: Impairment | None = None, back: Impairment | None = None
    ) -> None:
        for end, one in zip(self._ends, (there or both, back or both), strict=True):
            end.run("tc", "qdisc", "replace", "dev", end.device, "root", *netem(one))


def netem(one: Impairment) -> tuple[str, ...]:
    """What `tc qdisc` gets for it."""
    words = ["netem", "limit", str(LIMIT)]
    if one.delay:
        words += ["delay", f"{one.delay * 1e6:.0f}us", f"{one.jitter * 1e6:.0f}us"]
        words += ["reorder", f"{one.reorder:.3%}"] if one.reorder else []
    words += ["loss", f"{one.loss:.3%}"] if one.loss else []
    return tuple(words)


class TapCable:
    """Two TAP devices, and the process between them."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.counts: list[dict[str, int]] = []  # of both ways until the last `impair`: passed, lost, early

    def impair(
        self, both: Impairment = CLEAN, *, there: Impairment | None = None, back: Impairment | None = None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([asdict(there or both), asdict(back or both)]), file=self._process.stdin, flush=True)
        self.counts = json.loads(self._process.stdout.readline())


@contextlib.contextmanager
def cable(one: End, other: End, *, mtu: int = MTU, seed: int = 1) -> Iterator[Cable]:
    """A cable between two namespaces. Its devices are up. Raises OSError, subprocess.SubprocessError."""
    making = netem_cable(one, other, mtu) if netem_is_there() else tap_cable(one, other, mtu, seed)
    with making as line:
        yield line


@functools.cache
def netem_is_there() -> bool:
    """Whether this kernel has all that a NetemCable asks of it."""
    settings = netem(Impairment(delay=0.01, jitter=0.001, loss=0.01, reorder=0.01))
    command = " ".join(["tc", "qdisc", "replace", "dev", "lo", "root", *settings])
    with contextlib.suppress(OSError):
        return not subprocess.run(
            ["unshare", "--net", "sh", "-c", command], capture_output=True, check=False
        ).returncode
    return False


@contextlib.contextmanager
def netem_cable(one: End, other: End, mtu: int = MTU) -> Iterator[NetemCable]:
    peer = ("peer", "name", other.device, "mtu", str(mtu), "netns", str(other.pid))
    one.run("ip", "link", "add", one.device, "mtu", str(mtu), "type", "veth", *peer)
    try:
        _up(one, other)
        yield NetemCable((one, other))
    finally:
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # gone with its namespace
            one.run("ip", "link", "del", one.device)


@contextlib.contextmanager
def tap_cable(one: End, other: End, mtu: int = MTU, seed: int = 1) -> Iterator[TapCable]:
    command = [sys.executable, "-S", str(RELAY), one.namespace, one.device, other.namespace, other.device]
    process = subprocess.Popen(
        [*command, str(mtu), str(seed)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PATH": os.defpath},
    )
    with process:  # closes its input, at whose end it ends, and waits
        assert process.stdout is not None
        if not process.stdout.readline():
            assert process.stderr is not None
            raise OSError(process.stderr.read().strip().rpartition("\n")[2])
        print(f"impaired cable {one.device} to {other.device}, seed {seed}")
        _up(one, other)
        yield TapCable(process)


def _up(*ends: End) -> None:
    for end in ends:
        end.run("ip", "link", "set", end.device, "up")
