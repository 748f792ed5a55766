"""Carries out FastDeploy's requests to its cache other than transfers, for both of its protocols.

    pause            no transfer runs or begins, and no late answer arrives
    resume           transfers begin again first; then blocks get the version that the training loop names now
    update_weights   blocks have another generation: version.yaml, else args["version"], else a unique one
    sleep, wakeup    device and host memory are freed, and made again; without kv_cache among the tags, nothing
    CLEARING         the older protocol (kv_cache_status): a pause, and a sleep
    UPDATING         a wakeup with new weights, and a resume

A request may fail at any point: the daemon dies or is suspended, workers are slow, version.yaml is half written. So no
request relies on what an earlier one did. What is cleared or missing is the daemon's answer; whether workers have
their memory is cache_ready_signal. We remember only what FastDeploy asked last: `_slept`, `_new_weights`, the queue's
pause, and the name of its weights, which the client asserts to each new daemon. Hence the same request, or the opposite
one, goes on where the failed one stopped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from transferd.adapters.fastdeploy.arguments import TransferArguments
from transferd.adapters.fastdeploy.items import ControlItem
from transferd.adapters.fastdeploy.signals import POLL_S, Signals
from transferd.client.sync_client import SyncClient
from transferd.config.generation import generation_named, generation_of
from transferd.errors import ConfigError, DaemonLost, RequestError, TransferError

log = logging.getLogger(__name__)

KEEP_VARIABLE = "TRANSFERD_KEEP_BLOCKS_ON_UPDATE"
UNNAMED = "unnamed"  # weights without a version
ANSWER_TIMEOUT_S = 15.0  # for a daemon that runs, or is started
# Answers of a restarted daemon until our engine has registered and the client has set the generation.
PASSING = ("starting", "unknown_engine", "generation_mismatch")
WORKER_TIMEOUT_S = 40.0  # for workers to release memory before a sleep; FastDeploy waits 60 s for the whole sleep
DONE, UNKNOWN, FAILED = 200, 400, 500  # codes of a ControlResponse


class Controlled(Protocol):
    """What requests act on: an engine's group (group.py)."""

    first: TransferArguments  # the arguments of its first rank
    signals: Signals
    closing: threading.Event  # set when the group ends, and nothing waits any more

    @property
    def client(self) -> SyncClient: ...

    def hold(self) -> None:
        """Refuse new transfers, cancel running ones, and wait for their answers. Raises TransferError."""
        ...

    def release(self) -> None:
        """Accept transfers again after `hold`."""
        ...

    def daemon_lives(self) -> bool:
        """Whether the daemon may hold memory."""
        ...

    def have_daemon(self) -> None:
        """Start a daemon of ours that has ended; return when it has our engine. Raises TransferError, OSError."""
        ...

    def join_memory(self) -> None:
        """Make the daemon and the workers share the device memory. Raises TransferError."""
        ...


