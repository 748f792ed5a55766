"""The storage of FastDeploy's V1 cache manager, through the daemon (ENABLE_V1_KVCACHE_MANAGER=1).

    create_storage_scheduler    in the engine's process: which objects exist
    create_storage_connector    in each worker: objects between storage and FastDeploy's host memory

V1 stores named objects: a block's keys, values, scales or indexer of one rank, of one layer or of all. It copies them
between device and host itself. Its host memory is private to the worker, so an object passes through a slot of ours,
which the daemon maps. Objects of one size are one engine at the daemon (`Objects`): DSA's keys and indexer are two.

A scheduler knows neither sizes nor weights. So the worker of rank 0 leaves the name and the token of each of its
engines in a directory of this user, named after the engine's process; the scheduler asks with those. Sizes are
remembered for the next start, so that what is stored is found before anything is written.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from transferd.adapters.common.copied import LEAVE_S, Pieces
from transferd.adapters.common.directories import own_directory
from transferd.adapters.common.link import ENTER_S, Link
from transferd.adapters.fastdeploy.companion import for_objects
from transferd.adapters.fastdeploy.identity import object_facts
from transferd.adapters.fastdeploy.objects import NodeDaemon, Objects
from transferd.blocks.fingerprint import Facts, digest
from transferd.errors import EngineGone, RequestError, TransferError
from transferd.tiers.owner import as_data, check_owner, this_process

log = logging.getLogger(__name__)

ENGINE_VARIABLE = "TRANSFERD_FASTDEPLOY_ENGINE"  # set in the engine's process; its workers inherit it
CONNECT_S = 30.0  # for a daemon to start and to map the slots of sizes that are known
KIND = "fastdeploy v1"


class _OfNode:
    """What is connected to the node's daemon. Its calls may come from several threads."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self._lock = threading.RLock()
        self._connected = False

    def connect(self) -> bool:
        """Find or start the daemon. Returns whether there is one; logs one line if there is not."""
        if not self._connected:
            try:
                self._daemon = NodeDaemon(for_objects(self.config.kvcache_storage_backend))
                self._prepare()
                self._connected = bool(self._daemon.find())
            except (TransferError, OSError) as error:
                log.error("V1 storage is not in use: %s", error)
        return self._connected

    def disconnect(self) -> None:
        with self._lock:
            self._close_all()
            if self._connected:
                self._daemon.leave()
            self._connected = False

    def is_connected(self) -> bool:
        return self._connected

    def _prepare(self) -> None:
        """Do what comes before the first call. Raises TransferError, OSError."""

    def _close_all(self) -> None:
        raise NotImplementedError


