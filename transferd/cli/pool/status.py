"""Reads a pool's status from the HTTP pages on its master's metrics port."""

from __future__ import annotations

import json
import re
from typing import Any

from rich.console import Console
from rich.table import Table

from transferd.errors import StorageUnavailable, one_line
from transferd.observability.units import size
from transferd.storage.mooncake.master_pages import read_page

# The master's metric: our name for it.
_COUNTERS = {
    "master_key_count": "keys",
    "master_soft_pin_key_count": "soft_pinned",
    "master_total_capacity_bytes": "capacity",
    "master_allocated_bytes": "used",
    "master_evicted_key_count": "evicted_keys",
    "master_put_start_alloc_failures_total": "no_room",
}
_COUNT = re.compile(r"^(\w+) (\S+)", re.MULTILINE)  # a sample without labels


def read_status(address: str, timeout: float = 2.0, *, keys: int = 0) -> dict[str, Any]:
    """One report of the pool whose master serves metrics at `address`: host:port, or several with commas.

    health: "ok" or the master's message.
    role: the master's, as it names it.
    ready: whether the master serves.
    keys, soft_pinned, evicted_keys, no_room: counts.
    capacity, used: bytes.
    segments: [{name, protocol, status, capacity, used}].
    key_names: at most `keys` of them.
    Raises StorageUnavailable if no Mooncake master answers at this address.
    """
    try:
        segments = json.loads(read_page(address, "get_segments_detail", timeout)).get("segments", [])
        health = json.loads(read_page(address, "health", timeout))
        counts = dict(_COUNT.findall(read_page(address, "metrics", timeout)))
        names = read_page(address, "get_all_keys", timeout).split() if keys else []
        return {
            "address": address,
            "health": health["status"],
            "role": health["role"],
            "ready": bool(health["service_ready"]),
            "segments": [_segment(segment) for segment in segments],
            "key_names": names[:keys],
            **{ours: int(float(counts.get(theirs, 0))) for theirs, ours in _COUNTERS.items()},
        }
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise StorageUnavailable(f"{address} does not answer like a Mooncake master: {error!r}") from error


def _segment(segment: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": segment["segment_name"],
        "protocol": segment.get("protocol", ""),
        "status": segment.get("status", ""),
        "capacity": int(segment["size_bytes"]),
        "used": int(segment.get("allocator_used_bytes", 0)),
    }


def print_status(report: dict[str, Any], console: Console) -> None:
    """Print the report as text."""
    state = "serving" if report["ready"] else "not serving"
    console.print(f"master {report['address']}: {report['health']}, {report['role']}, {state}")
    share = f" ({report['used'] / report['capacity']:.0%})" if report["capacity"] else ""
    console.print(
        f"{report['keys']:,} keys ({report['soft_pinned']:,} soft-pinned), {size(report['used'])} of "
        f"{size(report['capacity'])} used{share}, {report['evicted_keys']:,} evicted, "
        f"{report['no_room']:,} times no room"
    )
    if not report["segments"]:
        console.print("no segments: no node lends memory, so nothing can be stored")
        return
    table = Table("segment", "protocol", "status", "capacity", "used")
    for segment in report["segments"]:
        used, capacity = segment["used"], segment["capacity"]
        table.add_row(segment["name"], segment["protocol"], segment["status"], size(capacity), size(used))
    console.print(table)
    for name in report["key_names"]:
        console.print(one_line(name), markup=False, highlight=False)
