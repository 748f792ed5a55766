"""The objects of engines in storage: shares, pins, purges, changes of levels, and the right to each of these.

A purge changes what engines will find, so it needs a right: a client that belongs to an engine, or runs as the user who
registered it, may purge its objects; the daemon's user and root may purge all objects. The engine of [cache] is the
daemon's user's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from transferd.config import Config
from transferd.daemon.belonging import check_operator, is_operator
from transferd.daemon.clients import KnownClient
from transferd.daemon.engine import HostedEngine
from transferd.daemon.lookup import PIECE, exists, needed, object_names
from transferd.errors import RequestError, TransferError
from transferd.observability.report import HoldingReport
from transferd.storage.base import Storage
from transferd.storage.keeping import AT_ONCE, Keeper, PinState
from transferd.storage.orders import By
from transferd.storage.queues import EngineOwner
from transferd.storage.selection import Selection, check_shared
from transferd.wire import protocol as wire
from transferd.wire.answers import AtRestart, BlockPlaces, Leased, Purged, StoreDirectory


class LeaseOwner(NamedTuple):
    """The owner of an engine's leases: they end with the daemon, so no disk has to know them."""

    owner: EngineOwner


class Holdings:
    """See the module. Borrows the storage."""

    def __init__(self, config: Config, storage: Storage | None) -> None:
        self._storage = storage
        self._backend = config.storage.title
        self._stop_copies_s = config.storage.drain_at_stop
        self._most_share = config.engines.storage_share
        self._pin_share = config.engines.pin_share
        self._by_schema = config.storage.key_schema == "transferd"
        self._engines: dict[EngineOwner, HostedEngine] = {}  # those that are there

    @property
    def _own_keeper(self) -> Keeper | None:
        return None if self._storage is None else self._storage.keeper

    @property
    def _keeper(self) -> Keeper:
        """The storage's keeper. Raises RequestError if there is none."""
        if (keeper := needed(self._storage).keeper) is None:
            what = f"the {self._backend} backend does not know its own objects, so it cannot purge, pin or keep shares"
            raise RequestError(f"{what}; use its own tools, or a new generation", code="backend_cannot")
        return keeper

    # --- shares -------------------------------------------------------------------------------------

    @property
    def left_over(self) -> float:
        """The part of the store that is free: not kept for an engine that is there."""
        return max(0.0, 1.0 - sum(engine.storage_share for engine in self._engines.values()))

    def share_of(self, asked: float | None) -> float:
        """The share of the store for an engine that registers. Raises RequestError, code `share_exceeded`.

        asked: the share that the engine requests; None for the free part, as configured.
        """
        left = self.left_over
        if asked is None:
            return min(self._most_share, left)
        if asked > self._most_share or asked > left + 1e-9:
            bound = f"one engine may have {self._most_share:g} (engines.storage_share), and {left:g} are left"
            raise RequestError(f"a share of {asked:g} of the store: {bound}", code="share_exceeded")
        if asked:
            self._keeper  # noqa: B018 - it raises
        return asked

    def came(self, engine: HostedEngine) -> None:
        """Note that an engine has come. Call it once storage is open."""
        self._engines[engine.owner] = engine
        engine.cache.renamed = functools.partial(self.renamed, engine)
        if (keeper := self._own_keeper) is not None:
            keeper.claim(engine.owner, engine.objects.space, engine.storage_share)

    def renamed(self, engine: HostedEngine, before: str) -> None:
        """Note that the engine serves another generation. Blocks that no engine can find any more are evicted first."""
        keeper, objects = self._own_keeper, engine.objects
        served = {(one.objects.space, one.coordinator.generation) for one in self._engines.values()}
        if keeper is not None and (objects.space, before) not in served:
            keeper.retire(lambda name: objects.id_of(before, name) is not None)

    def left(self, engine: HostedEngine) -> None:
        """Note that the engine is gone, unless its user has registered the next one of its name meanwhile."""
        if self._engines.get(engine.owner) is engine:
            del self._engines[engine.owner]
            if (keeper := self._own_keeper) is not None:
                keeper.leave(engine.owner)

    def report(self, level: str = "") -> list[HoldingReport]:
        """The objects of each engine in storage, and those without an owner, the most bytes first. level: in one."""
        keeper = self._own_keeper
        keeper = keeper.of_level(level) if keeper and level else keeper
        found = [] if keeper is None else [one for one in keeper.holdings() if one.objects or one.bytes or one.share]
        rows = []
        for one in sorted(found, key=lambda one: -one.bytes):
            owner = one.owner if isinstance(one.owner, EngineOwner) else EngineOwner("")
            evicted = Counter[str]()
            for by, number in one.evicted.items():
                evicted[by.engine if isinstance(by, EngineOwner) and by in self._engines else ""] += number
            figures = (one.objects, one.bytes, one.share, one.pinned, dict(evicted))
            rows.append(HoldingReport(owner.engine, owner.uid, owner in self._engines, *figures))
        return rows

    # --- pins ---------------------------------------------------------------------------------------

    async def pin(self, engine: HostedEngine, asked: wire.Pin) -> int | dict[str, Any]:
        """Pin those blocks that every rank has."""
        keeper, blocks = self._keeper, await object_names(engine, asked.keys)
        whole, depths = list[list[str]](), list[int | None]()
        async for piece in engine.shared.pieces.each(blocks, PIECE):
            for names in piece:
                if None not in (found := keeper.depths(names)):
                    whole.append(names)
                    depths.append(found[0])
        held = await keeper.pin(engine.owner, [name for names in whole for name in names], asked.ttl, self._pin_share)
        states, each = iter(held), list[PinState]()
        async for piece in engine.shared.pieces.each(whole, PIECE):
            each += [min((next(states) for _ in names), default=PinState.NOT) for names in piece]
        pinned = sum(state >= PinState.PINNED for state in each)
        if not asked.detail:
            return pinned
        return {"pinned": pinned, "durable": each.count(PinState.DURABLE), "reachable": _reachable(depths)}

    async def lease(self, uid: int | None, engine: HostedEngine, asked: wire.Exists) -> Leased:
        """Look up, and keep what is there, for a client of the user `uid`. Raises RequestError, StorageError."""
        generation = engine.dispatcher.generation
        blocks = await object_names(engine, asked.keys, generation)
        names, owner = [name for names in blocks for name in names], LeaseOwner(engine.owner)
        with contextlib.suppress(RequestError):  # then the rest is not kept from being evicted
            async for piece in engine.shared.pieces.each(names, min(PIECE, AT_ONCE)):
                await self._keeper.hold(owner, piece, asked.lease, self._pin_share)
        there = await exists(engine, asked.keys, use=asked.use)  # last: what was evicted before is not found
        same = generation == engine.dispatcher.generation
        tells = same and uid == os.geteuid() and len(engine.workers) == 1 and self._by_schema
        return Leased(there, await self._places(engine, generation, names) if tells else None)

    async def _places(self, engine: HostedEngine, generation: str, names: Sequence[str]) -> BlockPlaces:
        """Where the objects of an engine of one rank lie."""
        assert self._storage is not None
        found = list[StoreDirectory | None]()
        async for piece in engine.shared.pieces.each(names, PIECE):
            found += map(self._storage.index.place_of, piece)
        numbers = {place: number for number, place in enumerate(dict.fromkeys(one for one in found if one is not None))}
        where = [None if place is None else numbers[place] for place in found]
        about = engine.identity.model, engine.identity.fingerprint, generation
        return BlockPlaces(*about, engine.workers[0].context.object_rank, list(numbers), where)

    async def unpin(self, engine: HostedEngine, asked: wire.Unpin) -> None:
        keeper, blocks = self._keeper, None if asked.keys is None else await object_names(engine, asked.keys)
        names = None if blocks is None else [name for names in blocks for name in names]
        await keeper.unpin(engine.owner, names)
        if names is None:
            await keeper.unpin(LeaseOwner(engine.owner), None)
            return
        async for piece in engine.shared.pieces.each(names, PIECE):
            await keeper.unpin(LeaseOwner(engine.owner), piece)

    # --- purges -------------------------------------------------------------------------------------

    async def purge(self, client: KnownClient, asked: wire.Purge) -> dict[str, Any]:
        """Purge the objects that the client requests and has a right to. Raises RequestError, StorageError."""
        if not asked.shared:
            _ = self._keeper  # raises if there is none
        else:
            check_operator(client.uid, "purge for all nodes what they share (`shared`)")
        if not self._by_schema and (asked.model is not None or (asked.generation is not None and asked.keys is None)):
            what = 'names of FastDeploy\'s schema say neither model nor generation (storage.key_schema = "fastdeploy")'
            raise RequestError(f"{what}: purge by keys, engine or age", code="bad_value")
        owners = self._owners(client, asked.engine)
        names = None
        if asked.keys is not None:
            blocks = await object_names(self._named(client, asked.engine), asked.keys, asked.generation)
            names = frozenset(name for names in blocks for name in names)
        generation = asked.generation if names is None else None
        total, by = Purged(), _by(client, asked.engine)
        for owner in [None] if owners is None else owners:
            selection = Selection(names, owner, asked.model, generation, asked.older_than)
            total += await self._purged(selection, asked, by)
        if not asked.detail:
            return {"objects": total.objects, "bytes": total.bytes}
        return msgspec.structs.asdict(total) | {"complete": total.complete}

    async def _purged(self, selection: Selection, asked: wire.Purge, by: By) -> Purged:
        """Purge what fits: here, and for all nodes if that is wanted."""
        keeper, storage = self._own_keeper, self._storage
        if not asked.shared or storage is None:
            return await self._keeper.purge(selection, dry_run=asked.dry_run, by=by)
        if not storage.shared:  # before anything has gone
            what = f"the {self._backend} backend shares no objects with other nodes"
            raise RequestError(f"{what}: a purge without `shared` reaches all of them", code="backend_cannot")
        check_shared(selection)
        if selection.owner is not None:
            space = None if keeper is None else keeper.space_of(selection.owner)
            if space is None:
                what = "nobody here knows which of the objects in a bucket or pool this engine has stored"
                raise RequestError(f"{what}: purge by keys or by model", code="bad_value")
            selection = dataclasses.replace(selection, space=space)
        here = Purged() if keeper is None else await keeper.purge(selection, dry_run=asked.dry_run, by=by)
        return msgspec.structs.replace(here, shared=[]) + await storage.purge_shared(selection, dry_run=asked.dry_run)

    async def change_level(self, client: KnownClient, asked: wire.ChangeLevel) -> dict[str, str | int]:
        """Take a level out, or put it back: it changes what all engines find. Raises RequestError."""
        check_operator(client.uid, "change the levels of storage")
        levels = needed(self._storage).levels
        if levels is None:
            how = "taken out" if asked.leaves else "put back"
            what = f"the store is {self._backend} alone, so no level {asked.level[:80]!r} can be {how}"
            raise RequestError(f"{what} (storage.levels)", code="unknown_level")
        return msgspec.structs.asdict(await levels.change(asked.level, leaves=asked.leaves))

    async def restart_check(self, client: KnownClient, would_not_start: Callable[[], Awaitable[str]]) -> dict[str, Any]:
        """An AtRestart as plain data. It asks every level, so it needs a right. Raises RequestError."""
        check_operator(client.uid, "ask what a restart loses")
        objects, nbytes, unknown = 0, 0, ""
        try:
            if self._storage is not None:
                objects, nbytes = await self._storage.only_here()
        except TransferError as error:
            unknown = str(error)
        lost = AtRestart(objects, nbytes, unknown, self._stop_copies_s, await would_not_start())
        return msgspec.structs.asdict(lost)

    async def make_copies(self, client: KnownClient, asked: wire.MakeCopies) -> dict[str, str | int]:
        """Make copies in other nodes of a pool. It needs a right, because the copies take other nodes' room."""
        check_operator(client.uid, "have a pool's objects copied")
        pool = needed(self._storage).pool
        if pool is None:
            what = f"the {self._backend} backend has no copies on other nodes (those of a Mooncake pool do)"
            raise RequestError(what, code="backend_cannot")
        return msgspec.structs.asdict(await pool.make_copies(leaves=asked.leaves))

    def _owners(self, client: KnownClient, engine: str) -> list[EngineOwner] | None:
        """The owners of the objects that the client means; None for all owners. Raises RequestError."""
        uid = client.uid
        if engine:
            known = [*self._engines, *(one.owner for one in self._keeper.holdings())]
            named = (one for one in known if isinstance(one, EngineOwner) and one.engine == engine)
            owners = list(dict.fromkeys(named))  # an engine that is there, and earlier ones that have left objects
            if not owners:
                raise RequestError(f"no engine {engine!r} is registered, or has anything stored", code="unknown_engine")
        elif is_operator(uid):
            return None
        elif client.engine is None:
            raise RequestError(_refusal("all engines", None, uid), code="not_yours")
        else:
            owners = [client.engine.owner]
        mine = [owner for owner in owners if self._has_right(client, owner)]
        if not mine:
            whose = f"the engine {owners[0].engine!r}"
            raise RequestError(_refusal(whose, owners[0].uid, uid), code="not_yours")
        return mine

    def open_to(self, client: KnownClient, engine: str = "") -> list[str]:
        """The engines, or the one of this name, whose stored blocks this client may ask for. Raises RequestError."""
        owners = [owner for owner in self._engines if engine in ("", owner.engine)]
        mine = [owner.engine for owner in owners if self._has_right(client, owner)]
        if owners and not mine:
            what = "only the engine's user, the daemon's user and root may ask what it has stored"
            raise RequestError(what, code="not_yours")
        return mine

    def _has_right(self, client: KnownClient, owner: EngineOwner) -> bool:
        engine, uid = client.engine, client.uid
        of_it = engine is not None and client.belongs and engine.owner == owner and engine.registration is not None
        return is_operator(uid) or of_it or (owner.uid is not None and owner.uid == uid)

    def _named(self, client: KnownClient, engine: str) -> HostedEngine:
        """The engine that the client's keys belong to."""
        there = (one for owner, one in self._engines.items() if owner.engine == engine)
        named = next(there, None) if engine else client.engine
        if named is None:
            what = f"no engine {engine!r} is registered" if engine else "keys are those of an engine: name it"
            raise RequestError(f"{what}; only a registered engine's keys have names", code="unknown_engine")
        return named


def _by(client: KnownClient, engine: str) -> By:
    return By(*client.who, engine or ("" if client.engine is None else client.engine.owner.engine))


def _reachable(depths: Sequence[int | None]) -> int:
    """How many of the blocks at these depths have all blocks before them among them."""
    there = set(depths)
    root = next(depth for depth in itertools.count() if depth not in there)
    return sum(depth is not None and depth < root for depth in depths)


def _refusal(whose: str, owner: int | None, uid: int | None) -> str:
    who = "this client has no user that the daemon knows" if uid is None else f"you are user {uid}"
    may = "the daemon's user and root may" if owner is None else f"user {owner}, the daemon's user and root may"
    return f"only {may} purge what {whose} stored, and {who}"
