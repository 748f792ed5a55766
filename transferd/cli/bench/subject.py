"""What `transferd bench storage` measures: a backend, and the least work that it could do for the same bytes."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from transferd.blocks.layout.base import align
from transferd.config import Config
from transferd.storage.base import Storage
from transferd.storage.directory import allocated_at_once

OBJECTS = 64  # of one run


def counted_in_files(directory: Path, nbytes: int) -> int:
    """How many bytes a file store in this directory counts for an object of so many: all that its file allocates."""
    with TemporaryFile(dir=directory) as file:
        return align(nbytes, allocated_at_once(file.fileno()))


class Raw(abc.ABC):
    """A backend's own calls on OBJECTS objects of ready bytes: the least work that does the job."""

    @abc.abstractmethod
    def write(self, number: int) -> None:
        """Store the objects of run `number`."""

    @abc.abstractmethod
    def read(self, number: int) -> None:
        """Load them. Raises InvariantError if anything is missing."""

    def forget(self, number: int, names: Sequence[str]) -> None:
        """Remove the objects of run `number`. names: those that our own tasks stored."""

    def close(self) -> None:
        """Release everything, after the last run."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A backend to measure: the name in its rows, its [storage] section, host.staging, and its raw calls."""

    name: str
    section: dict[str, Any]
    raw: Callable[[int], Raw]  # given an object's size in bytes, returns its Raw; called once the daemon is open
    storage: Callable[[Config], Storage] | None = None  # builds the storage, if the usual constructor does not
    staging: str = "64MiB"