class Connector(_OfNode):
    """FastDeploy's StorageConnector."""

    def __init__(self, config: Any, tp_rank: int | None = None) -> None:
        super().__init__(config)
        self._rank = tp_rank or 0
        self._objects: dict[int, Objects] = {}  # by size
        self._facts: Facts = {}

    def _prepare(self) -> None:
        self._model, self._facts = object_facts(self.config)
        for nbytes in _known_sizes(self._facts):
            self._of_size(nbytes, CONNECT_S)

    def _close_all(self) -> None:
        for one in self._objects.values():
            one.close()
        self._objects.clear()

    def get_stats(self) -> dict[str, Any]:
        return {"connected": self._connected, "sizes": sorted(self._objects)}

    def register_buffer(self, buffer_ptr: int, buffer_size: int) -> None:
        """Does nothing: objects pass through slots of ours."""

    def batch_set(self, keys: Sequence[str], src_ptrs: Sequence[int], sizes: Sequence[int]) -> list[bool]:
        """Store objects. For each whether it is stored, or was there already."""
        return self._each_size(keys, src_ptrs, sizes, Objects.store)

    def batch_get(self, keys: Sequence[str], dst_ptrs: Sequence[int], sizes: Sequence[int]) -> list[bool]:
        """Load objects. For each whether its bytes have arrived; others' memory is as it was."""
        return self._each_size(keys, dst_ptrs, sizes, Objects.load)

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        return _any(one.link.exists(keys) for one in list(self._objects.values())) or [False] * len(keys)

    def batch_delete(self, keys: Sequence[str]) -> list[bool]:
        for one in list(self._objects.values()):
            with contextlib.suppress(TransferError):
                one.link.remove(keys)
        return [not there for there in self.batch_exists(keys)]

    def set(self, key: str, src_ptr: int, size: int) -> bool:
        return self.batch_set([key], [src_ptr], [size])[0]

    def get(self, key: str, dst_ptr: int, size: int) -> bool:
        return self.batch_get([key], [dst_ptr], [size])[0]

    def exists(self, key: str) -> bool:
        return self.batch_exists([key])[0]

    def delete(self, key: str, timeout: int = 5) -> bool:  # noqa: ARG002 - FastDeploy's signature
        return self.batch_delete([key])[0]

    def clear(self, prefix: str = "") -> int:
        """Remove every object of this model. Returns how many. prefix: only "" can be served."""
        if prefix:
            raise NotImplementedError(f"transferd removes all objects of a model, not those that begin with {prefix!r}")
        removed = 0
        for one in list(self._objects.values()):
            with contextlib.suppress(TransferError):
                removed += one.link.purge(self._model, "").objects
        return removed

    def _each_size(
        self,
        keys: Sequence[str],
        addresses: Sequence[int],
        sizes: Sequence[int],
        move: Callable[[Objects, Sequence[str], Sequence[Pieces]], list[bool]],
    ) -> list[bool]:
        if not len(keys) == len(addresses) == len(sizes):
            raise ValueError("keys, addresses and sizes must have the same length")
        moved = [False] * len(keys)
        for nbytes in dict.fromkeys(sizes) if self._connected else ():
            places = [i for i, size in enumerate(sizes) if size == nbytes]
            objects = [[(addresses[i], nbytes)] for i in places]
            of_size = move(self._of_size(nbytes, ENTER_S), [keys[i] for i in places], objects)
            for i, one in zip(places, of_size, strict=True):
                moved[i] = one
        return moved

    def _of_size(self, nbytes: int, wait: float) -> Objects:
        with self._lock:
            if nbytes not in self._objects:
                name = f"fastdeploy-v1-{os.getpid()}-{self._rank}-{nbytes}"
                ranks = max(self._rank + 1, int(self._facts["tensor parallel"]))
                made = Objects(nbytes, self._daemon, self._model, self._facts, name, KIND, self._rank, ranks)
                self._objects[nbytes] = made
                made.link.wait_ready(wait)
                if self._rank == 0:
                    _publish(made, self._facts)
            return self._objects[nbytes]


class Scheduler(_OfNode):
    """FastDeploy's StorageScheduler: which objects exist, asked as one of the workers' engines."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._links: dict[str, Link] = {}  # by the engine's name

    def _close_all(self) -> None:
        for link in self._links.values():
            link.close(LEAVE_S)
        self._links.clear()

    def get_stats(self) -> dict[str, Any]:
        return {"connected": self._connected, "engines": sorted(self._links)}

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        """For each key, whether its object can be loaded. All False until a worker knows the size of an object."""
        return _any(link.exists(keys) for link in self._asked()) or [False] * len(keys)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key])[0]

    def query(self, keys: Sequence[str]) -> dict[str, bool]:
        return dict(zip(keys, self.batch_exists(keys), strict=True))

    def query_prefix_count(self, *kinds: Sequence[str] | None, **more: Sequence[str] | None) -> int:
        """How many leading blocks are whole. kinds: the keys of the blocks' keys, values, and scales if any."""
        lists = [keys for keys in (*kinds, *more.values()) if keys is not None]
        there = self.query([key for keys in lists for key in keys])
        blocks = zip(*lists, strict=True)
        return next((i for i, block in enumerate(blocks) if not all(there[key] for key in block)), len(lists[0]))

    def get_metadata(self, key: str) -> dict[str, Any] | None:
        return {} if self.exists(key) else None

    def list_keys(self, prefix: str = "") -> list[str]:  # noqa: ARG002 - FastDeploy's signature
        """Nothing: a pool cannot list its objects."""
        return []

    def _asked(self) -> list[Link]:
        """Links to all engines that workers have published by now."""
        with self._lock:
            published = {one["name"]: one["token"] for one in _published()} if self._connected else {}
            for name in self._links.keys() - published.keys():
                self._links.pop(name).close(LEAVE_S)
            for name, token in published.items():
                if name not in self._links:
                    self._links[name] = Link(self._daemon, name, token=token)
                    self._links[name].wait_ready(ENTER_S)
            return list(self._links.values())


