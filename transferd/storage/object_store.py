"""Storage in a bucket: Amazon S3 and servers that speak its protocol, Google Cloud Storage, Azure Blob Storage.

One object of the bucket for each block and rank, under a prefix: `<prefix>/<name>`, in which every byte of a part of
the name outside `A-Z a-z 0-9 _ . -` is %XX (paths.quoted). Nodes that use one prefix share their objects. How long
an object stays is a rule of the bucket (its lifecycle): the daemon removes only what an operator has it purge for all
nodes (`purge_shared`). A damaged object is overwritten when it is stored again (suspects.py).

The library is obstore, whose calls release Python's lock. They run in threads of this backend, `concurrency` for each
direction, because

* a thread copies a body to its block or slot and takes the checksum, so the event loop copies nothing;
* a call whose task has ended still runs to its end, and its buffer stays leased until then. An asyncio call that is
  cancelled returns at once, while the library still reads the buffer;
* no thread of the library calls into Python, which aborts the process if the interpreter ends meanwhile.

A body arrives in memory of the library, outside `host.staging`: at most `concurrency` objects at a time.

Every wait is bounded. A connection that moves no byte for `timeout` seconds fails, and so does a call that takes six
times as long. Failed calls are repeated, but not after `timeout`. A call that gets no answer while others get theirs
costs its own object: a network that loses packets does so. If no call was answered meanwhile, the server is silent: the
breaker (breaker.py) fails further calls at once until a probe is answered. An error that the server answers is an
answer.
"""

from __future__ import annotations

import contextlib
import functools
import html
import math
import os
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import numpy as np
import obstore
import structlog
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import from_url

from transferd.blocks.formats import quote_part
from transferd.config import Config, StorageSection
from transferd.config.rules import check_object
from transferd.config.sections import ObjectStorageSection
from transferd.errors import ConfigError, StillRunning, StorageError, StorageFull, StorageUnavailable
from transferd.runtime.aio import answered, every, uncancelled
from transferd.runtime.clock import Clock
from transferd.runtime.compat import Self
from transferd.runtime.threads import Direction, SharedItems, ThreadPools, closed
from transferd.storage.aws_profile import has_credentials, profile_options
from transferd.storage.base import FOUND, LEFT, MISSING, STORED, Drainer, Fill, Found, Item, Outcome, Storage
from transferd.storage.batch import bare
from transferd.storage.breaker import CircuitBreaker
from transferd.storage.paths import quoted, unquoted
from transferd.storage.selection import Selection, check_shared, parts_of
from transferd.storage.suspects import Suspects
from transferd.wire.answers import Purged

log = structlog.get_logger(__name__)

S = TypeVar("S")
T = TypeVar("T")

CHUNK_BYTES = 64 * 1024**2  # enough objects of the usual size for all threads
CONNECT_S = 3.0  # or `timeout`, if that is less
WHOLE_CALL = 6  # times `timeout`: a server that sends a byte now and then must not hold a thread for ever
TRIES_AGAIN = 3
PROBE_INTERVAL_S = 2.0  # while the server does not answer
HEARTBEAT_S = 10.0  # how long an outage may go unnoticed while no task needs the store
CLOSE_S = 5.0
LISTED = 1000  # objects of one answer, and of one request to delete
PROBE = "transferd-probe"  # never stored by the daemon; `doctor` stores and removes it

_COUNTED_AS = {Found.STORED: "stored", Found.FOUND: "hits", Found.MISSING: "misses", Found.FAILED: "errors"}
_COUNTS = ("hits", "misses", "stored", "wrong_length", "corrupt", "errors")
CLOCK = "set this machine's clock (NTP), or the server's"
DENIED = "check the daemon's credentials and this machine's clock"  # the answer to a HEAD gives no reason
ACCESS = (
    "check the credentials in its environment, and that it may read, write and list (without s3:ListBucket a missing "
    "object is answered with 403)"
)
EXPIRED = "renew the daemon's credentials: they have expired"
NOWHERE = (
    "the daemon has no credentials: it found none in its environment and in ~/.aws, and the machine's metadata service "
    "does not answer; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
)
# Of these servers' errors. A HEAD has no body, so only its status tells.
_SKEWED = re.compile("RequestTimeTooSkewed|RequestExpired")
_EXPIRED = re.compile("ExpiredToken|TokenRefreshRequired|InvalidToken")
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound|The specified bucket does not exist")
_NEVER = re.compile("EntityTooLarge|RequestBodyTooLarge|KeyTooLong|InvalidObjectName|InvalidURI|OutOfRangeInput")
_METADATA = re.compile(r"169\.254\.169\.254|/latest/api/token|metadata\.google\.internal")
_GATEWAY = re.compile("status code: 5")
_FULL = re.compile(r"QuotaExceeded|InsufficientStorage|StorageFull|No ?space left|status code: 507", re.IGNORECASE)
_REASON = re.compile(r"<Code>(.*?)</Code>(?:\s*<Message>(.*?)</Message>)?", re.DOTALL)
_QUERY = re.compile(r"\?\S+")  # of a URL; it may hold a signature


