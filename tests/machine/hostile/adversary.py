"""The adversary's process: it forks a child for each action, which becomes a throw-away user first.

    python -m tests.machine.hostile.adversary PLACE        a JSON object, see actions.Place

Prints `ready`, reads lines `ACTION SEED USER` (USER: a number of Place.users) and answers each, as JSON: {"action",
"seed", "told", "wrong"}. What an action leaves behind ends with its child: its process group is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys

from tests.machine.hostile.accounts import become
from tests.machine.hostile.actions import ACTIONS, Place, Report
from transferd import TransferError

LIMIT_S = 35


def child(place: Place, name: str, seed: int, user: int) -> None:
    """Do one action as that user and write the report to standard output."""
    os.setpgid(0, 0)
    signal.alarm(LIMIT_S)
    uid, gid = place.users[user]
    os.environ["HOME"] = "/nonexistent"
    become(uid, gid, place.groups)
    report = Report()
    try:
        asyncio.run(ACTIONS[name](place, random.Random(seed), report))
    except Exception as error:  # noqa: BLE001 - a refusal that the action did not expect; the daemon is what counts
        report.told.append(f"{type(error).__name__}: {error}")
        if not isinstance(error, TransferError | OSError):
            report.wrong.append(f"the action itself is broken: {report.told[-1]}")
    line = {"action": name, "seed": seed, "told": report.told[:20], "wrong": report.wrong[:20]}
    os.write(1, (json.dumps(line) + "\n").encode())


def main() -> None:
    place = Place(**json.loads(sys.argv[1]))
    os.write(1, b"ready\n")
    for line in sys.stdin:
        name, seed, user = line.split()
        pid = os.fork()
        if pid == 0:
            try:
                child(place, name, int(seed), int(user))
            finally:
                os._exit(0)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what it forked
        if os.waitstatus_to_exitcode(status) != 0:
            told = [f"ended by signal {-os.waitstatus_to_exitcode(status)}"]
            os.write(1, (json.dumps({"action": name, "seed": int(seed), "told": told, "wrong": []}) + "\n").encode())


if __name__ == "__main__":
    main()