# --- switching FastDeploy over -------------------------------------------------------------------------


def serve(storage: Any, be_heard: Callable[[], None]) -> None:
    """Replace the two factories of FastDeploy's v1.storage, also in modules that have them already. Idempotent.

    be_heard: prepares our log. It is called with the first factory: FastDeploy is still being imported now.
    """
    os.environ.setdefault(ENGINE_VARIABLE, uuid.uuid4().hex[:12])
    scheduler = type("TransferdScheduler", (Scheduler, storage.StorageScheduler), {})
    connector = type("TransferdConnector", (Connector, storage.StorageConnector), {})

    def create_storage_scheduler(config: Any) -> Any:
        """A connected scheduler, or None without a backend. Raises RuntimeError."""
        be_heard()
        if config.kvcache_storage_backend is None:
            return None
        made = scheduler(config)
        if not made.connect():
            raise RuntimeError(f"no transferd daemon for the storage backend {config.kvcache_storage_backend!r}")
        return made

    def create_storage_connector(config: Any, tp_rank: int | None = None) -> Any:
        """A connector, which FastDeploy connects, or None without a backend."""
        be_heard()
        return None if config.kvcache_storage_backend is None else connector(config, tp_rank)

    for made in (create_storage_scheduler, create_storage_connector):
        theirs = getattr(storage, made.__name__)
        if theirs.__module__ == __name__:
            continue
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("fastdeploy") and vars(module).get(made.__name__) is theirs:
                setattr(module, made.__name__, made)


# --- what workers leave for the scheduler --------------------------------------------------------------


def _meeting_place() -> Path:
    return own_directory("fastdeploy", "v1", os.environ.get(ENGINE_VARIABLE, "engine"))


def _publish(objects: Objects, facts: Facts) -> None:
    _remove_ended()
    data = json.dumps({"name": objects.facts.name, "token": objects.facts.token, "owner": as_data(this_process())})
    _write(_meeting_place() / f"{objects.nbytes}.json", data)
    sizes = sorted({objects.nbytes, *_known_sizes(facts)})
    _write(_sizes_file(facts), json.dumps(sizes))


def _remove_ended() -> None:
    """Remove what the workers of earlier engines have left: each start of an engine creates a directory."""
    for place in own_directory("fastdeploy", "v1").iterdir():
        files = list(place.glob("*.json"))
        if files and all(map(_ended, files)):
            for file in files:
                file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # another engine has come there meanwhile
                place.rmdir()


def _ended(file: Path) -> bool:
    """Whether the worker that left this file is known to have ended."""
    try:
        check_owner(json.loads(file.read_text(encoding="utf-8"))["owner"])
    except EngineGone:
        return True
    except (OSError, ValueError, KeyError, RequestError):  # an earlier release names no owner
        pass
    return False


def _published() -> Iterator[dict[str, Any]]:
    for file in sorted(_meeting_place().glob("*.json")):
        with contextlib.suppress(OSError, ValueError):  # it is being replaced
            yield json.loads(file.read_text(encoding="utf-8"))


def _known_sizes(facts: Facts) -> list[int]:
    try:
        return [int(size) for size in json.loads(_sizes_file(facts).read_text(encoding="utf-8"))]
    except (OSError, ValueError):
        return []


def _sizes_file(facts: Facts) -> Path:
    return own_directory("fastdeploy", "v1") / f"sizes-{digest(facts)}.json"


def _write(path: Path, text: str) -> None:
    """Replace a file that others may read meanwhile; only this user can."""
    partial = path.with_suffix(f".{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    partial.rename(path)


def _any(answers: Iterator[list[bool]]) -> list[bool]:
    return [any(each) for each in zip(*answers, strict=True)]
