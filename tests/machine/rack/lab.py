"""A rack on one machine: a switch, a Mooncake master on it, and nodes with a daemon each, all in own namespaces.

    with laboratory(directory, nodes=3) as lab:
        async with lab.node(1) as one, lab.node(2) as two: ...
        lab.cut(1, 2)                     packets from 1 to 2 vanish, and nobody is told
        lab.mend(1, 2)
    with laboratory(directory, 3, lossy=(2,)) as lab:
        lab.impair(2, Impairment(loss=0.05))    on the cable of node 2, both ways; there=: to the node, back=: from it

A cut is a neighbour entry with a wrong hardware address: the bridge floods the packet, and every host drops it. So it
needs no packet filter in the kernel, works in one direction, and leaves the way to the master alone.

A namespace lives as long as the process in it, and that process ends when its input does: whatever becomes of the
tests, nothing is left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.impairment import CLEAN, Cable, End, Impairment, cable
from transferd.cli.pool.local import Master
from transferd.client.launch import DaemonProcess, start

WHOLE = os.environ.get("RACK") == "whole"  # `make rack`; else the tests leave out what takes long and differs little
TIMEOUT_S = 20.0
NOBODY = "02:00:00:00:00:01"
MASTER = "10.77.0.100"
COPIES = """
import json
from transferd.storage.mooncake.master_pages import read_all
print(json.dumps([(held.key, len(held.nodes)) for some in read_all("{address}") for held in some]))
"""
CACHE = {"ranks": 2, "layers": 4, "kv_heads": 4, "head_dim": 64, "block_size": 64, "device_blocks": 64}


class LabMaster(Master):
    """The master, on the switch. Daemons reach it at `address`, this process through `prefix`."""

    def __init__(self, log_file: Path, prefix: Sequence[str], *flags: str) -> None:
        super().__init__(log_file)
        self.port, self.metrics_port = 50051, 9003
        self.prefix, self._flags = prefix, flags

    @property
    def address(self) -> str:
        return f"{MASTER}:{self.port}"

    def _command(self) -> Sequence[str]:
        command = [*self.prefix, *super()._command(), *self._flags]
        return [part.replace("127.0.0.1", MASTER) for part in command]

    def copies(self) -> dict[str, int]:
        """How many nodes have a whole copy of each object. Raises OSError if the master does not answer."""
        return dict(json.loads(self._run(COPIES.format(address=f"{MASTER}:{self.metrics_port}"))))

    def _page(self, path: str) -> str:
        url = f"http://{MASTER}:{self.metrics_port}{path}"
        return self._run(f"import urllib.request; print(urllib.request.urlopen({url!r}, timeout=5).read().decode())")

    def _run(self, program: str) -> str:
        """What a program of Python prints on the switch. Raises OSError."""
        answer = subprocess.run(
            [*self.prefix, sys.executable, "-c", program], capture_output=True, text=True, check=False
        )
        if answer.returncode:
            raise OSError(answer.stderr)
        return answer.stdout

    def _is_up(self) -> bool:
        try:
            self.segments()
        except OSError:
            return False
        return True


class Lab:
    """The switch, the master and the nodes' namespaces. Nodes have the numbers 1, 2, …"""

    def __init__(
        self, directory: Path, stack: contextlib.ExitStack, nodes: int, flags: Sequence[str], lossy: Sequence[int]
    ) -> None:
        self.directory = directory
        self._stack = stack
        self._lossy = lossy
        self._cables: dict[int, Cable] = {}
        self._switch = self._namespace()
        self._in(self._switch, "ip", "link", "add", "rack", "type", "bridge")
        self._in(self._switch, "ip", "address", "add", f"{MASTER}/24", "dev", "rack")
        self._in(self._switch, "ip", "link", "set", "rack", "up")
        self._nodes = {number: self._connected(number) for number in range(1, nodes + 1)}
        self.master = LabMaster(directory / "master.log", self.prefix(self._switch), *flags)

    @staticmethod
    def address(number: int) -> str:
        return f"10.77.0.{number}"

    @staticmethod
    def prefix(pid: int) -> tuple[str, ...]:
        return ("nsenter", f"--net=/proc/{pid}/ns/net")

    def daemon(
        self,
        number: int,
        *,
        wait: bool = True,
        cache: Mapping[str, Any] | None = None,
        under: Sequence[str] = (),
        levels: Sequence[str] = (),
        **mooncake: Any,
    ) -> DaemonProcess:
        """Start the daemon of a node. Stops it at the end of the lab at the latest.

        cache: settings of [cache] besides the usual ones. under: a program that runs it, with its arguments.
        levels: storage.levels; by default Mooncake alone.
        """
        pool = {
            "master_server_addr": self.master.address,
            "local_hostname": self.address(number),
            "global_segment_size": "64MiB",
            "local_buffer_size": 0,
            "probe_interval": 0.1,
        }
        tree = {
            "cache": CACHE | {"host_blocks": 0} | dict(cache or {}),
            "host": {"staging": "32MiB"},
            "storage": {
                **({"levels": list(levels), "model": "m"} if levels else {"backend": "mooncake"}),
                "mooncake": pool | mooncake,
                "memory": {"capacity": "64MiB"},
                "file": {"path": str(self.directory / f"blocks{number}"), "capacity": "256MiB"},
            },
        }
        prefix = (*self.inside(number), *under)
        process = start(tree, self.directory, name=f"node{number}", wait=wait, prefix=prefix)
        self._stack.callback(lambda: process.kill() if process.process.poll() is None else None)
        return process

    def inside(self, number: int) -> tuple[str, ...]:
        """What runs a command on a node."""
        return self.prefix(self._nodes[number])

    def cut(self, sender: int, receiver: int) -> None:
        """From now on, what one node sends to the other vanishes."""
        entry = (self.address(receiver), "lladdr", NOBODY, "dev", "eth0", "nud", "permanent")
        self._in(self._nodes[sender], "ip", "neigh", "replace", *entry)

    def mend(self, sender: int, receiver: int) -> None:
        self._in(self._nodes[sender], "ip", "neigh", "del", self.address(receiver), "dev", "eth0")

    def cut_off(self, number: int) -> None:
        """Cut a node from all others, both ways. The master still hears it."""
        for other in self._nodes.keys() - {number}:
            self.cut(number, other)
            self.cut(other, number)

    def rejoin(self, number: int) -> None:
        for other in self._nodes.keys() - {number}:
            self.mend(number, other)
            self.mend(other, number)

    def slow_down(self, number: int, rate: str) -> None:
        """What a node sends leaves at this rate, such as "20mbit"."""
        shape = ("root", "tbf", "rate", rate, "burst", "32kbit", "latency", "1s")
        self._in(self._nodes[number], "tc", "qdisc", "replace", "dev", "eth0", *shape)

    def speed_up(self, number: int) -> None:
        self._in(self._nodes[number], "tc", "qdisc", "del", "dev", "eth0", "root")

    def impair(
        self,
        number: int,
        both: Impairment = CLEAN,
        *,
        there: Impairment | None = None,
        back: Impairment | None = None,
    ) -> None:
        """From now on, of the cable of a `lossy` node. there: what it receives; back: what it sends."""
        self._cables[number].impair(both, there=there, back=back)

    def _connected(self, number: int) -> int:
        pid = self._namespace()
        port = f"port{number}"
        if number in self._lossy:
            line = cable(End(self._switch, port), End(pid, "eth0"), seed=number)
            self._cables[number] = self._stack.enter_context(line)
        else:
            self._in(self._switch, "ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        self._in(self._switch, "ip", "link", "set", port, "master", "rack", "up")
        self._in(pid, "ip", "address", "add", f"{self.address(number)}/24", "dev", "eth0")
        self._in(pid, "ip", "link", "set", "eth0", "up")
        return pid

    def _namespace(self) -> int:
        holder = subprocess.Popen(
            ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert holder.stdin is not None
        assert holder.stdout is not None
        self._stack.callback(holder.wait, TIMEOUT_S)
        self._stack.callback(holder.stdout.close)
        self._stack.callback(holder.stdin.close)
        with contextlib.suppress(BrokenPipeError):
            holder.stdin.write(b"\n")  # echoed once `cat` runs, hence in its namespace
            holder.stdin.flush()
        if not holder.stdout.readline():
            raise OSError("no network namespace")
        self._in(holder.pid, "ip", "link", "set", "lo", "up")
        return holder.pid

    def _in(self, pid: int, *command: str) -> None:
        subprocess.run([*self.prefix(pid), *command], check=True, capture_output=True, timeout=TIMEOUT_S)


@contextlib.contextmanager
def laboratory(directory: Path, nodes: int, *flags: str, lossy: Sequence[int] = ()) -> Iterator[Lab]:
    """A rack whose master runs, with these flags; its daemons are yet to be started. Skips where there can be none.

    lossy: the nodes with a cable that can be impaired.
    """
    with contextlib.ExitStack() as stack:
        try:
            lab = Lab(directory, stack, nodes, flags, lossy)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"a rack needs root, unshare, nsenter, ip and a kernel with bridges: {error}")
        stack.enter_context(lab.master)
        yield lab
