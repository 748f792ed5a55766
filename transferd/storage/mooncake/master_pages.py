"""The HTTP pages of a master: the pool's objects and their places, without leases.

A lookup by the library leases the objects that it finds, so a look at every object would destroy the master's order of
use. These pages change nothing. Their calls block; make them in a thread.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from transferd.errors import ConfigError, StorageUnavailable
from transferd.runtime.address import host_and_port

DEFAULT_PORT = 9003  # the same as Mooncake's default
BATCH = 256  # names in a request
IN_MEMORY = 4 * 1024**2  # of the list of all names; the rest of it waits in a file
TIMEOUT_S = 5.0  # a stop may have to wait for it
_answered: dict[str, str] = {}  # by addresses: the one that answered last


class LentMemory(NamedTuple):
    """The memory of one node."""

    name: str
    node: str  # its host:port, as holders of objects are named
    capacity: int
    used: int
    takes: bool  # whether it is in use


class PoolObject(NamedTuple):
    """An object. nodes: who has a whole copy in memory."""

    key: str
    nbytes: int
    nodes: tuple[str, ...]


def pages_address(configured: str, master: str) -> str:
    """Where the pages of a master are, or of each master of several. Raises ConfigError."""
    if configured:
        if None in map(host_and_port, configured.split(",")):
            raise ConfigError("storage.mooncake.master_pages", "expected host:port,…", configured)
        return configured
    host, colon, port = master.rpartition(":")
    if "://" in master or not colon or not port:
        what = "is needed to find objects: host:port of each master's HTTP pages (its --metrics_port), with commas"
        raise ConfigError("storage.mooncake.master_pages", what)
    return f"{host}:{DEFAULT_PORT}"


def read_page(address: str, page: str, timeout: float = TIMEOUT_S) -> str:
    """The text of a page. Raises StorageUnavailable."""
    with _opened(address, page, timeout) as response:
        text: str = response.read().decode("utf-8", "replace")
        return text


def read_segments(address: str, timeout: float = TIMEOUT_S) -> list[LentMemory]:
    """All segments of the pool. Raises StorageUnavailable."""
    with _opened(address, "get_segments_detail", timeout) as response:
        return [_segment(row) for row in json.load(response).get("segments", [])]


def read_all(address: str, share: tuple[int, int] = (0, 1)) -> Iterator[list[PoolObject]]:
    """All objects of the pool, or one share of so many, BATCH objects at a time. Raises StorageUnavailable.

    An object that comes or goes meanwhile may be missing. A key with a comma is left out: a query cannot name it.
    """
    number, shares = share
    with tempfile.SpooledTemporaryFile(IN_MEMORY) as listed:
        with _opened(address, "get_all_keys", TIMEOUT_S) as response:
            lines = io.BufferedReader(response, IN_MEMORY)
            listed.writelines(line for line in lines if zlib.crc32(line) % shares == number)
        listed.seek(0)
        keys = (line.decode("utf-8", "replace").rstrip("\n") for line in listed)
        yield from read_named(address, (key for key in keys if key and "," not in key))


def read_named(address: str, keys: Iterable[str]) -> Iterator[list[PoolObject]]:
    """Those of these objects that are whole somewhere, of BATCH at a time. No key has a comma.

    Raises StorageUnavailable.
    """
    left = iter(keys)
    while some := list(islice(left, BATCH)):
        asked = urllib.parse.quote(",".join(some), safe="")
        with _opened(address, f"batch_query_keys?keys={asked}", TIMEOUT_S) as response:
            found = json.load(response)["data"]
            objects = [_object(key, found[key]["values"]) for key in some if key in found and found[key]["values"]]
        yield objects


def _segment(row: dict[str, object]) -> LentMemory:
    return LentMemory(
        str(row["segment_name"]),
        str(row["te_endpoint"]),
        int(str(row["size_bytes"])),
        int(str(row.get("allocator_used_bytes", 0))),
        row.get("status", "OK") == "OK",
    )


def _object(key: str, copies: Sequence[dict[str, object]]) -> PoolObject:
    nodes = tuple(dict.fromkeys(str(copy["transport_endpoint_"]) for copy in copies))
    return PoolObject(key, int(str(copies[0]["size_"])), nodes)


@contextlib.contextmanager
def _opened(address: str, page: str, timeout: float) -> Iterator[http.client.HTTPResponse]:
    """The page of the master that leads; the others answer 503. Raises StorageUnavailable."""
    failure: Exception | None = None
    for one in sorted(address.split(","), key=lambda one: one != _answered.get(address)):
        try:
            response = urllib.request.urlopen(f"http://{one}/{page}", timeout=timeout)
        except (OSError, http.client.HTTPException) as error:
            failure = failure or error
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            continue
        _answered[address] = one
        with response:
            try:
                yield response
            except (OSError, http.client.HTTPException) as error:
                raise _no_answer(one, error) from error
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise StorageUnavailable(f"{one} does not answer like a Mooncake master: {error!r}") from error
        return
    raise _no_answer(address, failure) from failure


def _no_answer(address: str, error: Exception | None) -> StorageUnavailable:
    # urllib puts the reason into an error of its own.
    why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
    why = why.strerror if isinstance(why, OSError) and why.strerror else why
    return StorageUnavailable(f"no Mooncake master answers at {address}: {why}; is it its metrics port?")
