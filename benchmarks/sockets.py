"""What a message of many busy connections costs the server: transferd's own ZMTP beside libzmq's ROUTER.

Each server echoes on an asyncio loop in a process of its own; its CPU is that of all its threads, libzmq's I/O thread
included. The peers are raw sockets in this process, each with the same number of messages under way. The runs of both
servers alternate, because the speed of a machine changes from minute to minute.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvloop
import zmq

from transferd.cli.bench.control import PAYLOAD, cpu_seconds
from transferd.cli.bench.harness import Row, machine, print_report, report, row
from transferd.config import ServerSection
from transferd.runtime.address import socket_path
from transferd.runtime.compat import Runner
from transferd.runtime.descriptors import raise_limit
from transferd.wire.transport import Channel, ZmqServerTransport
from transferd.wire.zmtp import COMMAND, GREETING_BYTES, command, greeting, header, properties

SHAPES = ((1, 64), (16, 4), (128, 1), (128, 4), (1000, 1))  # sockets, messages under way on each
MESSAGES = 20_000  # of a run
RUNS = 5
PATIENCE_S = 30.0
FRAME = header(0, len(PAYLOAD)) + PAYLOAD
READY = command(b"READY", properties({b"Socket-Type": b"DEALER", b"Identity": b""}))


async def serve(kind: str, endpoint: str) -> None:
    """Echo what arrives, until the process is killed. kind: "own" or "libzmq"."""
    raise_limit()
    if kind == "own":
        server = ZmqServerTransport(ServerSection(endpoint=endpoint, max_connections=4096))

        def echo(peer: bytes, payload: bytes | memoryview) -> None:
            connection = server.peer(peer)
            assert connection is not None
            connection.send(bytes(payload))

        server.start(echo)
    else:
        context = zmq.Context[zmq.Socket[bytes]]()
        context.set(zmq.MAX_SOCKETS, 8192)
        router = context.socket(zmq.ROUTER)
        router.bind(endpoint)

        def receive(one: zmq.Socket[bytes]) -> None:
            peer, payload = one.recv(zmq.DONTWAIT), one.recv(zmq.DONTWAIT)
            channel.send(peer, zmq.SNDMORE)
            channel.send(payload, 0)

        channel = Channel(router, receive, context)
    await asyncio.get_running_loop().create_future()


class Peers:
    """Raw connections to a server at a unix socket, their handshakes done."""

    def __init__(self, path: str, count: int) -> None:
        self._poll = select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        for _ in range(count):
            one = socket.socket(socket.AF_UNIX)
            one.settimeout(PATIENCE_S)
            one.connect(path)
            one.sendall(greeting(b"NULL", as_server=False))
            _exactly(one, GREETING_BYTES)
            one.sendall(header(COMMAND, len(READY)) + READY)
            _exactly(one, _exactly(one, 2)[1])
            self._sockets[one.fileno()] = one
            self._poll.register(one.fileno(), select.EPOLLIN)

    def exchange(self, messages: int, under_way: int) -> None:
        """Send so many messages and receive as many, with `under_way` on each connection at a time."""
        left = messages
        waiting = dict.fromkeys(self._sockets, 0)  # bytes
        for number, one in self._sockets.items():
            one.sendall(FRAME * under_way)
            waiting[number] = under_way * len(FRAME)
            left -= under_way
        busy = len(self._sockets)
        while busy:
            ready = self._poll.poll(PATIENCE_S)
            assert ready, "the server does not answer"
            for number, _ in ready:
                one = self._sockets[number]
                before = waiting[number]
                waiting[number] -= len(one.recv(65536))
                # A frame's last byte makes room for the next message.
                done = -(-before // len(FRAME)) - -(-waiting[number] // len(FRAME))
                if more := min(done, max(left, 0)):
                    left -= more
                    waiting[number] += more * len(FRAME)
                    one.sendall(FRAME * more)
                busy -= not waiting[number]

    def close(self) -> None:
        for one in self._sockets.values():
            one.close()
        self._poll.close()


def _exactly(one: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        got = one.recv(count - len(data))
        assert got, "the server closed a connection"
        data += got
    return data


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as one:
        return one.connect_ex(str(path)) == 0


@contextlib.contextmanager
def server(kind: str, path: Path) -> Iterator[int]:
    """A server process at this socket, as its pid."""
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.sockets", "--serve", kind, f"ipc://{path}"])
    try:
        until = time.monotonic() + PATIENCE_S
        while not _listens(path):
            assert time.monotonic() < until, f"{kind} does not listen"
            assert process.poll() is None, f"{kind} has ended"
            time.sleep(0.01)
        yield process.pid
    finally:
        process.kill()
        process.wait()


def cost_us(pid: int, peers: Peers, under_way: int, messages: int) -> float:
    """Microseconds of the server's CPU a message."""
    before = cpu_seconds(pid)
    peers.exchange(messages, under_way)
    return (cpu_seconds(pid) - before) / messages * 1e6


def measure(shapes: Sequence[tuple[int, int]], messages: int, runs: int) -> list[Row]:
    rows = []
    for count, under_way in shapes:
        costs: dict[str, list[float]] = {"own": [], "libzmq": []}
        with (
            tempfile.TemporaryDirectory(prefix="transferd-bench-") as directory,
            socket_path(Path(directory), "own.sock") as own,
            socket_path(Path(directory), "libzmq.sock") as other,
            server("own", own) as own_pid,
            server("libzmq", other) as other_pid,
        ):
            pairs = {"own": (own_pid, Peers(str(own), count)), "libzmq": (other_pid, Peers(str(other), count))}
            for pid, peers in pairs.values():
                cost_us(pid, peers, under_way, count * under_way)  # warm-up
            for _ in range(runs):
                for kind, (pid, peers) in pairs.items():
                    costs[kind].append(cost_us(pid, peers, under_way, max(messages, 4 * count * under_way)))
            for _, peers in pairs.values():
                peers.close()
        name = f"{count} sockets with {under_way} under way, CPU a message"
        rows.append(row(name, costs["own"], "us", statistics.median(costs["libzmq"]), "us libzmq's ROUTER"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--serve", nargs=2, metavar=("KIND", "ENDPOINT"), help=argparse.SUPPRESS)
    parser.add_argument("--sockets", type=int, default=0, help="only the rows of so many sockets")
    parser.add_argument("--messages", type=int, default=MESSAGES)
    parser.add_argument("--runs", type=int, default=RUNS)
    options = parser.parse_args()
    if options.serve:
        with Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the daemon does
            runner.run(serve(*options.serve))
        return
    raise_limit()
    where = machine()
    shapes = [shape for shape in SHAPES if options.sockets in (0, shape[0])]
    print_report(report("sockets", where, measure(shapes, options.messages, options.runs)), options.format)


if __name__ == "__main__":
    main()
