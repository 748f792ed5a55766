"""Runs of a file store's objects, in native calls as far as they are usual (docs/files.md)."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from transferd.runtime.threads import Direction
from transferd.storage import file_io
from transferd.storage.base import Drainer
from transferd.storage.batch import Answer, Read, StoreBatch, Write, run_length
from transferd.storage.directory import ObjectDirectory, ToLoad, ToStore
from transferd.storage.indexed import IndexedStorage

POSITION = operator.attrgetter("position")


class FileRuns(IndexedStorage):
    """An indexed store whose objects are files."""

    _directory: ObjectDirectory

    async def _write_all(self, batch: StoreBatch, writes: Sequence[Write]) -> None:
        """The usual ones in a native call, the others one by one."""
        usual, left = list[Write](), list[Write]()
        for write in writes:
            (usual if self._is_usual(write, writes[0].item.nbytes) else left).append(write)
        if usual:
            left += await self._write_usual(batch, usual)
        if left:
            left.sort(key=POSITION)  # in a full file system, the first of a chain gets the room
            await super()._write_all(batch, left)

    def _is_usual(self, write: Write, nbytes: int) -> bool:
        room = not write.victims or write.spare(self._traffic.reads.has) is not None
        return file_io.NATIVE and write.item.nbytes == nbytes and room

    async def _write_usual(self, batch: StoreBatch, writes: list[Write]) -> list[Write]:
        """Returns those that are left."""
        slots = batch.slots if batch.fill is not None else []
        items = [
            ToStore(
                write.position,
                write.item.name,
                write.victims[0].name if write.victims else None,
                write.item.nbytes,
                None if slots else batch.slots[write.position],
            )
            for write in writes
        ]
        storing = self._directory.storing(items, slots, run_length(writes, self._shares), batch.fill, self._near)
        try:
            names = [item.name for item in items]
            await self._effects.run_native(Direction.OUT, storing.call, "store", names, at_once=len(slots))
        finally:
            made, tidy = self._directory.stored(items, storing)
            if tidy is not None:
                self._effects.chore(tidy, "files that are not needed")
        left = []
        for write, done in zip(writes, made, strict=True):
            if done:
                write.error = None
                write.victims.clear()
            else:
                left.append(write)
        return left

    async def _read_all(
        self, drain: Drainer | None, slots: list[memoryview], reads: Sequence[Read]
    ) -> Sequence[Answer]:
        """The usual ones in a native call, the others one by one."""
        nbytes = reads[0].item.nbytes if reads and file_io.NATIVE else -1
        usual = [read for read in reads if read.entry.nbytes == read.item.nbytes == nbytes]
        answers: dict[int, Answer] = {}
        if usual:
            shared = slots if drain is not None else []
            items = [
                ToLoad(position, item.name, item.nbytes, None if shared else slots[position])
                for position, item in ((read.position, read.item) for read in usual)
            ]
            run = run_length(usual, self._shares)
            loading = self._directory.loading(items, shared, run, drain, None if drain is None else usual[0].item.span)
            names = [item.name for item in items]
            await self._effects.run_native(Direction.IN, loading, "load", names, at_once=len(shared))
            found = zip(usual, self._directory.loaded(items, loading), strict=True)
            answers = {read.position: answer for read, answer in found if answer is not None}
        left = [read for read in reads if read.position not in answers]
        if left:
            rest = zip(left, await super()._read_all(drain, slots, left), strict=True)
            answers.update((read.position, answer) for read, answer in rest)
        return [answers[read.position] for read in reads]
