"""Runs commands as another user, who may not be able to read this installation: imports first, then drops rights.

    python other_user.py UID GID COMMAND…              the command line, with this environment and no other groups
    python other_user.py UID GID --same-verdicts       for each line of stdin, a configuration as JSON: prints
                                                       [what check-config says, what a start says], "" if they accept

A start is that of a real daemon in a process of its own, which is stopped at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import io
import json
import os
import pkgutil
import sys

import structlog

import transferd
from transferd.config import from_tree
from transferd.daemon.daemon import Daemon
from transferd.daemon.preflight import build, examine
from transferd.errors import ConfigError, TransferError


def import_all() -> None:
    """Import what commands import when they run."""
    for module in pkgutil.walk_packages(transferd.__path__, "transferd."):
        if not module.name.startswith(("transferd.adapters", "transferd.__main__")):
            with contextlib.suppress(ImportError):  # an optional package
                importlib.import_module(module.name)
    for name in ("uvloop", "encodings.idna", "multiprocessing.connection"):  # what libraries import at their first use
        importlib.import_module(name)


def drop(uid: int, gid: int) -> None:
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def verdicts(text: str) -> list[str]:
    """What check-config and a start say of a configuration."""
    said = []
    for look in (_check, _start):
        try:
            look(text)
            said.append("")
        except (ConfigError, TransferError) as error:
            said.append(str(error))
    return said


def _check(text: str) -> None:
    config = from_tree(json.loads(text))
    examine(config, build(config))


def _start(text: str) -> None:
    async def life() -> None:
        daemon = Daemon(from_tree(json.loads(text)))
        try:
            await daemon.open()
        finally:
            await daemon.stop(lambda: 5.0)

    asyncio.run(life())


def main() -> None:
    uid, gid, *arguments = sys.argv[1:]
    import_all()
    if arguments == ["--same-verdicts"]:
        structlog.configure(logger_factory=structlog.ReturnLoggerFactory())  # stdout is for the verdicts
        for line in sys.stdin:
            ours, theirs = os.pipe()
            if (child := os.fork()) == 0:
                drop(int(uid), int(gid))
                with contextlib.redirect_stderr(io.StringIO()):
                    os.write(theirs, json.dumps(verdicts(line)).encode())
                os._exit(0)
            os.close(theirs)
            with os.fdopen(ours) as answer:
                print(answer.read(), flush=True)
            os.waitpid(child, 0)
        return
    from transferd.cli.main import main as command

    drop(int(uid), int(gid))
    sys.argv = ["transferd", *arguments]
    command()


if __name__ == "__main__":
    main()
