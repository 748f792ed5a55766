"""Starts the two nodes of the demo: a pool's master, two daemons, two engines."""

from __future__ import annotations

import contextlib
import random
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from transferd.cli.demo_pd.play import PdDemo, PdDemoReport, Prompt, Side, most_blocks, prompts
from transferd.cli.pool.master import free_port, master_command
from transferd.cli.replay.kvdata import KvData
from transferd.cli.replay.trace import TraceRequest, generated_workload
from transferd.client.client import Client
from transferd.client.launch import DaemonProcess, running
from transferd.errors import one_line
from transferd.runtime.compat import Runner
from transferd.tasks import TRACE_BLOCK_TOKENS

MODES = ("storage", "direct")
RANKS = 2
REQUESTS = 150
CONCURRENCY = 4
SEED = 7
CACHE = {"ranks": RANKS, "layers": 4, "kv_heads": 1, "head_dim": 64, "block_size": 16, "device_blocks": 512}
STAGING = "2MiB"
SEGMENT = "512MiB"  # what each node lends to the pool; Linux allocates only the pages that are written


def run(
    console: Console, requests: Sequence[TraceRequest] | None = None, modes: Sequence[str] = MODES
) -> list[PdDemoReport]:
    """Play the demo in each mode, with generated requests by default. Raises TransferError if a part does not start."""
    import uvloop

    workload = _generated() if requests is None else requests
    todo = prompts(workload, CACHE["block_size"], most_blocks(CACHE["device_blocks"], CONCURRENCY))
    reports = []
    for mode in modes:
        with two_nodes() as network, tempfile.TemporaryDirectory(prefix="transferd-pd-") as directory:
            console.print(f"{mode}: {len(todo)} requests from a prefill to a decode node, {network.kind}")
            with (
                _daemons(mode, network, Path(directory)) as (prefill, decode),
                Runner(loop_factory=uvloop.new_event_loop) as runner,
            ):
                reports.append(runner.run(_play(PdDemoReport(mode, network.kind), prefill, decode, todo)))
    return reports


def _generated() -> list[TraceRequest]:
    """Conversations; most of them end in the middle of a block."""
    chance = random.Random(SEED)
    return [
        msgspec.structs.replace(request, input_length=request.input_length - chance.randrange(TRACE_BLOCK_TOKENS))
        for request in generated_workload(SEED, REQUESTS)
    ]


async def _play(
    report: PdDemoReport, prefill: DaemonProcess, decode: DaemonProcess, todo: Sequence[Prompt]
) -> PdDemoReport:
    async with _engine(prefill) as sender, _engine(decode) as receiver:
        await PdDemo(sender, receiver, report).play(todo, CONCURRENCY)
    return report


@contextlib.asynccontextmanager
async def _engine(daemon: DaemonProcess) -> AsyncIterator[Side]:
    async with Client(daemon.endpoint) as client:
        caches = [await client.attach(rank) for rank in range(RANKS)]
        yield Side(client, KvData(caches), list(range(CACHE["device_blocks"])))


@contextlib.contextmanager
def _daemons(mode: str, network: Network, directory: Path) -> Iterator[tuple[DaemonProcess, DaemonProcess]]:
    """Run both daemons, in storage mode with a master on the prefill node. Raises TransferError."""
    with contextlib.ExitStack() as stack:
        master = ""
        if mode == "storage":
            master = stack.enter_context(_master(network.prefill, directory))
        yield (
            stack.enter_context(_daemon("prefill", mode, network.prefill, master, directory)),
            stack.enter_context(_daemon("decode", mode, network.decode, master, directory)),
        )


def _daemon(
    name: str, mode: str, node: Node, master: str, directory: Path
) -> contextlib.AbstractContextManager[DaemonProcess]:
    storage: dict[str, Any] = {"backend": "none"}
    if master:
        mooncake = {"master_server_addr": master, "local_hostname": node.address, "global_segment_size": SEGMENT}
        storage = {"backend": "mooncake", "model": "rehearsal", "mooncake": mooncake}
    tree = {
        "cache": CACHE | {"host_blocks": 0},
        "host": {"staging": STAGING},
        "storage": storage,
        "pd": {"mode": mode, "listen": f"{node.address}:0", "staging": STAGING},
    }
    return running(tree, directory, name=name, prefix=node.prefix)


@contextlib.contextmanager
def _master(node: Node, directory: Path) -> Iterator[str]:
    """Run a master on `node`; yields its address. Daemons wait for it, so this does not."""
    port, metrics = free_port(), free_port()
    command = [*node.prefix, *master_command(node.address, port, metrics)]
    with (directory / "master.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield f"{node.address}:{port}"
    finally:
        process.kill()
        process.wait()


def print_summary(reports: Sequence[PdDemoReport], console: Console) -> None:
    """Explain the figures to a reader who knows LLM serving but not transferd."""
    for report in reports:
        how = "stored in a Mooncake pool and loaded from it" if report.mode == "storage" else "written node to node"
        console.print(
            f"[bold]{report.mode}[/]: {report.requests} requests in {report.seconds:.1f} s over {report.network}; "
            f"{report.blocks:,} blocks on {RANKS} ranks {how}, {report.incomplete_blocks} of them incomplete "
            f"({report.bytes / 1e6:,.0f} MB)."
        )
        if report.good:
            console.print("  Every byte on the decode node was compared with what prefill computed: no difference.")
        for error in report.errors:
            console.print(f"  {one_line(error)}", style="red", markup=False)
        if report.verify_failures:
            console.print(f"  [bold red]{report.verify_failures} blocks had wrong bytes. This is a bug.[/]")
        if report.failures:
            console.print(f"  [bold red]{report.failures} handovers failed.[/]")


TIMEOUT_S = 10.0
CABLE = "cable"


@dataclass(frozen=True, slots=True)
class Node:
    """A node."""

    address: str  # where the other node reaches this one
    prefix: tuple[str, ...] = ()  # before a command: runs it on this node


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
    """Create a network namespace; yields the pid of a process in it, which ends when its standard input closes.

    So nothing is left behind, in whatever way this process ends.
    """
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
