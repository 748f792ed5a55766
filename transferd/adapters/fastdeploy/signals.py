"""The shared-memory signals by which FastDeploy's processes wait for its cache transfer processes.

    cache_transfer_inited_signal[rank]   1: this rank's transfer process is up
    cache_ready_signal[rank]             1: the device cache exists; 0: it is gone. Its creator sets the signal
    swap_space_ready_signal[rank]        1: the CPU cache exists
    cache_task_inflight[rank]            0: paused, and no transfer is running; 1: transfers may run
    cache_task_is_paused[0]              1: paused
    kv_cache_status[0]                   weights are cleared or updated (V0): CLEARING → CLEARED, UPDATING → NORMAL

They are FastDeploy's own IPCSignals: its engine creates them and we attach to them. `rank` counts within the group.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from transferd.errors import TransferError

POLL_S = 0.05  # a signal is a number in memory and wakes no one

NORMAL, UPDATING, CLEARING, CLEARED = 0, 1, -1, -2  # KVCacheStatus


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

    def await_cache(self, there: bool, closing: threading.Event, timeout: float | None) -> None:
        """Wait until every rank's creator reports that its cache exists, or is gone.

        timeout: seconds; None: no limit, like FastDeploy. Raises TransferError after the timeout, or when closing.
        """
        wanted = np.full(self.ranks, int(there), dtype=np.int32)
        pauses = None if timeout is None else int(timeout / POLL_S)
        while not np.array_equal(self._cache_ready.value, wanted):
            if closing.wait(POLL_S):
                raise TransferError("the engine is closing")
            if pauses is not None:
                pauses -= 1
                if pauses < 0:
                    what = "create their KV cache" if there else "release their KV cache"
                    raise TransferError(f"some workers did not {what} within {timeout:g} s")

    def watch_status(
        self,
        closing: threading.Event,
        clear: Callable[[], None],
        update: Callable[[], None],
        look: Callable[[], None],
    ) -> None:
        """Serve kv_cache_status until closing: call clear or update on request, and report when it has ended.

        Calls `look` at every poll.
        After an exception the status stays as it is, and the requester times out: FastDeploy has no status for failure.
        """
        served = {CLEARING: (clear, CLEARED), UPDATING: (update, NORMAL)}
        failed: int | None = None
        while not closing.wait(POLL_S):
            look()
            status = int(self._status.value[0])
            if status not in served or status == failed:
                failed = failed if status == failed else None
                continue
            action, then = served[status]
            try:
                action()
            except TransferError:
                failed = status  # the action has logged why; it is retried once the status has changed in between
            else:
                self._status.value[0] = then
