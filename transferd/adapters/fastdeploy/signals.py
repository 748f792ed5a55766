"""The shared-memory signals by which FastDeploy's processes wait for its cache transfer processes.

    cache_transfer_inited_signal[rank]   1: this rank's transfer process is up
    cache_ready_signal[rank]             1: the device cache exists; 0: it does not. Its creator sets the signal
    swap_space_ready_signal[rank]        1: the CPU cache exists
    cache_task_inflight[rank]            0: paused, and no transfer is running; 1: transfers may run
    cache_task_is_paused[0]              1: paused
    kv_cache_status[0]                   weights are cleared or updated (V0): CLEARING → CLEARED, UPDATING → NORMAL

They are FastDeploy's own IPCSignals: its engine creates them and we attach to them. `rank` counts within the group.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from transferd.errors import TransferError

log = logging.getLogger(__name__)

POLL_S = 0.05  # a signal is a number in memory and wakes no one

NORMAL, UPDATING, CLEARING, CLEARED = 0, 1, -1, -2  # KVCacheStatus
NAMES = {UPDATING: "UPDATING", CLEARING: "CLEARING", NORMAL: "NORMAL", CLEARED: "CLEARED"}


class Signals:
    """The signals of one group. Attached, never created or removed here."""

    def __init__(self, ranks: int, suffix: int) -> None:
        """suffix: the engine_worker_queue_port, which the engine appends to every name."""
        from fastdeploy.inter_communicator import IPCSignal

        def attach(name: str, size: int) -> Any:
            array = np.zeros([size], dtype=np.int32)
            return IPCSignal(name=name, array=array, dtype=np.int32, suffix=suffix, create=False)

        self.ranks = ranks
        self._inited = attach("cache_transfer_inited_signal", ranks)
        self._cache_ready = attach("cache_ready_signal", ranks)
        self._swap_ready = attach("swap_space_ready_signal", ranks)
        self._inflight = attach("cache_task_inflight", ranks)
        self._is_paused = attach("cache_task_is_paused", 1)
        self._status = attach("kv_cache_status", 1)

    def inited(self) -> None:
        self._inited.value[:] = 1

    def cache_ready(self, there: bool) -> None:
        self._cache_ready.value[:] = int(there)

    def swap_space_ready(self, there: bool) -> None:
        self._swap_ready.value[:] = int(there)

    def paused(self, is_paused: bool) -> None:
        self._is_paused.value[0] = int(is_paused)
        self._inflight.value[:] = int(not is_paused)

    def cache_is(self, there: bool) -> bool:
        """Whether every rank's creator reports that its cache exists, or is gone."""
        return bool((self._cache_ready.value == int(there)).all())

    def some_cache_is(self, there: bool) -> bool:
        """Whether some rank's creator reports that."""
        return bool((self._cache_ready.value == int(there)).any())

    def await_released(self, closing: threading.Event, timeout: float) -> None:
        """Wait until no worker maps its cache. Raises TransferError after `timeout` seconds, or when closing."""
        give_up = time.monotonic() + timeout
        while not self.cache_is(False):
            if closing.wait(POLL_S):
                raise TransferError("the engine is closing")
            if time.monotonic() > give_up:
                raise TransferError(f"some workers did not release their KV cache within {timeout:g} s")

    def serve_status(
        self, closing: threading.Event, clear: Callable[[], None], update: Callable[[], None], look: Callable[[], None]
    ) -> None:
        """Serve kv_cache_status until closing: call clear or update on request, and report when it has ended.

        After an exception the status stays as it is, and the next poll tries again, as FastDeploy's own process does:
        its requester waits for minutes, and FastDeploy has no status for failure. Calls `look` while no request waits.
        """
        served = {CLEARING: (clear, CLEARED), UPDATING: (update, NORMAL)}
        complained = ""
        while not closing.wait(POLL_S):
            status = int(self._status.value[0])
            action, then = served.get(status, (look, status))
            try:
                action()
                complained = ""
            except Exception as error:  # noqa: BLE001 - this thread must outlive whatever goes wrong once
                if str(error) != complained:
                    log.error("kv_cache_status %s: %s; trying again", NAMES.get(status, status), error)
                complained = str(error)
            else:
                if status in served and self._status.value[0] == status:  # else another request came meanwhile
                    self._status.value[0] = then
