"""What the store holds for this LMCache: each object's size and salt, also after a restart of LMCache.

LMCache's quotas and its order of use are kept per process; its L2s tell it what they have. Names in the store are
digests, so nobody can ask the store for LMCache's keys. So they are in a file of this server, a line for each change.
The store stays the authority: what it has evicted, or what another server has removed, leaves the books when the
adapter compares them. A lost file costs what LMCache knows of older objects, and no object.
"""

from __future__ import annotations

import fcntl
import json
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from transferd.adapters.lmcache.kinds import ObjectKind
from transferd.adapters.lmcache.settings import LMCACHE

STORED, GONE = "+", "-"


class Books:
    """Thread-safe.

    file: where they are kept; several servers of one store may have the same one.
    make_key: makes LMCache's ObjectKey of its chunk hash, model, rank, group and salt.
    """

    def __init__(self, file: Path, make_key: Callable[..., Any]) -> None:
        self._make_key = make_key
        self._kinds: dict[Any, ObjectKind] = {}
        self._by_salt: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._file: IO[str] | None = None
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = file.open("a+", encoding="ascii")
            self._read(self._file)
        except OSError as error:
            self._give_up(error)

    def __contains__(self, key: object) -> bool:
        return key in self._kinds

    def bytes_by_salt(self) -> dict[str, int]:
        with self._lock:
            return dict(self._by_salt)

    def by_kind(self) -> dict[ObjectKind, list[Any]]:
        """All keys."""
        found = defaultdict(list)
        with self._lock:
            for key, kind in self._kinds.items():
                found[kind].append(key)
        return dict(found)

    def sizes(self) -> tuple[list[Any], list[int]]:
        """All keys, those stored first first, and the bytes of each."""
        with self._lock:
            return list(self._kinds), [kind.nbytes for kind in self._kinds.values()]

    def kind_of(self, key: Any) -> ObjectKind | None:
        return self._kinds.get(key)

    def add(self, keys: Sequence[Any], kinds: Sequence[ObjectKind]) -> list[tuple[Any, int]]:
        """These objects are stored. Returns those that were not, with their bytes."""
        with self._lock:
            fresh = [(key, kind) for key, kind in dict(zip(keys, kinds, strict=True)).items() if key not in self._kinds]
            for key, kind in fresh:
                self._kinds[key] = kind
                self._by_salt[key.cache_salt] += kind.nbytes
            self._write((STORED, key, kind) for key, kind in fresh)
        return [(key, kind.nbytes) for key, kind in fresh]

    def drop(self, keys: Iterable[Any]) -> list[tuple[Any, int]]:
        """These objects are gone. Returns those that were in the books, with their bytes."""
        with self._lock:
            gone = [(key, self._kinds.pop(key)) for key in dict.fromkeys(keys) if key in self._kinds]
            for key, kind in gone:
                self._by_salt[key.cache_salt] -= kind.nbytes
                if not self._by_salt[key.cache_salt]:
                    del self._by_salt[key.cache_salt]
            self._write((GONE, key, kind) for key, kind in gone)
        return [(key, kind.nbytes) for key, kind in gone]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, changes: Iterable[tuple[str, Any, ObjectKind]]) -> None:
        if self._file is None:
            return
        try:
            self._file.write("".join(map(_line, changes)))
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def _read(self, file: IO[str]) -> None:
        """Take in a file, and shorten it if no other server uses it."""
        file.seek(0)
        changes = [change for text in file for change in self._change(text)]
        for what, key, kind in changes:
            self._kinds.pop(key, None)
            if what == STORED:
                self._kinds[key] = kind
        for key, kind in self._kinds.items():
            self._by_salt[key.cache_salt] += kind.nbytes
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if len(changes) > 2 * len(self._kinds):
                file.truncate(0)
                self._write((STORED, key, kind) for key, kind in self._kinds.items())
        except BlockingIOError:
            pass
        fcntl.flock(file, fcntl.LOCK_SH)

    def _change(self, text: str) -> Iterator[tuple[str, Any, ObjectKind]]:
        try:
            change, digest, rank, group, salt, model, layout, nbytes = json.loads(text)
            key = self._make_key(bytes.fromhex(digest), model, rank, group, salt)
        except (ValueError, TypeError):  # the end of a process, or of the disk, in the middle of a line
            return
        yield change, key, ObjectKind(model, layout, nbytes)

    def _give_up(self, error: OSError) -> None:
        LMCACHE.log.warning("transferd: after a restart LMCache will not know what it has stored: %s", error)
        self._file = None


def _line(change: tuple[str, Any, ObjectKind]) -> str:
    what, key, kind = change
    named = [key.chunk_hash.hex(), key.kv_rank, key.object_group_id, key.cache_salt]
    return json.dumps([what, *named, kind.model, kind.layout, kind.nbytes], separators=(",", ":")) + "\n"
