"""Whether a daemon and an engine can map each other's memory, as far as that is known without a GPU.

Both processes are examined in /proc: their user, their namespaces (containers), and which /dev/shm they see.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from transferd.cli.doctor.checks import Diagnosis, Level, fail, ok, warn

NAMESPACES = ("pid", "ipc", "user")
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """What /proc says about a process."""

    pid: int
    uid: int = -1
    namespaces: tuple[str, ...] = ()  # their identities, by name
    shm: tuple[int, int] | None = None  # (device, inode) of the process's /dev/shm; None if it has none
    problem: str = ""  # why it could not be examined; "" if it could


def look_at(pid: int) -> ProcessFacts:
    """Examine a process. Only root can see the namespaces of other users' processes."""
    place = PROC / str(pid)
    if pid <= 0:
        return ProcessFacts(pid, problem="it is in a PID namespace (container) that cannot be seen from here")
    try:
        uid = place.stat().st_uid
        namespaces = tuple(os.readlink(place / "ns" / name) for name in NAMESPACES)
        shm = _identity(place / "root/dev/shm")
    except PermissionError:
        return ProcessFacts(pid, problem="it belongs to another user: run the doctor as root")
    except OSError:
        return ProcessFacts(pid, problem="there is no such process here: it has ended, or is in another PID namespace")
    return ProcessFacts(pid, uid, namespaces, shm)


def _identity(directory: Path) -> tuple[int, int] | None:
    try:
        found = directory.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def sharing(device: str, daemon: ProcessFacts, engine: ProcessFacts) -> Diagnosis:
    """Compare both. device: cache.device. The finding names all differences, and the remedy for the worst one."""
    name = f"engine {engine.pid or 'elsewhere'}"
    unseen = next((f"process {one.pid}: {one.problem}" for one in (daemon, engine) if one.problem), "")
    if unseen:
        return warn(name, unseen, "run the doctor as root, where daemon and engine are both seen (containers: --pid)")
    found = sorted(_differences(device, daemon, engine), key=lambda one: one[0] is not Level.FAIL)
    if not found:
        return ok(name, f"shares user {engine.uid}, /dev/shm, PID, IPC and user namespaces with the daemon")
    level, _, remedy = found[0]
    return (fail if level is Level.FAIL else warn)(name, "; ".join(what for _, what, _ in found), remedy)


def _differences(device: str, daemon: ProcessFacts, engine: ProcessFacts) -> list[tuple[Level, str, str]]:
    """(level, what, remedy) of each difference."""
    cuda = device == "cuda"
    found: list[tuple[Level, str, str]] = []
    other = {name for name, a, b in zip(NAMESPACES, daemon.namespaces, engine.namespaces, strict=True) if a != b}
    if daemon.shm is None or daemon.shm != engine.shm:
        what = "another /dev/shm: " + (
            "the older CUDA event cannot be opened" if cuda else "memory is found there by name"
        )
        remedy = "share it: --ipc of one container in the other, or an emptyDir of medium Memory in both"
        found.append((Level.WARN if cuda else Level.FAIL, what, remedy))
    if "pid" in other:
        what = "another PID namespace: " + ("CUDA IPC does not work" if cuda else "its death is not seen at once")
        found.append((Level.FAIL if cuda else Level.WARN, what, "share it: --pid=host, or shareProcessNamespace: true"))
    if cuda and "ipc" in other:
        found.append((Level.WARN, "another IPC namespace", "share it: --ipc=host, or hostIPC: true"))
    if cuda and "user" in other:
        what = "another user namespace: the driver may refuse its memory"
        found.append((Level.WARN, what, "PrivateUsers=no in the unit; containers: the same --userns"))
    if cuda and daemon.uid != engine.uid:
        what = f"user {engine.uid}, and the daemon is {daemon.uid}: the driver may refuse its memory"
        found.append((Level.WARN, what, "run daemon and engine as one user (User= in the unit)"))
    return found
