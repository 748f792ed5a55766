"""The command line of `mooncake_master`, with flags that suit transferd.

The master keeps metadata only; memory comes from the daemons (`storage.mooncake.global_segment_size`).
"""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
import socket
import sys
from pathlib import Path

from transferd.errors import TransferError

_LOWEST_PORT, _HIGHEST_PORT = 20_000, 65_535  # the range of free_port; Mooncake itself uses some ports below
_port_numbers = itertools.count(random.randrange(_HIGHEST_PORT))


def master_executable() -> str | None:
    """The path of the wheel's master, beside this interpreter or on PATH; None if it is not installed."""
    return wheel_program("mooncake_master")


def wheel_program(name: str) -> str | None:
    """The path of a program from Mooncake's package, beside this interpreter or on PATH; None if not installed."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def free_port() -> int:
    """A port without a listener, for a program that starts soon. Never returns the same port twice.

    The port is below the kernel's ephemeral range. Otherwise some connection could get it before the program starts,
    or during a restart. It could even be a connection to the program, which would then connect to itself.
    """
    for _ in range(100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            port = _LOWEST_PORT + next(_port_numbers) % (_first_ephemeral() - _LOWEST_PORT)
            probe.bind(("127.0.0.1", port))
            return port
    raise TransferError(f"no free port between {_LOWEST_PORT} and {_first_ephemeral()}")


def _first_ephemeral() -> int:
    """The first port of the kernel's ephemeral range if there is room below it, else the highest port."""
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return _HIGHEST_PORT
    return first if first > _LOWEST_PORT + 1000 else _HIGHEST_PORT


def master_command(host: str, port: int, metrics_port: int, lease: str = "5s", etcd: str = "") -> list[str]:
    """The command to execute. Raises TransferError if Mooncake is not installed.

    lease: how long a lookup protects an object from eviction. A decode engine that reads after a match, or after a
    prefill engine's write, must finish within it. Mooncake's default is 5 s as well.
    etcd: host:port of an etcd, or several with commas: one of the masters that share it leads, and the next takes over.
    """
    executable = master_executable()
    if executable is None:
        raise TransferError("mooncake_master is not installed: pip install 'transferd[mooncake-cpu]'")
    return [
        executable,
        f"--rpc_address={host}",
        f"--rpc_port={port}",
        f"--metrics_host={host}",
        f"--metrics_port={metrics_port}",
        f"--default_kv_lease_ttl={lease}",
        # A daemon's memory is lost when it ends. The master notices after this many seconds without a heartbeat.
        "--client_ttl=10",
        # The periodic log line only repeats `pool status` and /metrics.
        "--enable_metric_reporting=false",
        "--logtostderr=true",
        # Places what a node writes with that node.
        "--allocation_strategy=local_first",
        # Without the log of changes the next leader knows no object.
        *(["--enable_ha=true", f"--etcd_endpoints={etcd.replace(',', ';')}", "--enable_oplog=true"] if etcd else []),
    ]
