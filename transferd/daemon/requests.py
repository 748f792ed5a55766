"""What the daemon does for each control request: one method a request, named as the request's tag on the wire.

A method returns the answer's value, or a function that begins the work which gives it. So a request that must wait is
refused, if too many wait already, before it has any effect. wire/protocol.py says of each request who may make it; the
engine's coordinator, cache and look-ups, or the holdings and prefetches of all engines, do the work.
"""

from __future__ import annotations

import asyncio
import functools
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from transferd.config import DEFAULT_ENGINE
from transferd.control.gate import MOST_HOLDS
from transferd.daemon.belonging import check_operator
from transferd.daemon.clients import Clients
from transferd.daemon.engine import HostedEngine
from transferd.daemon.engines import Engines
from transferd.daemon.listing import Listing
from transferd.daemon.liveness import Liveness
from transferd.daemon.lookup import keys_bytes
from transferd.errors import ProtocolError, TransferError
from transferd.tiers.base import DeviceHandle
from transferd.tiers.offered import PASSED, PEER
from transferd.wire import protocol as wire

Work = Coroutine[Any, Any, Any]
Begin = Callable[[], Work]
MAX_HANDLE = 1024**2  # bytes of an offer's data; 61 layers of 5 arrays take 40 KiB


class Requests:
    """See the module. Borrows the daemon's parts.

    stats: returns the report, or a future of it.
    explain: returns a task's story; takes its id, its engine or "", and the client's engine; raises RequestError.
    """

    def __init__(
        self,
        clients: Clients,
        engines: Engines,
        liveness: Liveness,
        listing: Listing,
        stats: Callable[[], Any],
        explain: Callable[[str, str, str], dict[str, Any]],
    ) -> None:
        self._clients, self._engines, self._liveness, self._listing = clients, engines, liveness, listing
        self._report, self._story = stats, explain

    def handlers(self, kinds: tuple[type[wire.ControlRequest], ...]) -> dict[type, Callable[[bytes, Any], Any]]:
        """The method of each of these requests."""
        return {kind: getattr(self, str(kind.__struct_config__.tag)) for kind in kinds}

    def _engine(self, peer: bytes) -> HostedEngine:
        """The engine that a client speaks for; the server has checked that there is one."""
        engine = self._clients[peer].engine
        assert engine is not None
        return engine

    # --- the engine's life --------------------------------------------------------------------------

    def register(self, peer: bytes, asked: wire.Register) -> Begin:
        self._liveness.watch_process(peer)
        return lambda: self._engines.register(peer, self._clients[peer], asked)

    def unregister(self, peer: bytes, _: wire.Unregister) -> Begin:
        return lambda: self._engines.unregister(self._engine(peer))

    def set_generation(self, peer: bytes, change: wire.SetGeneration) -> Begin:
        return lambda: self._engines.set_generation(peer, self._engine(peer), change.generation)

    def closed_generations(self, peer: bytes, closed: wire.ClosedGenerations) -> None:
        self._engine(peer).cache.close_generations(closed.generations)

    # --- its tasks ----------------------------------------------------------------------------------

    def cancel(self, peer: bytes, cancel: wire.Cancel) -> bool:
        engine, cancelled = self._engine(peer), False
        for task_id in (cancel.task_id, *cancel.task_ids):
            there = engine.coordinator.cancel(task_id)
            cancelled = self._engines.prefetches.cancel(engine, task_id) or there or cancelled
        return cancelled

    def settled(self, peer: bytes, settled: wire.Settled) -> Begin:
        return lambda: self._when_settled(peer, self._clients[peer].engine_name or DEFAULT_ENGINE, settled)

    async def _when_settled(self, peer: bytes, engine: str, settled: wire.Settled) -> bool | list[str]:
        await self._clients.gone(settled.session, but=peer)
        if settled.task_ids:
            return await self._engines.some_settled(engine, [settled.task_id, *settled.task_ids])
        await self._engines.task_settled(engine, settled.task_id)
        return True

    def pause(self, peer: bytes, pause: wire.Pause) -> Begin:
        return functools.partial(self._engine(peer).coordinator.pause, peer, *self._new_hold(peer, "pause", pause))

    def drain(self, peer: bytes, drain: wire.Drain) -> Begin:
        return functools.partial(self._engine(peer).coordinator.drain, peer, *self._new_hold(peer, "drain", drain))

    def resume(self, peer: bytes, resume: wire.Resume) -> None:
        self._engine(peer).coordinator.resume(*_holder(peer, resume))

    def _new_hold(self, peer: bytes, what: str, body: wire.Pause | wire.Drain) -> tuple[str, str]:
        """The holder. Raises `too_many_requests` unless one more hold may be kept."""
        holder = _holder(peer, body)
        if not self._engine(peer).dispatcher.may_hold(what, *holder):
            problem = f"{MOST_HOLDS} pauses and drains of this engine are held already; end one with resume"
            raise TransferError(problem, code="too_many_requests")
        return holder

    # --- its memory ---------------------------------------------------------------------------------

    def attach(self, peer: bytes, attach: wire.Attach) -> dict[str, Any]:
        self._liveness.watch_process(peer)
        cache = self._engine(peer).cache
        handle = cache.handle(peer, attach.rank, attach.epoch)
        return {"kind": handle.kind, "data": handle.data, "boot_id": self._clients.boot_id, "epoch": cache.epoch}

    def detach(self, peer: bytes, detach: wire.Detach) -> None:
        self._engine(peer).cache.detach(peer, detach.rank)

    def offer(self, peer: bytes, offer: wire.Offer) -> Begin:
        self._liveness.watch_process(peer)
        client, data = self._clients[peer], _handle_data(offer)
        data[PEER] = client.who  # from the kernel, because an offer could name another process
        token, connection = data.pop(PASSED, None), client.connection

        async def offered() -> str | None:
            if isinstance(token, bytes) and connection is not None:
                data[PASSED] = await connection.passed(token)
            try:
                return await self._engines.offer(peer, client, offer.rank, DeviceHandle(offer.kind, data), offer.epoch)
            except BaseException as error:
                # The frames of a refusal hold what was passed, in a circle that only a collection would break.
                traceback.clear_frames(error.__traceback__)
                data.clear()
                raise

        return offered

    def clear_cache(self, peer: bytes, clear: wire.ClearCache) -> Begin:
        return lambda: self._engine(peer).cache.clear(keep_host=clear.keep_host)

    def restore_cache(self, peer: bytes, restore: wire.RestoreCache) -> Begin:
        return lambda: self._engines.restore(peer, self._engine(peer), restore)

    # --- stored blocks ------------------------------------------------------------------------------

    def match(self, peer: bytes, match: wire.Match) -> Begin:
        path, lookup = match.token_ids, self._engine(peer).lookup
        if path is None:
            return lambda: lookup.match(match.keys)
        return lambda: lookup.match_tokens(path, match.start, match.salt)

    def exists(self, peer: bytes, exists: wire.Exists) -> Begin:
        if exists.lease:
            return lambda: self._engines.holdings.lease(self._clients[peer].uid, self._engine(peer), exists)
        return lambda: self._engine(peer).lookup.exists(exists.keys, use=exists.use)

    def locate(self, peer: bytes, locate: wire.Locate) -> Any:
        lookup = self._engine(peer).lookup
        if locate.token_ids is not None:
            return lookup.locate(locate.token_ids, locate.salt)
        return lambda: lookup.locate_keys(locate.keys)

    def purge(self, peer: bytes, purge: wire.Purge) -> Begin:
        return lambda: self._engines.holdings.purge(self._clients[peer], purge)

    def pin(self, peer: bytes, pin: wire.Pin) -> Begin:
        return lambda: self._engines.holdings.pin(self._engine(peer), pin)

    def unpin(self, peer: bytes, unpin: wire.Unpin) -> Begin:
        return lambda: self._engines.holdings.unpin(self._engine(peer), unpin)

    def prefetch(self, peer: bytes, prefetch: wire.Prefetch) -> Begin:
        return lambda: self._engines.prefetches.run(peer, self._engine(peer), prefetch)

    def warm(self, peer: bytes, warm: wire.Warm) -> Begin:
        return lambda: self._engines.prefetches.warm(self._clients[peer], warm)

    def change_level(self, peer: bytes, change: wire.ChangeLevel) -> Begin:
        return lambda: self._engines.holdings.change_level(self._clients[peer], change)

    def make_copies(self, peer: bytes, asked: wire.MakeCopies) -> Begin:
        return lambda: self._engines.holdings.make_copies(self._clients[peer], asked)

    def restart_check(self, peer: bytes, _: wire.RestartCheck) -> Begin:
        engines = self._engines
        return lambda: engines.holdings.restart_check(self._clients[peer], engines.acts.would_not_start)

    def record(self, peer: bytes, record: wire.Record) -> dict[str, Any]:
        check_operator(self._clients[peer].uid, "record what engines look up")
        return self._engines.traffic.trace.read(record.after)

    # --- reports ------------------------------------------------------------------------------------

    def stats(self, _peer: bytes, _: wire.Stats) -> Any:
        answer = self._report()
        return functools.partial(_of, answer) if isinstance(answer, asyncio.Future) else answer

    def explain(self, peer: bytes, explain: wire.Explain) -> dict[str, Any]:
        return self._story(explain.task_id, explain.engine, self._clients[peer].engine_name)

    def why(self, peer: bytes, why: wire.Why) -> list[dict[str, Any]]:
        may_ask = self._engines.holdings.open_to(self._clients[peer], why.engine)
        return self._engines.traffic.key(why.key, may_ask)

    def tasks(self, _peer: bytes, tasks: wire.ListTasks) -> list[dict[str, Any]]:
        return self._listing.tasks(tasks.which, tasks.limit, tasks.engine)

    def clients(self, _peer: bytes, clients: wire.ListClients) -> list[dict[str, Any]]:
        return self._listing.clients(clients.limit, clients.engine)


