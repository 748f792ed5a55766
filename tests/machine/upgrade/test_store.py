"""A full store of an earlier release, read and written by this version, and by that release again; bytes compared.

Both run as trees beside each other, in this environment. test_machine.py installs both as the pages say.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.machine.upgrade.builds import RELEASES, ROOT, Release, exported
from transferd.client import launch
from transferd.client.sync_client import SyncClient
from transferd.config.toml import to_toml
from transferd.runtime.version import VERSION as THIS

ENGINE = Path(__file__).with_name("engine.py")
CACHE = {
    "ranks": 2,
    "layers": 2,
    "kv_heads": 1,
    "head_dim": 64,
    "block_size": 128,
    "device_blocks": 16,
    "host_blocks": 0,
}
BLOCK = 2 * 2 * 2 * 64 * 128 * 2  # bytes: ranks, planes, layers, head_dim, tokens, bytes of a number
HELD = 32  # about as many blocks as the store holds


@pytest.fixture(scope="module", params=RELEASES, ids=lambda release: release.tree)
def released(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A release's version and its tree."""
    release: Release = request.param
    if why := release.missing():
        pytest.skip(why)
    return release.tree, exported(release.commit, tmp_path_factory.mktemp("released"))


class Node:
    """A store on disk, and whichever version serves it."""

    def __init__(self, released: tuple[str, Path], directory: Path) -> None:
        self._directory = directory
        self._trees = dict([released, (THIS, ROOT)])
        self._starts = 0
        self.one_disk = self._tree({"path": str(directory / "a"), "capacity": HELD * BLOCK})

    def _tree(self, file: dict[str, Any]) -> dict[str, Any]:
        return {"cache": CACHE, "host": {"staging": "2MiB"}, "storage": {"file": file}}

    @property
    def disks_and_levels(self) -> dict[str, Any]:
        """What 0.3.0 does not know: a second disk, and a level of memory above both."""
        tree = self._tree({"path": [str(self._directory / "a"), str(self._directory / "b")], "capacity": HELD * BLOCK})
        tree["storage"] |= {"levels": ["memory", "file"], "memory": {"capacity": 8 * BLOCK}}
        tree["storage"]["level"] = {"file": {"write": "through"}}
        return tree

    @contextlib.contextmanager
    def serving(self, version: str, tree: dict[str, Any]) -> Iterator[launch.DaemonProcess]:
        self._starts += 1
        at = ["env", f"--chdir={self._trees[version]}", f"PYTHONPATH={self._trees[version]}"]
        with launch.running(tree, self._directory, name=f"d{self._starts}", prefix=at) as daemon:
            with SyncClient(daemon.endpoint) as client:
                assert client.stats()["version"] == version
            yield daemon

    def engine(self, version: str, daemon: launch.DaemonProcess, what: str) -> set[int]:
        command = [
            "env",
            f"PYTHONPATH={self._trees[version]}",
            sys.executable,
            str(ENGINE),
            daemon.endpoint,
            *what.split(),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return set(json.loads(done.stdout))


def test_up_and_down_again_with_a_full_store_pins_disks_and_levels(released: tuple[str, Path], tmp_path: Path) -> None:
    node, (old, _) = Node(released, tmp_path), released
    with node.serving(old, node.one_disk) as daemon:
        before = node.engine(old, daemon, "write 0 128 read 0 128")
        assert 0 < len(before) < 4 * HELD, "the store is full"

    with node.serving(THIS, node.one_disk) as daemon:
        after = node.engine(old, daemon, "read 0 128")  # an engine that is not upgraded yet
        assert after <= before
        assert len(after) >= 0.9 * len(before), "this version counts what the file system allocates: up to 4 KiB more"
        kept, purged = sorted(after)[:2], sorted(after)[-2:]
        with SyncClient(daemon.endpoint) as client:
            client.pin([f"block-{number}" for number in kept], 3600)
            client.purge([f"block-{number}" for number in purged])
        found = node.engine(THIS, daemon, "write 128 64 read 0 128")
        assert set(kept) <= found, "pins outlive a store that fills"
        assert not set(purged) & found
    with node.serving(THIS, node.disks_and_levels) as daemon:
        found = node.engine(THIS, daemon, "write 192 32 read 0 240")
        assert set(kept) <= found
        newest = set(range(208, 224))
        assert newest <= found, "two disks hold more than one"

    with node.serving(old, node.one_disk) as daemon:
        back = node.engine(old, daemon, "read 0 240")
        assert back, "the first disk's objects are that release's, too"
        assert back <= found
        assert not set(purged) & back
        node.engine(old, daemon, "write 224 16")
    with node.serving(THIS, node.disks_and_levels) as daemon:
        again = node.engine(THIS, daemon, "read 0 240")
        assert again >= set(range(224, 240)), "what it stored meanwhile"
        assert again <= found | set(range(224, 240)), "nothing else came"
        assert not set(purged) & again


def test_a_release_refuses_what_it_does_not_know_and_names_it(released: tuple[str, Path], tmp_path: Path) -> None:
    node, (_, tree) = Node(released, tmp_path), released
    config = tmp_path / "new.toml"
    config.write_text(to_toml(node.one_disk | {"storage": {"file": {"of_tomorrow": 1}}}))
    at = ["env", f"--chdir={tree}", f"PYTHONPATH={tree}", sys.executable, "-m", "transferd"]
    done = subprocess.run([*at, "check-config", "--config", str(config)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "storage.file.of_tomorrow" in done.stderr
