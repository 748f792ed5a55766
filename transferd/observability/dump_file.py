"""Dumps of the flight recorder: files that show what a daemon did before something went wrong.

Format, version 1: text, one JSON object a line.

    line 1      the header: `format` "transferd-flight", `format_version` 1, `version`, `boot_id`, `pid`,
                `reason` (one word, see below), `problem` (a line, or ""), `wall` and `monotonic`
                (seconds, both read at the moment of the dump: they tie the notes' times to a date),
                `notes` (how many follow), `threads` (thread name: its stack, innermost call last)
    others      one note each, oldest first: `at` (monotonic seconds), `task` ("" for none), `engine` (the task's;
                absent for the engine of [cache] and the daemon's own notes), `what`, and the details of
                that kind of note; a note about one rank has `rank`

Reasons: `signal` (SIGUSR1), `failure` (an invariant broke, or a callback raised), `crash` (the daemon
ended by an exception), `abort` (SIGABRT: what systemd's watchdog sends to a stuck daemon).

A dump appears under its name complete or not at all: it is written under another name, synced, and renamed.
Only the newest `keep` dumps stay.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from transferd.config import DEFAULT_ENGINE
from transferd.config.environment import open_regular
from transferd.errors import RequestError
from transferd.observability.recorder import LONGEST_TEXT, Note
from transferd.observability.story import task_story
from transferd.runtime.compat import UTC

FORMAT = "transferd-flight"
FORMAT_VERSION = 1
_PREFIX, _SUFFIX, _PART = "flight-", ".jsonl", ".part"
_OWN_KEYS = frozenset({"at", "task", "engine", "what"})


@dataclass(frozen=True, slots=True)
class Dump:
    """A dump read from a file. The module docstring describes `header`."""

    path: Path
    header: dict[str, Any]
    notes: list[Note]

    def story(self, task_id: str, engine: str = "") -> dict[str, Any]:
        """Return the story of a task; story.py describes it. Raises RequestError if the dump has no such task.

        engine: the task's; "" for any. If several engines had a task of this id, the one with the newest note counts.
        """
        notes = [note for note in self.notes if note.task_id in (task_id, task_id[:LONGEST_TEXT])]
        return task_story(task_id, notes, engine, wall=self.header["wall"], monotonic=self.header["monotonic"])


def write_dump(directory: Path, header: Mapping[str, Any], notes: Iterable[Note], *, keep: int) -> Path:
    """Write one dump and remove the oldest beyond `keep`. Creates the directory (0750). Raises OSError.

    header: needs `wall`, `pid` and `reason`; `format`, `format_version` and `notes` are filled in.
    """
    directory.mkdir(mode=0o750, parents=True, exist_ok=True)
    lines = [encode_note(note) for note in notes]
    whole = {"format": FORMAT, "format_version": FORMAT_VERSION, **header, "notes": len(lines)}
    when = datetime.fromtimestamp(header["wall"], UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    path = directory / f"{_PREFIX}{when}-{header['pid']}-{header['reason']}{_SUFFIX}"
    part = path.with_name(f".{path.name}{_PART}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
    try:
        with open(descriptor, "wb") as file:
            file.write(_encode(whole) + b"\n")
            file.writelines(line + b"\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        os.rename(part, path)
    finally:
        _prune(directory, keep)
    return path


def read_dump(path: Path) -> Dump:
    """Read a dump, or the newest dump in a directory. Raises RequestError (code `bad_dump`), one line."""
    try:
        if path.is_dir():
            newest = max(_dumps(path), default=None)
            if newest is None:
                raise RequestError(f"{path}: the directory contains no dump", code="bad_dump")
            path = newest
        with open_regular(path) as file:
            head, *rest = file.read().splitlines()
        header: dict[str, Any] = json.loads(head)
        if header.get("format") != FORMAT:
            raise RequestError(f"{path}: not a flight recorder dump of transferd", code="bad_dump")
        if header.get("format_version") != FORMAT_VERSION:
            version = header.get("format_version")
            what = f"{path}: dump format version {version} is not supported; this transferd reads {FORMAT_VERSION}"
            raise RequestError(what, code="bad_dump")
        return Dump(path, header, [decode_note(line) for line in rest])
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror}", code="bad_dump") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # JSONDecodeError is a ValueError
        raise RequestError(f"{path}: not a flight recorder dump of transferd: {error}", code="bad_dump") from error


def encode_note(note: Note) -> bytes:
    """The note as one line of a dump, without the line end."""
    whose = {} if note.engine == DEFAULT_ENGINE else {"engine": note.engine}
    return _encode({"at": note.at, "task": note.task_id, **whose, "what": note.what, **note.plain()})


def decode_note(line: bytes) -> Note:
    """The inverse of `encode_note`. Raises ValueError, KeyError or TypeError if the line is not a note."""
    whole: dict[str, Any] = json.loads(line)
    detail = {key: value for key, value in whole.items() if key not in _OWN_KEYS}
    engine = str(whole.get("engine", DEFAULT_ENGINE))
    return Note(float(whole["at"]), str(whole["task"]), str(whole["what"]), detail, engine)


def _encode(value: object) -> bytes:
    return json.dumps(value, default=repr).encode()  # half of a surrogate pair, as in a broken task_id, is escaped


def _dumps(directory: Path) -> list[Path]:
    """The dumps in a directory, oldest first: their names begin with the time."""
    return [path for path in directory.iterdir() if path.name.startswith(_PREFIX) and path.name.endswith(_SUFFIX)]


def _prune(directory: Path, keep: int) -> None:
    """Remove all but the newest dumps, and partial files: of a dump that failed, or of a daemon that was killed."""
    old = sorted(_dumps(directory))[:-keep]
    for path in (*old, *directory.glob(f".{_PREFIX}*{_PART}")):
        with contextlib.suppress(OSError):
            path.unlink()