async def _of(answer: asyncio.Future[Any]) -> Any:
    return await answer


def held_bytes(body: wire.ControlRequest) -> int:
    """Memory that a waiting request holds: that of its keys, or of its token ids."""
    path = getattr(body, "token_ids", None)
    return keys_bytes(getattr(body, "keys", None) or ()) + (0 if path is None else path.array.nbytes)


def _handle_data(offer: wire.Offer) -> dict[str, Any]:
    """Decode the data of an offer. Raises ProtocolError."""
    if (nbytes := len(memoryview(offer.data))) > MAX_HANDLE:
        raise ProtocolError(f"the handle has {nbytes} bytes, the limit is {MAX_HANDLE}", code="too_large")
    try:
        return _handle_decoder.decode(offer.data)
    except wire.UNREADABLE as error:
        raise ProtocolError(f"the handle's data must be a map: {error}", code="bad_value") from None


_handle_decoder = msgspec.msgpack.Decoder(dict[str, Any])


def _holder(peer: bytes, body: wire.Pause | wire.Resume | wire.Drain) -> tuple[str, str]:
    """The holder of a pause, (name, proof): a client's own, which outlive its connection, or else the connection."""
    return (body.holder, f"said {body.proof}") if body.holder else (f"client {peer.decode()}", "connection")
