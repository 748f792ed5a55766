"""The private daemon of a replay: a separate process, in a temporary directory."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transferd import config as configuration
from transferd.client.launch import start
from transferd.config.size import Capacities
from transferd.errors import TransferError
from transferd.tiers.offered import DIRECTORY
from transferd.tiers.segment import PREFIX

# A real layout in small, with pools small enough that every tier is used.
CACHE: dict[str, Any] = {"layers": 4, "kv_heads": 2, "head_dim": 64, "block_size": 64}
CACHE |= {"device_blocks": 512, "host_blocks": 1024}
DISK_SHARE = 0.5  # the share of the free disk space that blocks may fill
LOG_LINES = 20  # how many of the daemon's last log lines an error quotes


def settings(
    config: Path | None,
    ranks: int | None,
    cache: Mapping[str, Any],
    blocks: int | None = None,
    backend: str | None = None,
) -> dict[str, Any]:
    """The daemon's configuration: the file's cache and storage settings, or CACHE, with paths of our own.

    cache: overrides of CACHE if there is no file.
    blocks: overrides the number of device blocks and of host blocks.
    backend: the only one, instead of the configured ones.
    Raises ConfigError.
    """
    if config is None:
        tree: dict[str, Any] = {"cache": CACHE | dict(cache), "storage": {"backend": "file", "model": "replay"}}
    else:
        tree = configuration.to_tree(configuration.load(config))
        tree["server"] = {k: v for k, v in tree["server"].items() if k not in ("endpoint", "curve")}
        tree["storage"]["file"].pop("path")
        tree["metrics"] = {"listen": ""}
        tree["log"] = {"level": tree["log"]["level"]}
    if ranks is not None:
        tree["cache"]["ranks"] = ranks
        tree["cache"].pop("devices", None)
    if blocks is not None:
        tree["cache"]["device_blocks"] = tree["cache"]["host_blocks"] = blocks
    if backend is not None:
        tree["storage"] |= {"backend": backend, "levels": [], "level": {}}
    return tree


@contextlib.contextmanager
def own_daemon(tree: dict[str, Any]) -> Iterator[str]:
    """Run a daemon while the context lasts; yield its endpoint. Then stop it with SIGTERM and remove its files.

    tree: from `settings`.

    Raises TransferError if the daemon does not start, does not exit with code 0, or leaves shared memory behind.
    """
    with tempfile.TemporaryDirectory(prefix="transferd-replay-") as directory:
        file = tree["storage"].setdefault("file", {})
        most = Capacities.parse(file.get("capacity", int(configuration.FileStorageSection().capacity)))
        file["capacity"] = int(min(most, shutil.disk_usage(directory).free * DISK_SHARE))
        daemon = start(tree, Path(directory))
        try:
            yield daemon.endpoint
        finally:
            code = daemon.stop()
        if code:
            end = "\n".join(daemon.log.splitlines()[-LOG_LINES:])
            raise TransferError(f"the daemon ended with exit code {code}; its log ends:\n{end}")
        left = sorted(path.name for path in DIRECTORY.glob(f"{PREFIX}{daemon.pid}.*"))
        if left:
            raise TransferError(f"the daemon ended and left shared memory behind: {', '.join(left)}")
