"""A storage backend of your own: objects as plain files in one directory. docs/backends.md has what it must promise.

    python examples/plain_files.py DIRECTORY    writes and reads a block at a daemon that keeps its blocks there

A daemon finds it as storage.backend = "plain_files:PlainFiles", if this file's directory is in PYTHONPATH.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transferd import ReadStorageTask, SyncClient, WriteStorageTask
from transferd.client.launch import running
from transferd.config import Config
from transferd.runtime.clock import Clock
from transferd.storage.base import EXISTS, FOUND, MISSING, STORED, Blob, Outcome, SlotStorage


class PlainFiles(SlotStorage):
    """Objects as files in one directory."""

    backend = "plain-files"

    def __init__(self, config: Config, *, clock: Clock) -> None:  # noqa: ARG002 - it needs no clock
        self._directory = Path(config.storage.file.paths[0])  # its own settings may come from the environment

    async def open(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)

    async def exists(self, names: Sequence[str]) -> list[bool]:
        return await asyncio.to_thread(lambda: [self._path(name).exists() for name in names])

    async def put(self, blobs: Sequence[Blob]) -> list[Outcome]:
        return await asyncio.to_thread(lambda: [self._put(blob) for blob in blobs])

    async def get(self, blobs: Sequence[Blob]) -> list[Outcome]:
        return await asyncio.to_thread(lambda: [self._get(blob) for blob in blobs])

    async def quarantine(self, name: str) -> None:
        await asyncio.to_thread(self._path(name).unlink, missing_ok=True)

    async def close(self) -> None:
        """Nothing is open."""

    def statistics(self) -> dict[str, Any]:
        return {"objects": None, "bytes": None}

    def _path(self, name: str) -> Path:
        return self._directory / name.replace("/", "@")

    def _put(self, blob: Blob) -> Outcome:
        path = self._path(blob.name)
        if path.exists():
            return EXISTS
        half = path.with_suffix(".half")
        half.write_bytes(blob.data)
        half.rename(path)  # no reader ever sees half an object
        return STORED

    def _get(self, blob: Blob) -> Outcome:
        try:
            data = self._path(blob.name).read_bytes()
        except FileNotFoundError:
            return MISSING
        if len(data) != blob.data.nbytes:
            return MISSING
        blob.data[:] = data
        return FOUND


def main(directory: Path) -> None:
    """Write a block and read it again, at a daemon of our own with this backend."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    cache = {"ranks": 1, "layers": 1, "kv_heads": 1, "head_dim": 64, "block_size": 16, "device_blocks": 16}
    store = {"backend": "plain_files:PlainFiles", "file": {"path": str(directory / "objects")}}
    with running({"cache": cache, "storage": store}, directory) as daemon, SyncClient(daemon.endpoint) as client:
        caches = client.attach(0)
        caches["key"][0][3] = 42
        written = client.submit(WriteStorageTask(task_id="w", keys=["a block"], gpu_block_ids=[3]))
        read = client.submit(ReadStorageTask(task_id="r", keys=["a block"], gpu_block_ids=[7]))
        files = len(list((directory / "objects").iterdir()))
        print(written.status, read.status, float(caches["key"][0][7].flat[0]), f"{files} file")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as own:
            main(Path(own))
