"""Runs a command in a user namespace of its own, with the uids that are given mapped to themselves, and no other.

    python -m tests.machine.hostile.namespace 0,61001 COMMAND…

The command becomes this process. Only root can map the uids of others. (unshare(1) maps just one without newuidmap.)
"""

from __future__ import annotations

import ctypes
import os
import sys

CLONE_NEWUSER = 0x10000000


def enter(ranges: list[tuple[int, int]]) -> None:
    """Enter a new user namespace that maps these ranges, (first, count), of uids and gids to themselves."""
    here = os.pipe()
    writer = os.fork()  # a process of the old namespace writes the map: the new one has no right to
    if writer == 0:
        os.read(here[0], 1)
        lines = "".join(f"{first} {first} {count}\n" for first, count in ranges)
        for kind in ("uid_map", "gid_map"):
            with open(f"/proc/{os.getppid()}/{kind}", "w", encoding="ascii") as file:
                file.write(lines)
        os._exit(0)
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.write(here[1], b"1")
    _, status = os.waitpid(writer, 0)
    if status != 0:
        raise RuntimeError("the map of the user namespace could not be written")
    for end in here:
        os.close(end)


def main() -> None:
    uids, *command = sys.argv[1:]
    enter([_range(part) for part in uids.split(",")])
    os.execvp(command[0], command)


def _range(text: str) -> tuple[int, int]:
    """`7` is one uid, `0+65536` a range."""
    first, _, count = text.partition("+")
    return int(first), int(count or 1)


if __name__ == "__main__":
    main()
