"""What the kernel lets this process have: memory, threads, time, by the machine and by each control group it is in.

The one place that reads it. Whoever asks "is there room" asks here: offers, host blocks, staging, the checks before a
start, the doctor. A process has a group of its own (a unit with MemoryMax=, a container), which lies in others, and the
kernel applies the limits of all of them: version 2 of control groups, version 1, or both. Files that are cached do not
count as used, because the kernel drops them when memory is wanted.

`root` stands for / in tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

NO_LIMIT = 2**63
USUAL_MAPS = 65530
USUAL_RETRIES = 6
ROOT = Path("/")
CACHED = ("inactive_file", "active_file")  # in memory.stat


# By the kind of control groups and the resource: the files of limit and use, and the prefix of CACHED in memory.stat.
_FILES = {
    ("cgroup2", "memory"): ("memory.max", "memory.current", ""),
    ("cgroup2", "pids"): ("pids.max", "pids.current", ""),
    ("cgroup", "memory"): ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ("cgroup", "pids"): ("pids.max", "pids.current", ""),
}


class ControlGroup(NamedTuple):
    """A control group with a limit on a resource. left: of that limit."""

    path: Path
    limit: int
    left: int


def memory_total() -> int:
    """Bytes that this process could have at most: the machine's, or the smallest limit of its control groups."""
    return min([_of_machine("MemTotal"), *(group.limit for group in groups("memory"))])


def memory_left() -> int:
    """Bytes that this process can still allocate: what the machine has free, or its control groups if that is less."""
    return max(0, min([_of_machine("MemAvailable"), *(group.left for group in groups("memory"))]))


def pids_left() -> ControlGroup | None:
    """The control group in which fewest threads can still start; None if none has a limit."""
    return min(groups("pids"), key=lambda group: group.left, default=None)


def most_maps() -> int:
    """How many ranges of memory a process may map (vm.max_map_count)."""
    return _number(ROOT / "proc/sys/vm/max_map_count") or USUAL_MAPS


def connect_limit() -> float:
    """For how many seconds the kernel tries to connect over TCP: first for one, and each time twice as long."""
    return 2.0 ** ((_number(ROOT / "proc/sys/net/ipv4/tcp_syn_retries") or USUAL_RETRIES) + 1) - 1


def groups(resource: str) -> list[ControlGroup]:
    """The control groups of this process, its own first, that limit `resource`: "memory" or "pids"."""
    found = []
    for directory, kind in _directories(resource):
        limit_file, used_file, prefix = _FILES[kind, resource]
        limit = _number(directory / limit_file)
        if limit is None or limit >= NO_LIMIT - 2**20:  # version 1 has "no limit" as a number, in whole pages
            continue
        used = _number(directory / used_file) or 0
        if resource == "memory":
            used -= _cached(directory / "memory.stat", prefix)
        found.append(ControlGroup(directory, limit, limit - used))
    return found


def _directories(resource: str) -> Iterator[tuple[Path, str]]:
    """The directories of this process's groups for a resource, with their kind, each group before its parent."""
    for line in _text("proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            kind = "cgroup2"
        elif resource in controllers.split(","):
            kind = "cgroup"
        else:
            continue
        for root, mounted in _mounts(kind, "" if kind == "cgroup2" else resource):
            # With a namespace of control groups the mount begins at our group, and without one elsewhere.
            inside = path.removeprefix(root.rstrip("/")) if path.startswith(root) else "/"
            top = ROOT / mounted.lstrip("/")
            directory = top / inside.strip("/")
            for group in (directory, *directory.parents):
                yield group, kind
                if group == top:
                    break


def _mounts(kind: str, controller: str) -> Iterator[tuple[str, str]]:
    """Root and place of the mounts of this kind of control groups, with this controller if it is not ""."""
    for line in _text("proc/self/mountinfo").splitlines():
        first, _, second = line.partition(" - ")
        fields, (system, _, options) = first.split(), [*second.split(" ", 2), "", ""][:3]
        if system == kind and (not controller or controller in options.split(",")):
            yield _unescaped(fields[3]), _unescaped(fields[4])


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)


def _cached(stat: Path, prefix: str) -> int:
    try:
        rows = dict(line.split(" ", 1) for line in stat.read_text().splitlines())
        return sum(int(rows.get(prefix + name, 0)) for name in CACHED)
    except (OSError, ValueError):
        return 0


def _of_machine(row: str) -> int:
    found = re.search(rf"^{row}:\s+(\d+) kB", _text("proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else NO_LIMIT


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such controller here, or "max"
        return None


def _text(path: str) -> str:
    try:
        return (ROOT / path).read_text(errors="replace")
    except OSError:
        return ""
