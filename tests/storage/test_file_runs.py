"""Runs of objects in the extension, beside the twin in Python: equal bytes and answers, whatever lies in their way."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.storage.harness import file_config, put_stranger
from tests.support.descriptors import open_below
from tests.workers.rig import Rig, read, write
from transferd.runtime.threads import ThreadPools
from transferd.storage import file, file_io
from transferd.storage.file import FileStorage
from transferd.storage.presence import PresenceCheck
from transferd.tasks import RankOutcome
from transferd.workers import cpu_blocks

pytestmark = pytest.mark.skipif(not (file_io.NATIVE and cpu_blocks.NATIVE), reason="the installation had no compiler")

BLOCKS = list(range(16))
STRANGERS = ("directory", "link", "fifo")
DAMAGES = ("gone", "shorter", "longer", "payload", "footer", "of another key", "backup", *STRANGERS)


class Pair:
    """Two ranks with the same blocks: one stores with the extension, one without."""

    def __init__(self, native: Rig, slow: Rig, patch: pytest.MonkeyPatch) -> None:
        self.rigs = {True: native, False: slow}
        self._patch = patch

    async def run(self, task: Any, targets: Sequence[int] = ()) -> list[Any]:
        """How the task ended on each, the blocks that it has loaded, and what is counted."""
        ended = []
        for native, rig in self.rigs.items():
            self._patch.setattr(file_io, "NATIVE", native)
            outcome = await rig.run(task)
            await rig.background.settled()
            counts = {name: store_of(rig)._counts[name] for name in ("stored", "wrong_length", "gone", "corrupt")}
            ended.append((told(rig, outcome), [rig.block(targets[i]) for i in outcome.moved if targets], counts))
        return ended

    def trees(self) -> list[dict[str, bytes]]:
        """The files of each store, without its objects' bytes in the quarantine."""
        return [tree(root(rig) / "objects") for rig in self.rigs.values()]

    def damage(self, dice: random.Random, key: str, kind: str, other: str) -> None:
        seed = dice.random()
        for rig in self.rigs.values():
            damage(random.Random(seed), rig, key, kind, other)


def root(rig: Rig) -> Path:
    return Path(store_of(rig).path)


def store_of(rig: Rig) -> FileStorage:
    assert isinstance(rig.storage, FileStorage)
    return rig.storage


def told(rig: Rig, outcome: RankOutcome) -> Any:
    """The outcome, without the directory and the number of a temporary file in an error's text."""
    error = outcome.error
    text = None if error is None else (error.code, error.message.replace(str(root(rig)), "ROOT").partition("~")[0])
    return list(outcome.moved), outcome.stop, text


def tree(directory: Path) -> dict[str, bytes]:
    files = [path for path in sorted(directory.rglob("*")) if not path.is_dir() or path.is_symlink()]
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        for path in files
    }


def damage(dice: random.Random, rig: Rig, key: str, kind: str, other: str) -> None:
    path = Path(store_of(rig)._directory.path(rig.name(key)))
    kept = root(rig) / "kept"
    kept.write_bytes(b"somebody's")
    content = bytearray(path.read_bytes())
    if kind == "backup":
        (root(rig) / f"backup of {key}").hardlink_to(path)
        return
    if kind in ("payload", "footer"):
        content[dice.randrange(len(content) - 128) if kind == "payload" else -dice.randrange(1, 128)] ^= 1
    if kind == "of another key":
        content = bytearray(Path(store_of(rig)._directory.path(rig.name(other))).read_bytes())
    path.unlink()
    if kind in STRANGERS:
        put_stranger(path, kind, kept)
    elif kind != "gone":
        path.write_bytes(content[:-1] if kind == "shorter" else content + b"x" * (kind == "longer"))


@pytest.fixture(params=[False, True], ids=["cached", "direct"])
async def pair(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    # A look at the disk would forget what a test has replaced, sooner or later.
    monkeypatch.setattr(file, "OLDEST", 0)
    monkeypatch.setattr(PresenceCheck, "missed", lambda *_: None)
    made = []
    for name in ("native", "slow"):
        section = file_config(tmp_path / name, 40 * 36864, direct_io=request.param)
        storage = FileStorage(section, threads=ThreadPools(1), unit=4096)
        rig = await Rig(slots=8, storage=storage, block_size=64, head_dim=64).open()
        rig.sim_device.addressable = True
        rig.memory[:] = np.random.default_rng(7).integers(0, 256, len(rig.memory), np.uint8)
        made.append(rig)
    yield Pair(made[0], made[1], monkeypatch)
    for rig in made:
        assert rig.staging.statistics()["used"] == 0
        await rig.close()
    assert open_below(tmp_path) == []


@pytest.mark.parametrize("seed", range(2))
async def test_both_do_the_same(pair: Pair, seed: int) -> None:
    dice = random.Random(seed)
    stored: list[str] = []
    done = 0
    for number in range(5):
        keys = [f"{number}-{i}" for i in range(12)]
        again = dice.sample(stored, min(2, len(stored)))
        keys[:0] = again
        blocks = dice.sample(BLOCKS, len(keys))
        one, other = await pair.run(write(keys, blocks, f"w{number}"))
        assert one == other
        done += len(one[0][0])
        stored = keys + [key for key in stored if key not in keys][:12]
        assert pair.trees()[0] == pair.trees()[1]
        bad = dice.sample(keys[len(again) :], 4)
        for key in bad[:3]:
            pair.damage(dice, key, dice.choice(DAMAGES), other=bad[3])
        targets = dice.sample(BLOCKS, len(keys))
        for turn in ("r", "again"):
            one, other = await pair.run(read(keys, targets, f"{turn}{number}", prefix=dice.random() < 0.5), targets)
            assert one == other
            done += len(one[1])
    assert done > 5 * 12
