"""The other daemons of a campaign: two that hand over blocks to each other, and one with AttentionStore's SDK.

Each is there only if an action attacks it. The SDK is the double of tests/support.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from tests.integration.test_token_storage import MODULES, PACKAGE
from tests.machine.hostile.accounts import Account
from tests.machine.hostile.honest_handover import Spec
from transferd.cli.pool.master import master_executable
from transferd.client import launch

ROOT = Path(__file__).parents[3]
SHAPE = {"ranks": 2, "layers": 3, "kv_heads": 2, "head_dim": 16, "block_size": 8, "device_blocks": 32, "host_blocks": 0}


NEIGHBOURS = ("transfers", "tokens")  # by the group of actions that needs them


def transfers_obstacle() -> str:
    """Why no daemon can hand over blocks here; "" if daemons can."""
    return "mooncake-transfer-engine is not installed" if master_executable() is None else ""


class Neighbours:
    """daemons: by name. handovers: honest engines between them. transfers, tokens: see Place; "" without one."""

    def __init__(
        self, directory: Path, keeper: Account, ports: list[int], wanted: set[str], stack: contextlib.ExitStack
    ) -> None:
        self.daemons: dict[str, launch.DaemonProcess] = {}
        self.handovers: list[Spec] = []
        self.transfers = self.tokens = ""
        if "transfers" in wanted:
            prefill, decode = (_transfers(directory, f"transfers-{port}", port, stack) for port in ports)
            self.daemons |= {"that sends": prefill, "that receives": decode}
            self.transfers = f"127.0.0.1:{ports[0]}"
            self.handovers = [Spec(prefill.endpoint, decode.endpoint, self.transfers)]
        if "tokens" in wanted:
            self.daemons["of tokens"] = daemon = _tokens(directory, keeper, stack)
            self.tokens = daemon.endpoint


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
