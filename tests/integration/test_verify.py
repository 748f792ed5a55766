"""`transferd verify`: a store that daemons filled is checked without them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.caches import attached
from tests.machine.faults.resources import in_own_mounts
from tests.support.blobs import put
from transferd import Status, WriteStorageTask
from transferd.blocks.formats import FOOTER_BYTES, ObjectNamer, key_digest, seal, stamp_of_name
from transferd.cli.verify import MOST_LISTED, verify
from transferd.client.launch import running
from transferd.config import FileStorageSection
from transferd.config.size import Capacities
from transferd.errors import ConfigError
from transferd.runtime.compat import timeout
from transferd.storage.base import STORED, Blob
from transferd.storage.file import FileStorage
from transferd.storage.paths import path_of

SIZES = {"gqa-1": 1000, "mla-2": 70_000}


def name(number: int, layout: str = "gqa-1") -> str:
    namer = ObjectNamer("demo model/α", layout)
    return namer.names(f"RL-{number % 2}", [key_digest(f"key {number}")], number % 3)[0]


def sealed(number: int, layout: str = "gqa-1") -> bytearray:
    payload = SIZES[layout]
    slot = bytearray(os.urandom(payload) + bytes(FOOTER_BYTES))
    seal(memoryview(slot), payload, stamp_of_name(name(number, layout)))
    return slot


def store_of(path: Path) -> FileStorage:
    return FileStorage(FileStorageSection(path=str(path), capacity=Capacities(1024**3)))


def fill(path: Path, count: int = 30) -> None:
    asyncio.run(_fill(path, count))


async def _fill(path: Path, count: int) -> None:
    storage = store_of(path)
    await storage.open()
    for layout in SIZES:
        blobs = [Blob(name(i, layout), memoryview(sealed(i, layout))) for i in range(count)]
        assert await put(storage, blobs) == [STORED] * count
    await storage.close()


def file_of(root: Path, number: int, layout: str = "gqa-1") -> Path:
    return root / "objects" / path_of(name(number, layout))


def spoil(root: Path) -> dict[str, str]:
    """Five kinds of damage. Returns name -> what it must be called."""
    flipped = bytearray(file_of(root, 1).read_bytes())
    flipped[17] ^= 1
    file_of(root, 1).write_bytes(flipped)
    os.truncate(file_of(root, 2, "mla-2"), 40_000)
    file_of(root, 3).write_bytes(bytes(1000 + FOOTER_BYTES))
    file_of(root, 4).write_bytes(file_of(root, 10).read_bytes())
    file_of(root, 5).write_bytes(b"")
    return {name(1): "checksum", name(2, "mla-2"): "magic", name(3): "magic", name(4): "key", name(5): "magic"}


def transferd(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "transferd", "verify", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_a_whole_store_is_good_whatever_its_layouts_and_generations(tmp_path: Path) -> None:
    fill(tmp_path)
    report = verify(str(tmp_path))
    assert report.good
    assert report.objects == 60
    assert report.bytes == sum(30 * (size + FOOTER_BYTES) for size in SIZES.values())


def test_every_damaged_object_is_named_and_nothing_is_changed(tmp_path: Path) -> None:
    fill(tmp_path)
    expected = spoil(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    report = verify(str(tmp_path))
    assert {bad.name: bad.damage for bad in report.bad} == expected
    assert {bad.file for bad in report.bad} == {str(tmp_path / "objects" / path_of(bad)) for bad in expected}
    assert report.damage == {"checksum": 1, "magic": 3, "key": 1}
    assert (report.objects, report.quarantined) == (60, 0)
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}


def test_quarantine_leaves_a_store_that_is_good(tmp_path: Path) -> None:
    fill(tmp_path)
    expected = spoil(tmp_path)
    assert verify(str(tmp_path), quarantine=True).quarantined == len(expected)
    again = verify(str(tmp_path))
    assert again.good
    assert again.objects == 60 - len(expected)
    assert len(list((tmp_path / "quarantine").iterdir())) == len(expected)

    async def nothing_bad_is_left() -> None:
        storage = store_of(tmp_path)
        await storage.open()
        assert not any(await storage.exists(list(expected)))
        await storage.close()

    asyncio.run(nothing_bad_is_left())


def test_a_damaged_object_that_can_neither_be_moved_nor_removed_is_an_error_of_its_own(tmp_path: Path) -> None:
    fill(tmp_path)
    expected = spoil(tmp_path)
    stuck = file_of(tmp_path, 3)
    mounts = in_own_mounts(f"mount --bind {stuck} {stuck}")  # busy
    command = [
        *mounts,
        sys.executable,
        "-m",
        "transferd",
        "verify",
        "--path",
        str(tmp_path),
        "--quarantine",
        "--format",
        "json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (1, "")
    report = json.loads(done.stdout)
    assert (report["objects"], report["damaged"], report["quarantined"]) == (60, len(expected), len(expected) - 1)
    [error] = report["errors"]
    assert str(stuck) in error
    assert {bad["file"] for bad in report["bad"] if bad["name"] == name(3)} == {str(stuck)}


def test_a_store_in_use_can_be_verified_but_not_changed(tmp_path: Path) -> None:
    fill(tmp_path)

    async def while_it_is_open() -> None:
        storage = store_of(tmp_path)
        await storage.open()
        assert verify(str(tmp_path)).good
        with pytest.raises(ConfigError, match="is in use by another daemon"):
            verify(str(tmp_path), quarantine=True)
        await storage.close()

    asyncio.run(while_it_is_open())


def test_a_report_has_a_bound(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    for number in range(MOST_LISTED + 5):
        path = file_of(tmp_path, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"nothing")
    report = verify(str(tmp_path))
    assert (report.damaged, len(report.bad)) == (MOST_LISTED + 5, MOST_LISTED)


def test_what_is_not_sealed_is_counted_and_is_no_damage(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    raw = tmp_path / "objects" / path_of("someone/elses/object")
    raw.parent.mkdir(parents=True)
    raw.write_bytes(b"raw")
    report = verify(str(tmp_path))
    assert report.good
    assert (report.objects, report.unsealed) == (3, 1)


def test_the_command_says_it_in_text_and_json_and_by_its_exit_code(tmp_path: Path) -> None:
    fill(tmp_path)
    config = tmp_path / "transferd.toml"
    config.write_text(f'[storage.file]\npath = "{tmp_path}"\n')
    good = transferd("--config", str(config))
    assert (good.returncode, good.stderr) == (0, "")
    assert "60 objects" in good.stdout
    assert "none damaged" in good.stdout
    expected = spoil(tmp_path)
    bad = transferd("--path", str(tmp_path))
    assert bad.returncode == 1
    for object_name, damage in expected.items():
        assert f"{damage} {object_name}\n    {tmp_path}/objects/{path_of(object_name)}\n" in bad.stdout
    told = transferd("--path", str(tmp_path), "--format", "json", "--quarantine")
    assert told.returncode == 1
    report: dict[str, Any] = json.loads(told.stdout)
    assert (report["objects"], report["damaged"], report["quarantined"]) == (60, 5, 5)
    assert {item["name"]: item["damage"] for item in report["bad"]} == expected
    assert {Path(item["file"]) for item in report["bad"]} == set((tmp_path / "quarantine").iterdir())
    assert transferd("--path", str(tmp_path)).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--path", "/nowhere"], "storage.file.path: the directory contains no store ('/nowhere')"),
        (["--set", 'storage.backend="memory"'], "storage.backend: verify supports only the file backend ('memory')"),
    ],
)
def test_what_is_no_file_store_is_bad_usage(arguments: list[str], told: str) -> None:
    done = transferd(*arguments)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (2, "", told)


async def test_a_scrubbing_daemon_finds_damage_before_a_read_does(tmp_path: Path) -> None:
    tree = {
        "cache": {"ranks": 1, "layers": 1, "kv_heads": 1, "head_dim": 16, "block_size": 4, "device_blocks": 8},
        "storage": {"backend": "file", "scrub_rate": "100MiB"},
    }
    keys, blocks = ["a", "b", "c"], [0, 1, 2]
    with running(tree, tmp_path) as daemon:
        async with attached(daemon.endpoint) as client:
            write = WriteStorageTask(task_id="w", keys=keys, gpu_block_ids=blocks)
            assert (await client.submit(write)).status is Status.OK
    victim = min((tmp_path / "blocks" / "objects").rglob("*@0"))
    data = bytearray(victim.read_bytes())
    data[7] ^= 1
    victim.write_bytes(data)
    with running(tree, tmp_path) as daemon:
        async with attached(daemon.endpoint) as client:
            async with timeout(60):
                while not (scrub := (await client.stats())["storage"]["scrub"])["passes"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            assert (scrub["objects"], scrub["damaged"]) == (3, 1)
            assert (await client.stats())["storage"]["corrupt"] == 1
            matches = [await client.match([key]) for key in keys]
            assert sorted(matches) == [0, 1, 1]
            assert (await client.submit(write)).status is Status.OK, "what is gone can be stored again"
            assert await client.match(keys) == 3
