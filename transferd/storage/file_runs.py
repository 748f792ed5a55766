"""Runs of a file store's objects: as many as possible in one call of the extension, without the GIL (docs/files.md)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from transferd.storage.base import LEFT, Drainer
from transferd.storage.batch import Answer, Read, StoreBatch, Write
from transferd.storage.directory import ObjectDirectory
from transferd.storage.indexed import IndexedStorage
from transferd.storage.journal import UseJournal
from transferd.storage.lent import lent_by


class FileRuns(IndexedStorage):
    """An indexed store whose objects are files."""

    _directory: ObjectDirectory
    _journal: UseJournal

    def _write_run(self, batch: StoreBatch, run: Sequence[Write]) -> None:
        """As many as possible in one call of the extension, the others one by one."""
        self._journal.flush_soon()
        done = 0
        while done < len(run):
            usual = list(itertools.takewhile(self._is_usual, run[done:]))
            ended = self._write_usual(batch, usual) if usual else 0
            for write in usual[:ended]:
                write.error = None
                write.victims.clear()
            done += ended
            if ended < len(usual) or not usual:
                self._write_one(batch, run[done])
                done += 1

    def _is_usual(self, write: Write) -> bool:
        return not write.victims or write.spare(self._traffic.reads.has) is not None

    def _write_usual(self, batch: StoreBatch, writes: Sequence[Write]) -> int:
        slot = None if batch.fill is None else batch.slots.pop()
        try:
            items = [
                (
                    write.position,
                    write.item.name,
                    write.victims[0].name if write.victims else None,
                    batch.slots[write.position] if slot is None else slot[: write.item.nbytes],
                )
                for write in writes
            ]
            return self._directory.write_run(items, batch.fill, self._near)
        finally:
            if slot is not None:
                batch.slots.append(slot)

    def _read_run(self, drain: Drainer | None, slots: list[memoryview], run: Sequence[Read]) -> list[Answer]:
        """As many as possible in one call of the extension, the others one by one."""
        answers: list[Answer] = []
        while len(answers) < len(run):
            answers += self._read_usual(drain, slots, run[len(answers) :])
            if len(answers) < len(run):
                answers.append(self._read_one(drain, slots, run[len(answers)]))
        return answers

    def _read_usual(self, drain: Drainer | None, slots: list[memoryview], reads: Sequence[Read]) -> list[Answer]:
        if drain is not None and not (drain.wanted and lent_by(drain)):
            reads = reads[: drain.wanted]  # one by one: only the extension sees the end of a task by itself
        reads = list(itertools.takewhile(lambda read: read.entry.nbytes == read.item.nbytes, reads))
        slot = None if drain is None or not reads else slots.pop()
        try:
            items = [
                (read.position, read.item.name, slots[read.position] if slot is None else slot[: read.item.nbytes])
                for read in reads
            ]
            span = None if drain is None or not reads else reads[0].item.span
            return [answer or LEFT for answer in self._directory.read_run(items, drain, span)]
        finally:
            if slot is not None:
                slots.append(slot)