class ObjectStorage(Storage):
    """The objects below one URL of a bucket. Owns its threads from `open` to `close`. See the module."""

    backend = "object"
    packages = ("obstore",)
    chunk_bytes = CHUNK_BYTES
    asks_first = False
    shared = True
    tries = 2  # a damaged object is read once more, over another connection

    def __init__(self, section: ObjectStorageSection, *, clock: Clock) -> None:
        self._section = section
        self._unusable = ""  # why credentials that came later are not used; "" if they are
        self._connect(_profile(section))
        self.slots_at_once = section.concurrency
        self._threads = ThreadPools(section.concurrency, name="transferd-object")
        self._breaker = CircuitBreaker("the object store", self._ask, PROBE_INTERVAL_S)
        self._counts: Counter[str] = Counter()
        self._suspects = Suspects(clock.monotonic)
        self._open = False
        self._now = clock.monotonic
        self._answered = -math.inf  # when a call was last answered
        # why a call failed while no other call was answered; "" once one is. A text: an error would keep its frames
        self._silent = ""

    @classmethod
    def from_config(cls, config: Config, *, clock: Clock) -> Self:
        check_object(config.storage.object)
        return cls(config.storage.object, clock=clock)

    @classmethod
    def try_out(cls, storage: StorageSection) -> str:
        data, section = b"transferd doctor", storage.object
        try:
            store = connect(section)
            look_at_bucket(store, section.url)
            obstore.put(store, PROBE, data, use_multipart=False)
            came_back = bytes(obstore.get(store, PROBE).bytes())
            obstore.delete(store, PROBE)
        except ConfigError as error:
            return str(error)
        except (BaseError, OSError) as error:
            return str(translated(error))
        return "" if came_back == data else f"stored {data!r} and got {came_back!r}"

    async def open(self) -> None:
        """Ask the bucket once. Raises ConfigError if it is not there or refuses our key.

        If the server cannot be reached, the store opens all the same, with its breaker open; so it does if the server
        refuses for a moment (too many requests, an error of its own).
        """
        self._threads.open()
        self._open = True
        if urlsplit(self._section.url).scheme == "s3" and not has_credentials(os.environ):
            where = "no credentials in the environment or in ~/.aws: asking the machine's metadata service"
            log.warning(where, url=self._section.url)
        try:
            look = functools.partial(look_at_bucket, self._store, self._section.url)
            await self._in_thread(Direction.IN, look, "first contact with the bucket")
        except BaseException as error:
            if not (isinstance(error, StorageError) and error.refusal in ("silent", "passing")):
                self._open = False
                self._threads.close()
                raise
            log.warning("the object store does not serve us at start", url=self._section.url, error=str(error))
        self._breaker.watch(self._ask, HEARTBEAT_S)

    async def close(self) -> None:
        if not self._open:
            return
        self._open = False
        await self._breaker.close()
        still = await closed(self._threads, CLOSE_S)
        if still:
            raise StillRunning(f"object storage: {'; '.join(still)}")

    def abandon(self) -> list[str]:
        return self._threads.under_way()

    async def exists(self, names: Sequence[str]) -> list[bool]:
        answers = await self._each(Direction.IN, names, self._has)
        for answer in answers:
            if isinstance(answer, StorageError) and not isinstance(answer, StorageUnavailable):
                raise answer
        return [there is True and not self._suspects.avoided(name) for name, there in zip(names, answers, strict=True)]

    async def store(self, items: Sequence[Item], fill: Fill | None, slots: Sequence[memoryview]) -> list[Outcome]:
        free = list(slots)  # with `fill`: the slots that no thread uses now

        def store(position: int) -> Outcome:
            item = items[position]
            client = self._other if item.name in doubted else self._store
            if fill is None:
                return _put(client, item, slots[position])
            slot = free.pop()
            try:
                data = slot[: item.nbytes]
                return _put(client, item, data) if fill(position, data, False) else LEFT
            finally:
                free.append(slot)

        doubted = {item.name for item in items if item.name in self._suspects}
        most = self._section.concurrency if fill is None else len(slots)
        outcomes = self._counted(await self._each(Direction.OUT, range(len(items)), store, most))
        self._suspects.stored(item.name for item, one in zip(items, outcomes, strict=True) if one is STORED)
        return outcomes

    async def load(self, items: Sequence[Item], drain: Drainer | None, slots: Sequence[memoryview]) -> list[Outcome]:
        self._suspects.check_link("bucket")
        asked = [i for i, item in enumerate(items) if not self._suspects.avoided(item.name)]
        doubted = {i for i in asked if self._suspects.doubted(items[i].name)}
        short: list[int] = []  # objects of another length, twice
        second: list[int] = []  # that came over the other connection
        odd: list[int] = []  # that nobody took

        def load(position: int) -> Outcome:
            if drain is not None and not drain.wanted:
                return LEFT
            item = items[position]
            body = _body(self._store, item) if position not in doubted else None
            if body is not None and len(body) != item.nbytes:
                body = None
                doubted.add(position)
            if position in doubted:
                body = _body(self._other, item)
                (short if body is not None and len(body) != item.nbytes else second).append(position)
            if body is None or len(body) != item.nbytes:
                return MISSING
            if drain is not None:
                self._heard()  # though it may be LEFT
                if drain(position, body):
                    return FOUND
                if drain.wanted:  # it does not look right; the caller loads it again, to be sure
                    odd.append(position)
                return LEFT
            np.copyto(np.asarray(slots[position]), np.asarray(body))
            return FOUND

        answers = dict(zip(asked, await self._each(Direction.IN, asked, load), strict=True))
        outcomes = self._counted([answers.get(i, MISSING) for i in range(len(items))])
        self._counts["wrong_length"] += len(short)
        for position in short:
            self._suspects.avoid(items[position].name)
        for position in odd:
            self._suspects.doubt(items[position].name)
        self._suspects.came(items[position].name for position in second if outcomes[position] is FOUND)
        return outcomes

    def quarantine(self, name: str) -> Awaitable[None]:
        """Read it once more, or avoid it (suspects.py). The object stays: others may be able to read it."""
        self._counts["corrupt"] += 1
        self._suspects.damaged(name)
        return answered(None)

    async def purge_shared(self, selection: Selection, *, dry_run: bool = False) -> Purged:
        check_shared(selection)
        found: list[int] = []  # lengths
        if selection.names is not None:

            def remove(name: str) -> None:
                with contextlib.suppress(FileNotFoundError):
                    found.append(obstore.head(self._store, quoted(name))["size"])
                    if not dry_run:
                        obstore.delete(self._store, quoted(name))

            answers = await self._each(Direction.OUT, sorted(filter(selection.fits, selection.names)), remove)
            if error := next((one for one in answers if isinstance(one, StorageError)), None):
                raise error
        else:

            def remove_all() -> None:
                for listed in obstore.list(self._store, prefix=_prefix(selection), chunk_size=LISTED):
                    fitting = [one for one in listed if _fits(selection, unquoted(one["path"]))]
                    if fitting and not dry_run:
                        obstore.delete(self._store, [one["path"] for one in fitting])
                    found.extend(one["size"] for one in fitting)

            await self._in_thread(Direction.OUT, remove_all, "purge of the bucket")
        return Purged(len(found), sum(found))

    def statistics(self) -> dict[str, Any]:
        """objects and bytes are None, because counting them would require a listing of the bucket."""
        return {name: self._counts[name] for name in _COUNTS} | {
            "objects": None,
            "bytes": None,
            **self._suspects.statistics(),
            **self._breaker.statistics(),
        }

    # --- in threads; raise StorageError --------------------------------------------------------------

    def _has(self, name: str) -> bool:
        try:
            obstore.head(self._store, quoted(name))
        except FileNotFoundError:
            return False
        return True

    def _probe(self) -> None:
        unusable = ""
        try:
            if (profile := _profile(self._section)) != self._profile:  # somebody has renewed the credentials
                self._connect(profile)
        except ConfigError as error:  # or is writing them at this moment
            unusable = str(error)
        if unusable and unusable != self._unusable:
            log.warning("the new credentials cannot be used: the old ones stay in use", error=unusable)
        self._unusable = unusable
        self._has(PROBE)

    def _connect(self, profile: dict[str, str]) -> None:
        self._store = connect(self._section, profile)
        # for what came damaged: its connections are others, and the server checks what it gets
        self._other = connect(self._section, profile, checks=True)
        self._profile = profile

    # --- how calls run -------------------------------------------------------------------------------

    async def _each(
        self, direction: Direction, items: Sequence[S], call: Callable[[S], T], at_once: int = 0
    ) -> list[T | StorageError]:
        """Make a call for each item, on `at_once` or all threads. Each gets its result or its error.

        Raises StorageUnavailable if the breaker is open, or if no item's call was answered.
        """
        if not self._open:
            raise StorageError("object storage is not open")
        if not items:
            return []
        self._breaker.check()

        def attempt(item: S) -> T | StorageError:
            try:
                self._breaker.check()  # it may have opened since
                if self._silent:
                    raise StorageUnavailable(self._silent)
                return self._noted(call, item)
            except StorageError as error:
                return bare(error)  # frames hold the caller's buffers

        shared = SharedItems(attempt, items)
        shares = shared.shares(min(at_once or self._section.concurrency, self._section.concurrency))
        await uncancelled(every(self._threads.run(direction, share, share) for share in shares))
        answers = cast("list[T | StorageError]", shared.results)
        self._open_if_silent()
        lost = [answer for answer in answers if isinstance(answer, StorageUnavailable)]
        if lost and len(lost) == len(answers):
            self._counts["errors"] += 1
            raise lost[0]
        return answers

    def _noted(self, call: Callable[..., T], *arguments: Any) -> T:
        """In a thread: make a call, and note whether the server answered. Raises StorageError, ConfigError."""
        began = self._now()
        try:
            result = call(*arguments)
        except (BaseError, OSError, ValueError, StorageError) as error:
            problem = translated(error)
            if not isinstance(problem, StorageUnavailable):
                self._heard()
            elif began > self._answered:
                self._silent = str(problem)
            raise problem from None
        if result is not LEFT:  # else nothing may have been asked
            self._heard()
        return result

    def _heard(self) -> None:
        self._answered, self._silent = self._now(), ""

    def _open_if_silent(self) -> None:
        if silent := self._silent:
            self._breaker.failed(silent)

    async def _in_thread(self, direction: Direction, call: Callable[[], None], what: str) -> None:
        """Make one call that no task waits for. Raises ConfigError, StorageError."""
        try:
            await uncancelled(every([self._threads.run(direction, lambda: self._noted(call), what)]))
        finally:
            self._open_if_silent()

    async def _ask(self) -> None:
        """Raises StorageUnavailable if the server does not answer. An error is an answer."""
        try:
            await self._in_thread(Direction.IN, self._probe, "probe of the object store")
        except StorageUnavailable:
            raise
        except StorageError as error:
            log.warning("the object store answers a probe with an error", url=self._section.url, error=str(error))

    def _counted(self, answers: Sequence[Outcome | StorageError]) -> list[Outcome]:
        outcomes = [Outcome(Found.FAILED, one) if isinstance(one, StorageError) else one for one in answers]
        for outcome in outcomes:
            if (name := _COUNTED_AS.get(outcome.found)) is not None:
                self._counts[name] += 1
        return outcomes


