"""The other daemons of a campaign: two that hand over blocks to each other, one with AttentionStore's SDK, one on disk.

Each is there only if an action attacks it. The SDK is the double of tests/support. The one on disk has what may fail
beneath a daemon: objects that refuse whatever is done with them, little memory (a control group's), and a collector of
traces that takes connections and never answers.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import os
import random
import secrets
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_token_storage import MODULES, PACKAGE
from tests.machine.hostile.accounts import Account
from tests.machine.hostile.honest_engine import Spec as EngineSpec
from tests.machine.hostile.honest_handover import Spec
from tests.support.memory_group import memory_group
from transferd.cli.pool.master import master_executable
from transferd.client import launch

ROOT = Path(__file__).parents[3]
SHAPE = {"ranks": 2, "layers": 3, "kv_heads": 2, "head_dim": 16, "block_size": 8, "device_blocks": 32, "host_blocks": 0}


NEIGHBOURS = ("transfers", "tokens", "members")  # by the group of actions that needs them
GROUP_BYTES = 320 * 1024**2  # of the control group; the daemon's memory from before counts elsewhere
LONG_KEYS = 4096  # of a task whose span waits for the collector
AGE_S = 1.0  # a member that refuses is of no task that runs


def transfers_obstacle() -> str:
    """Why no daemon can hand over blocks here; "" if daemons can."""
    return "mooncake-transfer-engine is not installed" if master_executable() is None else ""


class Neighbours:
    """daemons: by name. handovers, engines: honest ones of theirs. transfers, tokens, members: see Place.

    keeper: the user of those daemons that do not run as root, and of the engine on files.
    """

    def __init__(
        self, directory: Path, keeper: Account, ports: list[int], wanted: set[str], stack: contextlib.ExitStack
    ) -> None:
        self.daemons: dict[str, launch.DaemonProcess] = {}
        self.handovers: list[Spec] = []
        self.engines: list[EngineSpec] = []
        self.transfers = self.tokens = self.members = ""
        self._files: Path | None = None
        if "transfers" in wanted:
            prefill, decode = (_transfers(directory, f"transfers-{port}", port, stack) for port in ports)
            self.daemons |= {"that sends": prefill, "that receives": decode}
            self.transfers = f"127.0.0.1:{ports[0]}"
            self.handovers = [Spec(prefill.endpoint, decode.endpoint, self.transfers)]
        if "tokens" in wanted:
            self.daemons["of tokens"] = daemon = _tokens(directory, keeper, stack)
            self.tokens = daemon.endpoint
        if "members" in wanted:
            self._files = directory / "members" / "store" / "objects"
            self.daemons["on files"] = daemon = _members(directory / "members", keeper, stack)
            self.members = daemon.endpoint
            mark = secrets.token_hex(16)
            self.engines = [EngineSpec(daemon.endpoint, "dave", keeper.uid, keeper.gid, mark, mark[:12], False, 7)]

    def refuse(self, dice: random.Random) -> None:
        """Let some old objects of the daemon on files refuse whatever is done with them: they are directories of root.

        (A whole directory that refuses takes no new objects either, so tasks would be `partial`, as they should be.)
        """
        if self._files is None:
            return
        before = time.time() - AGE_S
        all_ = sorted(map(Path, glob.glob(f"{self._files}/**/*@*", recursive=True)))  # skips what goes meanwhile
        for path in dice.sample(all_, min(6, len(all_))):
            with contextlib.suppress(OSError):  # evicted meanwhile, or refusing already
                if path.stat().st_mtime < before:
                    path.unlink()
                    (path / "full").mkdir(parents=True, mode=0o700)


def _transfers(directory: Path, name: str, port: int, stack: contextlib.ExitStack) -> launch.DaemonProcess:
    """Start a daemon that hands over directly."""
    tree: dict[str, Any] = {
        "cache": SHAPE,
        "host": {"staging": "64KiB"},
        "storage": {"backend": "none"},
        "pd": {"mode": "direct", "listen": f"127.0.0.1:{port}", "staging": "64KiB"},
    }
    return stack.enter_context(launch.running(tree, directory, name=name))


def _tokens(directory: Path, keeper: Account, stack: contextlib.ExitStack) -> launch.DaemonProcess:
    """Start a daemon of this user with the SDK; whoever is in the user's group may connect and map its memory."""
    home = directory / "tokens"
    home.mkdir()
    for name, text in {"__init__": PACKAGE, **MODULES}.items():
        file = home / "attentionstore_sdk" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    tree: dict[str, Any] = {
        "server": {"endpoint": f"ipc://{home}/door", "client_timeout": 10.0},
        "cache": SHAPE,
        "host": {"staging": "64KiB"},
        "storage": {"backend": "attention_store", "attention_store": {"driver": "sdk"}},
    }
    os.chown(home, keeper.uid, keeper.gid)
    path = f"PYTHONPATH={home}:{ROOT}"
    prefix = ["env", path, sys.executable, "-m", "tests.machine.hostile.daemon_as", str(keeper.uid), str(keeper.gid)]
    return stack.enter_context(launch.running(tree, home, name="tokens", prefix=prefix))


def _members(home: Path, keeper: Account, stack: contextlib.ExitStack) -> launch.DaemonProcess:
    """Start a daemon of this user on a small store of files, in a control group with a limit where one can be made."""
    home.mkdir()
    tree: dict[str, Any] = {
        "server": {"endpoint": f"ipc://{home}/door", "socket_mode": "0666", "client_timeout": 10.0},
        "cache": SHAPE | {"device_blocks": LONG_KEYS},
        "host": {"staging": "256KiB"},
        "storage": {"backend": "file", "file": {"path": f"{home}/store", "capacity": "1MiB", "reserve": "0B"}},
    }
    if importlib.util.find_spec("opentelemetry") is not None:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))  # takes connections, and no more
        tree["traces"] = {"endpoint": f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces", "sample": 1.0}
    os.chown(home, keeper.uid, keeper.gid)
    home.chmod(0o755)
    path = f"PYTHONPATH={ROOT}"
    prefix = ["env", path, sys.executable, "-m", "tests.machine.hostile.daemon_as", str(keeper.uid), str(keeper.gid)]
    group = None
    with contextlib.suppress(pytest.skip.Exception):
        group = stack.enter_context(memory_group(GROUP_BYTES))
    daemon = stack.enter_context(launch.running(tree, home, name="members", prefix=prefix))
    if group is not None:
        group.take(daemon.pid)
    return daemon
