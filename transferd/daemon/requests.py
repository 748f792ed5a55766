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
from transferd.daemon import lookup
from transferd.daemon.belonging import check_operator
from transferd.daemon.clients import KnownClient
from transferd.daemon.engine import HostedEngine
from transferd.daemon.engines import Engines
from transferd.daemon.listing import Listing
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
        engines: Engines,
        listing: Listing,
        stats: Callable[[], Any],
        explain: Callable[[str, str, str], dict[str, Any]],
    ) -> None:
        self._engines, self._listing = engines, listing
        self._report, self._story = stats, explain

    def handlers(self) -> dict[type, Callable[[KnownClient, Any], Any]]:
        """The method of each request, but for the two that begin and end a client."""
        kinds = [kind for kind in wire.CONTROLS if kind not in (wire.Hello, wire.Bye)]
        return {kind: getattr(self, str(kind.__struct_config__.tag)) for kind in kinds}

    # --- the engine's life --------------------------------------------------------------------------

    def register(self, client: KnownClient, asked: wire.Register) -> Begin:
        return lambda: self._engines.register(client, asked)

    def unregister(self, client: KnownClient, _: wire.Unregister) -> Begin:
        return lambda: self._engines.unregister(_engine(client))

    def set_generation(self, client: KnownClient, change: wire.SetGeneration) -> Begin:
        return lambda: self._engines.set_generation(client, _engine(client), change.generation)

    def closed_generations(self, client: KnownClient, closed: wire.ClosedGenerations) -> None:
        _engine(client).cache.close_generations(closed.generations)

    # --- its tasks ----------------------------------------------------------------------------------

    def cancel(self, client: KnownClient, cancel: wire.Cancel) -> bool:
        engine, cancelled = _engine(client), False
        for task_id in (cancel.task_id, *cancel.task_ids):
            there = engine.coordinator.cancel(task_id, anew=cancel.anew)
            cancelled = self._engines.prefetches.cancel(engine, task_id) or there or cancelled
        return cancelled

    def settled(self, client: KnownClient, settled: wire.Settled) -> Begin:
        return lambda: self._when_settled(client, client.engine_name or DEFAULT_ENGINE, settled)

    async def _when_settled(self, client: KnownClient, engine: str, settled: wire.Settled) -> bool | list[str]:
        await self._engines.clients.gone(settled.session, but=client)
        if settled.task_ids:
            return await self._engines.some_settled(engine, [settled.task_id, *settled.task_ids])
        await self._engines.task_settled(engine, settled.task_id)
        return True

    def pause(self, client: KnownClient, pause: wire.Pause) -> Begin:
        return functools.partial(_engine(client).coordinator.pause, client.peer, *_new_hold(client, "pause", pause))

    def drain(self, client: KnownClient, drain: wire.Drain) -> Begin:
        return functools.partial(_engine(client).coordinator.drain, client.peer, *_new_hold(client, "drain", drain))

    def resume(self, client: KnownClient, resume: wire.Resume) -> None:
        _engine(client).coordinator.resume(*_holder(client, resume))

    # --- its memory ---------------------------------------------------------------------------------

    def attach(self, client: KnownClient, attach: wire.Attach) -> dict[str, Any]:
        cache = _engine(client).cache
        handle = cache.handle(client.peer, attach.rank, attach.epoch)
        return {
            "kind": handle.kind,
            "data": handle.data,
            "boot_id": self._engines.clients.boot_id,
            "epoch": cache.epoch,
        }

    def detach(self, client: KnownClient, detach: wire.Detach) -> None:
        _engine(client).cache.detach(client.peer, detach.rank)

    def offer(self, client: KnownClient, offer: wire.Offer) -> Begin:
        data = _handle_data(offer)
        data[PEER] = client.who  # from the kernel, because an offer could name another process
        token, connection = data.pop(PASSED, None), client.connection

        async def offered() -> str | None:
            if isinstance(token, bytes) and connection is not None:
                data[PASSED] = await connection.passed(token)
            try:
                return await self._engines.offer(client, offer.rank, DeviceHandle(offer.kind, data), offer.epoch)
            except BaseException as error:
                # The frames of a refusal hold what was passed, in a circle that only a collection would break.
                traceback.clear_frames(error.__traceback__)
                data.clear()
                raise

        return offered

    def clear_cache(self, client: KnownClient, clear: wire.ClearCache) -> Begin:
        return lambda: _engine(client).cache.clear(keep_host=clear.keep_host)

    def restore_cache(self, client: KnownClient, restore: wire.RestoreCache) -> Begin:
        return lambda: self._engines.restore(client, _engine(client), restore)

    # --- stored blocks ------------------------------------------------------------------------------

    def match(self, client: KnownClient, match: wire.Match) -> Begin:
        path, engine = match.token_ids, _engine(client)
        if path is None:
            return lambda: lookup.match(engine, match.keys)
        return lambda: lookup.match_tokens(engine, path, match.start, match.salt)

    def exists(self, client: KnownClient, exists: wire.Exists) -> Begin:
        if exists.lease:
            return lambda: self._engines.holdings.lease(client.uid, _engine(client), exists)
        return lambda: lookup.exists(_engine(client), exists.keys, use=exists.use)

    def locate(self, client: KnownClient, locate: wire.Locate) -> Any:
        if locate.token_ids is not None:
            return lookup.locate(_engine(client), locate.token_ids, locate.salt)
        return lambda: lookup.locate_keys(_engine(client), locate.keys)

    def purge(self, client: KnownClient, purge: wire.Purge) -> Begin:
        return lambda: self._engines.holdings.purge(client, purge)

    def pin(self, client: KnownClient, pin: wire.Pin) -> Begin:
        return lambda: self._engines.holdings.pin(_engine(client), pin)

    def unpin(self, client: KnownClient, unpin: wire.Unpin) -> Begin:
        return lambda: self._engines.holdings.unpin(_engine(client), unpin)

    def prefetch(self, client: KnownClient, prefetch: wire.Prefetch) -> Begin:
        return lambda: self._engines.prefetches.run(client.peer, _engine(client), prefetch)

    def warm(self, client: KnownClient, warm: wire.Warm) -> Begin:
        return lambda: self._engines.prefetches.warm(client, warm)

    def change_level(self, client: KnownClient, change: wire.ChangeLevel) -> Begin:
        return lambda: self._engines.holdings.change_level(client, change)

    def make_copies(self, client: KnownClient, asked: wire.MakeCopies) -> Begin:
        return lambda: self._engines.holdings.make_copies(client, asked)

    def restart_check(self, client: KnownClient, _: wire.RestartCheck) -> Begin:
        return lambda: self._engines.restart_check(client)

    def record(self, client: KnownClient, record: wire.Record) -> dict[str, Any]:
        check_operator(client.uid, "record what engines look up")
        return self._engines.traffic.trace.read(record.after)

    # --- reports ------------------------------------------------------------------------------------

    def stats(self, _client: KnownClient, _: wire.Stats) -> Any:
        answer = self._report()
        return functools.partial(_of, answer) if isinstance(answer, asyncio.Future) else answer

    def explain(self, client: KnownClient, explain: wire.Explain) -> dict[str, Any]:
        return self._story(explain.task_id, explain.engine, client.engine_name)

    def why(self, client: KnownClient, why: wire.Why) -> list[dict[str, Any]]:
        may_ask = self._engines.holdings.open_to(client, why.engine)
        return self._engines.traffic.key(why.key, may_ask)

    def tasks(self, _client: KnownClient, tasks: wire.ListTasks) -> list[dict[str, Any]]:
        return self._listing.tasks(tasks.which, tasks.limit, tasks.engine)

    def clients(self, _client: KnownClient, clients: wire.ListClients) -> list[dict[str, Any]]:
        return self._listing.clients(clients.limit, clients.engine)


