"""SimBucket: a bucket in this process, behind the calls of obstore that object_store.py makes, with faults on demand.

    bucket = SimBucket()
    storage = bucket.storage(section, clock, threads)     # a real ObjectStorage on it

What it answers is what S3's servers and obstore 0.12 were seen to answer: errors are texts. A call has its effect in a
simulated thread, at one moment.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

from obstore.exceptions import GenericError, PermissionDeniedError

from tests.support.simulation.faults import Latency, ThreadFaults
from tests.support.simulation.threads import SimThreads
from transferd.config.sections import ObjectStorageSection
from transferd.runtime.clock import Clock
from transferd.storage import object_store
from transferd.storage.object_store import ObjectStorage

CALM = ThreadFaults(latency=Latency(0.005, 0.05))
HANGING = ThreadFaults(latency=Latency(15.0, 20.0))  # what the library's own timeouts allow
SILENT = "error sending request: HTTP error: error trying to connect: tcp connect error: Connection refused"
EXPIRED = (
    "Client error with status 400 Bad Request: <Error><Code>ExpiredToken</Code>"
    "<Message>The provided token has expired.</Message></Error>"
)
SLOW_DOWN = (
    "Server error with status 503 Service Unavailable: <Error><Code>SlowDown</Code>"
    "<Message>Please reduce your request rate.</Message></Error>"
)
DENIED = (
    "Client error with status 403 Forbidden: <Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
)
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
REFUSALS = (EXPIRED, SLOW_DOWN, DENIED)


class SimBucket:
    """What the bucket holds, by name, and how it fails. now: virtual seconds.

    fault: "", "silent" (nobody listens), "hang" (an answer after the library's own timeout), or what it refuses with.
    link: whether what this node receives is spoilt on its way. gone: when an object left it, for whatever reason.
    deletes: told of each object that a node removes. writes: PUTs so far. refused: when it has refused one.
    """

    def __init__(self, rng: random.Random, now: Callable[[], float]) -> None:
        self.objects: dict[str, bytes] = {}
        self.gone: dict[str, float] = {}
        self.fault = ""
        self.link = False
        self.writes = 0
        self.refused: list[float] = []
        self.deletes: Callable[[str, bytes], None] = lambda _name, _data: None
        self._rng = rng
        self._now = now
        self._threads: list[SimThreads] = []

    def storage(self, section: ObjectStorageSection, clock: Clock, threads: SimThreads) -> ObjectStorage:
        """A daemon's storage on this bucket, not yet open."""
        storage = ObjectStorage(section, clock=clock)
        storage._store = storage._other = self
        storage._threads = threads
        self._threads.append(threads)
        threads.faults = HANGING if self.fault == "hang" else CALM
        return storage

    def fail(self, fault: str) -> None:
        self.fault = fault
        for threads in self._threads:
            threads.faults = HANGING if fault == "hang" else CALM

    def forget(self, name: str) -> None:
        """Somebody else removes an object: a lifecycle rule, another node."""
        if self.objects.pop(name, None) is not None:
            self.gone[name] = self._now()

    # --- what obstore's functions do -----------------------------------------------------------------

    def _answer(self) -> None:
        if self.fault in ("silent", "hang"):
            raise GenericError(f"Generic S3 error: {SILENT}")
        if self.fault == DENIED:
            raise PermissionDeniedError(self.fault)
        if self.fault:
            raise GenericError(f"Generic S3 error: {self.fault}")

    def head(self, path: str) -> dict[str, Any]:
        self._answer()
        return {"size": len(self._found(path))}

    def get(self, path: str) -> Any:
        self._answer()
        data = self._found(path)
        if self.link:
            spoilt = bytearray(data)
            spoilt[self._rng.randrange(len(spoilt))] ^= 1 << self._rng.randrange(8)
            data = bytes(spoilt)
        return SimpleNamespace(meta={"size": len(data)}, bytes=lambda: data)

    def put(self, path: str, data: memoryview) -> None:
        if self.fault in REFUSALS:
            self.refused.append(self._now())
        self._answer()
        self.writes += 1
        self.objects[_name(path)] = bytes(data)

    def delete(self, path: str) -> None:
        self._answer()
        name = _name(path)
        if (data := self.objects.pop(name, None)) is not None:
            self.gone[name] = self._now()
            self.deletes(name, data)

    def _found(self, path: str) -> bytes:
        try:
            return self.objects[_name(path)]
        except KeyError:
            raise FileNotFoundError(f"Object at location {path} not found") from None


def _name(path: str) -> str:
    """The object's name, of which `paths.quoted` has made this path: it writes an empty part as a lone `%`."""
    return "/".join("" if part == "%" else unquote(part) for part in path.split("/"))


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """Within it, object_store.py's calls of the library reach SimBuckets."""
    module: Any = object_store
    real = module.obstore, module.from_url
    keys = {name: os.environ.get(name) for name in KEYS}
    os.environ.update(dict.fromkeys(KEYS, "simulated"))
    calls = SimpleNamespace(
        head=lambda store, path: store.head(path),
        get=lambda store, path, **_: store.get(path),
        put=lambda store, path, data, **_: store.put(path, data),
        delete=lambda store, path: store.delete(path),
    )
    module.obstore, module.from_url = calls, lambda *_, **__: None  # no client, which takes 20 ms to make
    try:
        yield
    finally:
        module.obstore, module.from_url = real
        for name, value in keys.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