class Control:
    """Carries out the requests of one group, one at a time. Thread-safe."""

    def __init__(self, group: Controlled) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._slept: str | None = None  # the generation at the last sleep; None if it was woken since
        self._emptied_at = ""  # boot_id of the daemon that has freed its memory for that sleep
        self._new_weights = False  # CLEARING was requested, and no UPDATING has succeeded since
        self._generation = group.client.generation  # of the engine's weights
        self._version = self._named_by_file()  # the training loop's version when the weights got that generation
        self._unconfirmed = False  # whether a daemon must confirm the generation first, before it gets tasks

    @property
    def asleep(self) -> bool:
        """Whether FastDeploy has put the cache to sleep: its memory stays free, also after a restart of the daemon."""
        return self._slept is not None

    @property
    def settled(self) -> bool:
        """Whether the daemon serves the generation of the engine's weights. Transfers are refused while it does not."""
        if self._unconfirmed and self._group.client.generation == self._generation:
            self._unconfirmed = False
        return not self._unconfirmed

    # --- requests through the cache queue -----------------------------------------------------------

    def obey(self, item: ControlItem) -> tuple[int, str]:
        """Carry out a request. Returns the code and message of FastDeploy's ControlResponse; never raises."""
        command = self._commands.get(item.method)
        if command is None:
            return UNKNOWN, f"Unknown control method: {item.method}"
        try:
            with self._lock:
                command(item.args)
        except Exception as error:  # noqa: BLE001 - without an answer FastDeploy waits for one to five minutes
            log.warning("control request %s failed: %s", item.method, error)
            return FAILED, f"Failed to execute {item.method}: {error}"
        return DONE, "Success"

    @property
    def _commands(self) -> dict[str, Callable[[Mapping[str, Any]], None]]:
        return {
            "pause": lambda _: self._pause(),
            "resume": lambda _: self._resume(),
            "update_weights": lambda args: self._name(*self._renamed(args)),
            "sleep": lambda args: self._sleep() if is_about_the_cache(args) else None,
            "wakeup": lambda args: self._wakeup(*self._served_now()) if is_about_the_cache(args) else None,
        }

    # --- kv_cache_status ----------------------------------------------------------------------------

    # Every worker sets the status, so a late one requests something that was already done for the others.

    def clear_weights(self) -> None:
        """CLEARING. Raises TransferError; the caller repeats it."""
        with self._lock:
            self._new_weights = True
            self._pause()
            self._sleep()

    def update_weights(self) -> None:
        """UPDATING. Raises TransferError; the caller repeats it."""
        with self._lock:
            if self._new_weights:
                if self._slept is None:  # CLEARING failed, and its requester has given up waiting for it
                    self._pause()
                    self._sleep()
                # A repeated request keeps the name that it has given the weights before.
                known = self._generation != self._slept
                self._wakeup(*((self._generation, self._version) if known else self._renamed({})))
                self._new_weights = False
            self._resume()

    def look(self) -> None:
        """Free what a successor of the daemon has allocated while FastDeploy sleeps. Raises TransferError."""
        if self._slept is None or not self._lock.acquire(blocking=False):
            return
        try:
            if self._slept is not None and self._group.client.boot_id != self._emptied_at:
                self._empty()
        finally:
            self._lock.release()

    # --- the steps ----------------------------------------------------------------------------------

    def _pause(self) -> None:
        self._group.hold()
        self._group.signals.paused(True)

    def _resume(self) -> None:
        self._group.release()
        self._group.signals.paused(False)
        try:
            generation, version = self._served_now()
        except ConfigError:  # half written: under a unique name, no block of earlier weights is found
            self._name(renamed(UNNAMED, self._generation), None)
            raise
        if generation != self._generation:
            self._name(generation, version)

    def _sleep(self) -> None:
        """Free device and host memory, after the processes that mapped it have released it."""
        group = self._group
        before, self._slept = self._slept, self._generation if self._slept is None else self._slept
        try:
            if group.first.creates:
                group.signals.await_released(group.closing, WORKER_TIMEOUT_S)
            self._empty()
        except BaseException:
            self._slept = before
            raise
        group.signals.swap_space_ready(False)
        group.signals.cache_ready(False)

    def _empty(self) -> None:
        """Free the daemon's memory. If the daemon is dead, that went with it, and it stays down until the wakeup."""
        client, first = self._group.client, self._group.first
        give_up = time.monotonic() + ANSWER_TIMEOUT_S  # for a daemon that has just been started again
        while self._group.daemon_lives():
            try:
                if first.creates:
                    for rank in range(first.ranks):
                        client.detach(rank)
                client.clear_cache(keep_host=not first.frees_host)
                break
            except TransferError as error:
                passing = isinstance(error, DaemonLost) or error.reason in PASSING
                if not passing or time.monotonic() > give_up or self._group.closing.wait(POLL_S):
                    raise
                self._insist(error)
        self._emptied_at = client.boot_id

    def _wakeup(self, generation: str, version: str | None) -> None:
        """Create the memory again. generation: of the weights that are served now, which may be the same as before."""
        group = self._group
        group.have_daemon()
        if self._restored(generation):
            self._generation, self._version, self._unconfirmed = generation, version, False
        else:
            self._name(generation, version)
        group.join_memory()
        group.signals.swap_space_ready(bool(group.first.host_blocks))
        self._slept = None

    def _restored(self, generation: str) -> bool:
        """Restore the cache. Returns False if it is there: the daemon is new since the sleep, or was woken before."""
        give_up = time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            try:
                self._group.client.restore_cache(generation, same_weights=True)
            except RequestError as error:
                if error.reason == "not_cleared":
                    return False
                if error.reason not in PASSING or time.monotonic() > give_up or self._group.closing.wait(POLL_S):
                    raise
                self._insist(error)
            else:
                return True

    # --- generations --------------------------------------------------------------------------------

    def _name(self, generation: str, version: str | None) -> None:
        """Name blocks after this generation from now on. If no daemon answers, the next one gets it before any task."""
        try:
            self._group.client.set_generation(generation)
        except RequestError:
            raise
        except TransferError as error:
            log.warning("transfers wait for a daemon that confirms the generation %s: %s", generation, error)
        self._generation, self._version, self._unconfirmed = generation, version, True

    def _insist(self, error: TransferError) -> None:
        """Set the generation again if a worker has asserted the previous one to a new daemon."""
        if error.reason == "generation_mismatch":
            with contextlib.suppress(TransferError):
                self._group.client.set_generation(self._generation)

    def _served_now(self) -> tuple[str, str | None]:
        """The generation of these weights: the training loop's version if that is new, else what is served already.

        An update may have added to a version that the training loop did not change.
        """
        version = self._named_by_file()
        return self._generation if version in (None, self._version) else version, version or self._version

    def _renamed(self, args: Mapping[str, Any]) -> tuple[str, str | None]:
        """A generation for new weights. For weights without a name it is unique, so that no older block is shared."""
        version, given = self._named_by_file(), args.get("version")
        named = generation_named(given) if isinstance(given, str) and given else UNNAMED
        return renamed(version or named, self._generation), version

    def _named_by_file(self) -> str | None:
        file = self._group.first.version_file
        return generation_of(file) if file.is_file() else None


def renamed(named: str, served: str) -> str:
    """A generation for new weights that are called `named`, if an engine has served `served` until now.

    A name that is served already does not tell the weights apart. It gets a unique ending, so that no block of the
    earlier weights is found, unless the environment says that such an update keeps the weights.
    """
    keep = os.environ.get(KEEP_VARIABLE, "").strip().lower() in ("1", "true")
    return named if keep or named not in (served, UNNAMED) else f"{named}-{uuid.uuid4().hex[:16]}"


def is_about_the_cache(args: Mapping[str, Any]) -> bool:
    """Whether the request's tags include the cache. tags: "weight,kv_cache", or a list; by default everything."""
    tags = args.get("tags")
    if not tags:
        return True
    return "kv_cache" in (tags.split(",") if isinstance(tags, str) else tags)