def _engine(client: KnownClient) -> HostedEngine:
    """The engine that a client speaks for; the server has checked that there is one."""
    assert client.engine is not None
    return client.engine


def _new_hold(client: KnownClient, what: str, body: wire.Pause | wire.Drain) -> tuple[str, str]:
    """The holder. Raises `too_many_requests` unless one more hold may be kept."""
    holder = _holder(client, body)
    if not _engine(client).dispatcher.gate.has_place(what, *holder):
        problem = f"{MOST_HOLDS} pauses and drains of this engine are held already; end one with resume"
        raise TransferError(problem, code="too_many_requests")
    return holder


async def _of(answer: asyncio.Future[Any]) -> Any:
    return await answer


def held_bytes(body: wire.ControlRequest) -> int:
    """Memory that a waiting request holds: that of its keys, or of its token ids."""
    path = getattr(body, "token_ids", None)
    return lookup.keys_bytes(getattr(body, "keys", None) or ()) + (0 if path is None else path.array.nbytes)


def _handle_data(offer: wire.Offer) -> dict[str, Any]:
    """Decode the data of an offer. Raises ProtocolError."""
    if (nbytes := len(memoryview(offer.data))) > MAX_HANDLE:
        raise ProtocolError(f"the handle has {nbytes} bytes, the limit is {MAX_HANDLE}", code="too_large")
    try:
        return _handle_decoder.decode(offer.data)
    except wire.UNREADABLE as error:
        raise ProtocolError(f"the handle's data must be a map: {error}", code="bad_value") from None


_handle_decoder = msgspec.msgpack.Decoder(dict[str, Any])


def _holder(client: KnownClient, body: wire.Pause | wire.Resume | wire.Drain) -> tuple[str, str]:
    """The holder of a pause, (name, proof): a client's own, which outlive its connection, or else the connection."""
    return (body.holder, f"said {body.proof}") if body.holder else (f"client {client.peer.decode()}", "connection")