def _profile(section: ObjectStorageSection) -> dict[str, str]:
    return profile_options(os.environ) if urlsplit(section.url).scheme == "s3" else {}


def connect(section: ObjectStorageSection, profile: Mapping[str, str] | None = None, *, checks: bool = False) -> Any:
    """The library's client of this bucket. It has sent nothing yet. Raises ConfigError.

    Credentials come from the environment, from the files of AWS's tools (`profile`, by default those of now), or from
    the platform. checks: send a checksum with each object, where the protocol has one.
    """
    options: dict[str, Any] = dict(_profile(section) if profile is None else profile)
    if checks and urlsplit(section.url).scheme == "s3":
        options["checksum_algorithm"] = "SHA256"
    if section.region:
        options["region"] = section.region
    plain = section.endpoint.startswith("http://")
    if section.endpoint:
        options["endpoint"] = section.endpoint
        if urlsplit(section.url).scheme == "s3":
            options["virtual_hosted_style_request"] = "false"  # most of these servers have no name for each bucket
    seconds = section.timeout
    make: Any = from_url  # its overloads name each provider's options
    try:
        return make(
            section.url,
            config=options or None,
            client_options={
                "allow_http": plain,
                "connect_timeout": timedelta(seconds=min(CONNECT_S, seconds)),
                "read_timeout": timedelta(seconds=seconds),
                "timeout": timedelta(seconds=WHOLE_CALL * seconds),
            },
            retry_config={"max_retries": TRIES_AGAIN, "retry_timeout": timedelta(seconds=seconds)},
        )
    except (BaseError, ValueError, TypeError) as error:
        raise ConfigError("storage.object.url", f"cannot be used: {_short(error)}", section.url) from None


