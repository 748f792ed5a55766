"""A daemon as a process: from its configuration to its exit code.

start     raise the descriptor limit, remove shared memory of dead owners, open the parts; a signal may interrupt this
serve     notify the supervisor, feed its watchdog, wait for a signal
end       stop within the budget, whatever happened before and whatever hangs

signals.py handles signals, systemd.py the supervisor, dump_thread.py dumps.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from transferd.config import Config, StorageSection
from transferd.daemon.daemon import Daemon
from transferd.daemon.preflight import build, examine
from transferd.daemon.reload import Reloader
from transferd.daemon.start_progress import StartProgress
from transferd.daemon.systemd import Notifier, feed_watchdog
from transferd.errors import ConfigError, TransferError
from transferd.observability import logs
from transferd.observability.dump_thread import DumpThread
from transferd.runtime.compat import Runner
from transferd.runtime.descriptors import raise_limit
from transferd.runtime.heap import keep_trimmed
from transferd.runtime.signals import ProcessSignals
from transferd.runtime.threads import require_threads
from transferd.storage.file_io import map_files
from transferd.tiers.populate import PROGRESS
from transferd.tiers.segment import remove_stale_segments, unlink_all
from transferd.wire.credentials import users_problem

log = structlog.get_logger(__name__)

LOOK_S = 0.5  # how often a start reports its progress
STILL_RUNNING = 3  # exit code: stopped, but a call or a copy that hangs was abandoned
GC_THRESHOLDS = (50_000, 50, 100)


def serve(config: Config, *, reload: Callable[[], Config] | None = None, warnings: Sequence[str] = ()) -> int:
    """Run a daemon until SIGTERM or SIGINT. Returns the exit code: 0 after a clean stop, else 1.

    If a call into storage or a copy hangs, this function ends the process itself, with STILL_RUNNING: the
    interpreter would wait for the call, or free the memory that it uses.

    reload: reads the configuration again, for SIGHUP (see reload.py).
    warnings: sentences about the configuration for the log (config.outdated).

    The caller must block the dump signals before any thread exists (signals.hold_dump_signals).

    Raises ConfigError for problems that only a start can find (socket or port in use, directory not writable).
    """
    import uvloop

    logs.configure(config.log.level, config.log.format)
    for warning in warnings:
        log.warning("setting without effect", problem=warning)
    try:
        logs.take_over_stderr()
    except RuntimeError as error:
        problem = f"cannot start a thread: {error}; raise the process limit (TasksMax in the unit, ulimit -u)"
        raise ConfigError("RLIMIT_NPROC", problem) from error
    raise_limit()
    require_threads()
    map_files()
    with Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(_serve(config, reload))
        if code == STILL_RUNNING:
            unlink_all()
            logs.flush()
            os._exit(code)
        return code


async def _serve(config: Config, reload: Callable[[], Config] | None) -> int:
    examine(config, build(config))
    daemon = Daemon(config)  # an unusable configuration fails here, before anything is logged or touched
    with DumpThread(config.recorder, daemon.recorder, boot_id=daemon.boot_id) as dump_thread:
        code = await _live(daemon, reload)
    return STILL_RUNNING if dump_thread.hangs else code


async def _live(daemon: Daemon, reload: Callable[[], Config] | None) -> int:
    """Start, serve until a signal, stop. Returns the exit code."""
    config = daemon.config
    removed = remove_stale_segments()
    if removed:
        log.info("removed shared memory of dead owners", segments=removed)
    if problem := users_problem([*config.server.endpoints, config.server.observer_endpoint]):
        log.warning("cannot tell all users apart", problem=problem)
    notifier = Notifier.from_environment()
    reloader = Reloader(daemon, notifier, reload)
    with ProcessSignals(config.server.shutdown_timeout + config.storage.drain_at_stop, reloader) as signals:
        try:
            if await _started(daemon, notifier, signals):
                await _serving(daemon, notifier, signals, reloader)
        except TransferError as error:
            hanging: list[str] = []
            with contextlib.suppress(TransferError):  # report the error that prevented the start, not this one
                hanging = await _stopped(daemon, signals)
            if isinstance(error, ConfigError) and not hanging:
                raise
            log.error("cannot start", reason=error.reason, problem=str(error), hanging=hanging or None)
            return STILL_RUNNING if hanging else 1
        log.info("stopping", signal=signals.received, budget_s=round(signals.budget(), 3))
        notifier.notify("STOPPING=1", "STATUS=draining")
        hanging = await _stopped(daemon, signals)
    if hanging:
        log.error("stopped with hanging work; exiting without waiting for it", hanging=hanging)
        return STILL_RUNNING
    log.info("stopped", uptime_s=round(daemon.clock.monotonic() - daemon.started_at, 3))
    return 0


async def _started(daemon: Daemon, notifier: Notifier, signals: ProcessSignals) -> bool:
    """Open the daemon. Returns False if a signal came first; `stop` then closes what is open."""
    opening = asyncio.ensure_future(daemon.open())
    progress = StartProgress(notifier, daemon.host_bytes, daemon.clock.monotonic)
    populated, pinned = PROGRESS.populated, PROGRESS.pinned
    while not (opening.done() or signals.stop.done()):
        progress.making_memory(PROGRESS.populated - populated, PROGRESS.pinned - pinned)
        await asyncio.wait({opening, signals.stop}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
    progress.done()
    if opening.done():
        opening.result()
        return True
    opening.cancel()  # takes effect when its thread has finished; if that hangs, `stop` names it
    with PROGRESS.cancelling():
        await asyncio.wait({opening}, timeout=signals.budget() / 2)
    if opening.done() and not opening.cancelled() and (error := opening.exception()) is not None:
        log.warning("start interrupted by a signal, and failed", problem=str(error))
    return False


async def _stopped(daemon: Daemon, signals: ProcessSignals) -> list[str]:
    """Stop the daemon; returns what hangs. Stops allocating memory for an engine that is just registering."""
    with PROGRESS.cancelling():
        return await daemon.stop(signals.budget)


async def _serving(daemon: Daemon, notifier: Notifier, signals: ProcessSignals, reloader: Reloader) -> None:
    """From readiness to the first signal."""
    quiet_collector()
    own = daemon.engines.own
    engine: dict[str, Any] = {}
    if own is not None:
        layout = own.layout
        engine = {"ranks": len(own.workers), "block_bytes": layout.block_bytes, "fingerprint": layout.fingerprint}
        _warn_of_bare_names(daemon.config.storage)
    waiting_for = daemon.not_ready
    log.info(
        "listening" if waiting_for else "ready",
        boot_id=daemon.boot_id,
        endpoint=daemon.transport.endpoints,
        **({"waiting_for": waiting_for} if waiting_for else {}),
        **engine,
    )
    notifier.notify("READY=1", f"STATUS={reloader.status()}")
    reloader.serving = True
    watchdog = asyncio.ensure_future(feed_watchdog(notifier, lambda: daemon.alive, reloader.status))
    trimming = asyncio.ensure_future(keep_trimmed())
    try:
        if waiting_for:
            await _until_ready(daemon, StartProgress(notifier, 0, daemon.clock.monotonic), signals.stop)
        await asyncio.wait({signals.stop})
    finally:
        watchdog.cancel()
        trimming.cancel()


def _warn_of_bare_names(storage: StorageSection) -> None:
    """Warn that different models share names in storage, where names are not ours and lack the fingerprint."""
    if storage.backend == "attention_store" and storage.attention_store.driver == "sdk":
        what = "storage finds blocks by tokens, namespace and model version alone, whatever the model, dtype and layout"
        log.warning(what, setting="storage.attention_store.driver", value="sdk")
    elif storage.key_schema == "fastdeploy" and storage.backend != "none":
        what = "names of objects contain neither model nor dtype nor layout, and nothing shows damage"
        log.warning(what, setting="storage.key_schema", value="fastdeploy")


async def _until_ready(daemon: Daemon, progress: StartProgress, stop: asyncio.Future[None]) -> None:
    """Report what the daemon waits for, until it is ready."""
    while (why := daemon.not_ready) and not stop.done():
        progress.waiting(why)
        await asyncio.wait({stop}, timeout=LOOK_S)
    progress.done()
    if not stop.done():
        log.info("ready", boot_id=daemon.boot_id)


def quiet_collector() -> None:
    """Run Python's cycle collector rarely: there are many tasks, claims and results, and none is part of a cycle.

    Objects from the start live as long as the process, so the collector need not look at them again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