def look_at_bucket(store: Any, url: str) -> None:
    """Ask the bucket for an object that is not there. Blocking. Raises ConfigError, and the library's own errors."""
    try:
        obstore.get(store, PROBE)
    except FileNotFoundError as error:  # of the object, or of the bucket; only the body of a GET names which
        if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
            raise ConfigError("storage.object.url", "there is no such bucket", url) from None
    except (PermissionDeniedError, UnauthenticatedError) as error:
        remedy = CLOCK if _SKEWED.search(str(error)) else ACCESS
        raise ConfigError(
            "storage.object.url", f"the bucket refuses the daemon: {_short(error)}; {remedy}", url
        ) from None


def _prefix(selection: Selection) -> str | None:
    """How the keys begin of all objects that fit, as far as whole parts of their names are known."""
    if selection.space is not None:
        return quoted(selection.space)
    return None if selection.model is None else quoted(quote_part(selection.model))


def _fits(selection: Selection, name: str | None) -> bool:
    return name is not None and parts_of(name) is not None and selection.fits(name)


def _put(client: Any, item: Item, data: memoryview) -> Outcome:
    obstore.put(client, quoted(item.name), data, use_multipart=False)
    return STORED


def _body(client: Any, item: Item) -> memoryview | None:
    """The object, in the library's memory; None if there is none. It may have any length."""
    try:
        return memoryview(obstore.get(client, quoted(item.name)).bytes())
    except FileNotFoundError:
        return None


def translated(error: Exception) -> StorageError:
    """Our error for one of the library's, which are texts: without its credentials, and without frames with buffers."""
    if isinstance(error, StorageError):
        return error
    text, whole = _short(error), str(error)
    is_head = "Error performing HEAD" in whole
    if _METADATA.search(whole):
        return StorageUnavailable(f"{NOWHERE}: {text}", refusal="passing")
    expired = _EXPIRED.search(whole) or (is_head and "status code: 400" in whole)
    if expired or isinstance(error, PermissionDeniedError | UnauthenticatedError):
        remedy = CLOCK if _SKEWED.search(whole) else EXPIRED if _EXPIRED.search(whole) else DENIED
        what = f"the object store refuses access ({remedy}): {text}"
        return StorageError(what, code="storage_denied", refusal="passing" if expired else "denied")
    if _NO_BUCKET.search(whole):
        what = f"there is no such bucket (create it, or set storage.object.url): {text}"
        return StorageError(what, refusal="denied")
    if _FULL.search(whole):
        return StorageFull(f"the object store has no room: {text}")
    if "HTTP error" in text or "Connect" in whole:
        return StorageUnavailable(f"the object store cannot be reached: {text}")
    if _GATEWAY.search(whole) and not is_head and _REASON.search(whole) is None:  # of a proxy: nobody is behind it
        return StorageUnavailable(f"the object store cannot be reached: {text}")
    return StorageError(f"the object store failed: {text}", refusal="object" if _NEVER.search(whole) else "passing")


def _short(error: Exception) -> str:
    """The server's own reason, the first line of the library's text, and no query string, which may be a signature."""
    text = _QUERY.sub("?…", str(error))
    reason = _REASON.search(text)
    first = text.split("\n", 1)[0].split("<?xml", 1)[0].strip(" -:")
    if reason is None:
        return first[:300]
    return f"{': '.join(html.unescape(part) for part in reason.groups() if part)[:200]} ({first[:300]})"
