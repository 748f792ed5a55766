"""A fleet on paper: a trace on several nodes behind a router, each with its own levels, and perhaps one pool of all.

Each node is the replay's engine before a predicted daemon (predicted.py), and computes one prompt after the other. The
first token of a request comes after it has waited for its node, loaded what the node or the pool has, and computed the
rest. Decoding is left out.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from rich.console import Console
from rich.table import Table

from transferd.cli.replay.engine import ReplayEngine, Tiers, key_of
from transferd.cli.replay.predicted import AtOnce, BlocksWithoutBytes, GivenLevel, NoBytes, PredictedDaemon, virtually
from transferd.cli.replay.report import ReplayReport
from transferd.cli.replay.sizing import BlockSizes, LevelSizes, Rates
from transferd.cli.replay.trace import TraceRequest
from transferd.storage.base import Item, Take
from transferd.storage.batch import Answer, StoreBatch, Write
from transferd.tasks import TRACE_BLOCK_TOKENS

ROUTERS = ("prefix", "load", "random")
EVENTS = ("dead", "upgrade", "drain")
COMMON = 0.01  # blocks that so many of all requests have are common to all populations: system prompts
APART_MS = 3000.0  # the most by which the requests of two populations differ in time
WINDOW_S = 10.0  # a peak is a mean over so long


@dataclass(frozen=True, slots=True)
class FleetCosts:
    """What adds up in a fleet, as `python -m benchmarks.fleet_costs` measures it; a look-up: docs/measurements.md."""

    index_bytes: float = 230.0  # of a daemon's memory, for an object that it knows
    lookup_s: float = 2e-6  # of its event loop, for a key of a look-up
    event_s: float = 1.5e-7  # of the core of who follows KV events, for a block that was stored or has left
    master_bytes: float = 880.0  # of the memory of the pool's master, for an object
    master_s: float = 5.5e-6  # of the master's CPU, for an object that is stored, loaded or looked up


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is predicted.

    event: "" for a calm time; "dead": half-way, a node ends for ever; "upgrade": in the middle third each node restarts
    once; "drain": the same, but what a node lends to the pool goes to the others first.
    copies: populations of users. away_s: how long a node that restarts takes no requests.
    """

    nodes: int
    router: str
    event: str = ""
    copies: int = 1
    away_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FleetPoint:
    """What a fleet would do for the trace. Sizes, bytes and objects are those of all ranks."""

    fleet: Fleet
    requests: int
    truncated: int  # longer than a node's device
    hit_rate: dict[str, float]  # by place; "computed": nowhere
    ttft_s: dict[str, float]
    busy: dict[str, float]  # the share of the time in which a node loads or computes
    network_bytes: int  # between nodes
    network_peak: float  # bytes a second, for each node
    disk_bytes: int  # written
    pool_bytes: int  # the most at any time
    lost_bytes: int  # of the pool, with the nodes that left
    walls: dict[str, dict[str, float]]  # for what adds up: how much, and its share of what there is

    @property
    def hits(self) -> float:
        return 1.0 - self.hit_rate["computed"]


class FleetPool(NoBytes):
    """A level of all nodes, and the node in whose memory each object lies: its writer's, if that has room.

    each: objects for which a node lends memory; None for a bucket, which is on no node.
    """

    def __init__(self, capacity: int, now: Callable[[], float], each: int | None) -> None:
        super().__init__(capacity, now, known=False)
        self.node = 0  # the one whose task runs
        self.moved = self.loaded = self.asked = 0  # objects: between nodes, by loads, by look-ups
        self._each = each
        self._room: Counter[int] = Counter()
        self._holders: dict[str, int | None] = {}

    def leading(self, chain: Sequence[int]) -> int:
        """How many leading blocks it has."""
        return next((i for i, content in enumerate(chain) if key_of(content) not in self._index), len(chain))

    async def exists(self, names: Sequence[str]) -> list[bool]:
        self.asked += len(names)
        return await super().exists(names)

    def join_in(self, node: int) -> None:
        if self._each is not None:
            self._room[node] = self._each
            self.set_capacity(self._each * len(self._room))

    def leave(self, node: int, *, drained: bool) -> int:
        """A node takes its memory away. Returns how many objects are lost. drained: the others have taken them."""
        if self._each is None:
            return 0
        self.node = node
        names = [name for name, holder in self._holders.items() if holder == node]
        del self._room[node]
        for name in names:
            if drained and self._room:
                self._place(name)
            elif self._index.forget(name):
                del self._holders[name]
        self.set_capacity(self._each * len(self._room))
        return 0 if drained and self._room else len(names)

    def _place(self, name: str) -> None:
        holder = None
        if self._each is not None:
            holder = self.node if self._room[self.node] > 0 else max(self._room, key=self._room.__getitem__)
            self._room[holder] -= 1
        self._holders[name] = holder
        self.moved += holder != self.node

    def _write_one(self, batch: StoreBatch, write: Write) -> None:
        for victim in write.victims:
            self._remove(victim.name)
        super()._write_one(batch, write)
        self._place(write.item.name)

    def _read(self, item: Item, slot: memoryview, take: Take | None) -> Answer:
        self.moved += self._holders[item.name] != self.node
        self.loaded += 1
        return super()._read(item, slot, take)

    def _remove(self, name: str) -> None:
        holder = self._holders.pop(name, None)
        if holder is not None and holder in self._room:
            self._room[holder] += 1


class FleetNode:
    """One node: an engine before a daemon, and how much of its time is taken."""

    def __init__(self, number: int, engine: ReplayEngine, daemon: PredictedDaemon, report: ReplayReport) -> None:
        self.number, self.engine, self.daemon, self.report = number, engine, daemon, report
        self.free_at = self.busy_s = 0.0
        self.away_until = 0.0
        self.looked_up: Counter[int] = Counter()  # blocks, by window

    def leading(self, chain: Sequence[int]) -> int:
        """How many leading blocks the node itself has."""
        own = [medium for medium in self.daemon.media if medium.known]
        for i, content in enumerate(chain):
            name = [key_of(content)]
            if not self.engine.on_device(content) and not any(medium.find(name, None) == [True] for medium in own):
                return i
        return len(chain)


class FleetRun:
    """One prediction."""

    def __init__(self, requests: Sequence[TraceRequest], sizes: BlockSizes, rates: Rates, fleet: Fleet) -> None:
        assert rates.prefill is not None
        self.sizes, self.rates, self.fleet = sizes, rates, fleet
        self.token_s = TRACE_BLOCK_TOKENS / rates.prefill  # to compute a block
        self.requests = times(requests, fleet.copies)
        self.chance = random.Random(0)
        self.nodes: list[FleetNode] = []  # that take requests
        self.gone: list[FleetNode] = []
        self.disks: list[tuple[NoBytes, LevelSizes]] = []
        self.pool: FleetPool | None = None
        self.pool_s = 0.0  # to load a block from it
        self.blocks: Counter[str] = Counter()  # by place
        self.first_token_s: list[float] = []
        self.network: Counter[int] = Counter()  # objects, by window
        self.lost = 0

    async def play(self) -> None:
        distinct = len({content for request in self.requests for content in request.hash_ids})
        now = self.requests[0].timestamp / 1000
        for level, rate in zip(self.sizes.levels, self.rates.storage, strict=True):
            if level.lent is not None:
                each = level.lent // level.stored or None
                self.pool, self.pool_s = FleetPool(0 if each else distinct, lambda: 0.0, each), level.stored / rate
        for number in range(self.fleet.nodes):
            self.nodes.append(await self.started(number))
        events = self.events()
        for request in self.requests:
            now = request.timestamp / 1000
            while events and events[0][0] <= now:
                await self.happen(*events.pop(0))
            chain = list(dict.fromkeys(request.hash_ids))[: self.sizes.device_blocks]
            await self.serve(self.choose(chain, now), request, chain, now)

    async def started(self, number: int, before: FleetNode | None = None) -> FleetNode:
        """A node that begins, with the disks that it had before."""
        media: list[NoBytes | None] = []
        given = []
        for i, level in enumerate(self.sizes.levels):
            on_disk = level.reserve is not None and before is not None
            media.append(self.pool if level.lent is not None else before.daemon.media[i] if on_disk else None)  # type: ignore[union-attr]
            given.append(GivenLevel((level.capacity or 0) // level.stored, level.promote, level.known))
        daemon, report = PredictedDaemon(given, self.sizes.window_s, media), ReplayReport()
        await daemon.storage.open()
        if before is None:
            self.disks += [
                (medium, level)
                for medium, level in zip(daemon.media, self.sizes.levels, strict=True)
                if level.reserve is not None
            ]
        if self.pool is not None:
            self.pool.join_in(number)
        tiers = Tiers(self.sizes.device_blocks, self.sizes.host_pool // self.sizes.host, storage=True)
        return FleetNode(number, ReplayEngine(daemon, BlocksWithoutBytes(), tiers, report, AtOnce()), daemon, report)

    def events(self) -> list[tuple[float, int, str]]:
        """When what happens to which node."""
        start, end = (self.requests[i].timestamp / 1000 for i in (0, -1))
        if not self.fleet.event:
            return []
        if self.fleet.event == "dead":
            return [((start + end) / 2, 0, "dead")]
        step = (end - start) / 3 / self.fleet.nodes
        return [((2 * start + end) / 3 + step * k, k, self.fleet.event) for k in range(self.fleet.nodes)]

    async def happen(self, at: float, number: int, what: str) -> None:
        old = next(node for node in self.nodes if node.number == number)
        if self.pool is not None:
            moved = self.pool.moved
            self.lost += self.pool.leave(number, drained=what == "drain")
            self.network[int(at // WINDOW_S)] += self.pool.moved - moved
        self.nodes.remove(old)
        self.gone.append(old)
        if what != "dead":
            new = await self.started(number, old)
            new.away_until = at + self.fleet.away_s
            new.free_at = max(old.free_at, new.away_until)
            self.nodes.append(new)

    def choose(self, chain: Sequence[int], now: float) -> FleetNode:
        nodes = [node for node in self.nodes if node.away_until <= now] or self.nodes
        if self.fleet.router == "random":
            return self.chance.choice(nodes)
        if self.fleet.router == "load":
            return min(nodes, key=lambda node: (max(node.free_at, now), self.chance.random()))
        pooled = 0 if self.pool is None else self.pool.leading(chain)

        def first_token_s(node: FleetNode) -> float:
            own = node.leading(chain)
            computed = len(chain) - max(own, pooled)
            return max(0.0, node.free_at - now) + computed * self.token_s + max(0, pooled - own) * self.pool_s

        return min(nodes, key=lambda node: (first_token_s(node), self.chance.random()))

    async def serve(self, node: FleetNode, request: TraceRequest, chain: Sequence[int], now: float) -> None:
        window, pool = int(now // WINDOW_S), self.pool
        node.daemon.now = now
        if pool is not None:
            pool.node = node.number
        moved = 0 if pool is None else pool.moved
        tiers, levels = node.report.hits.copy(), node.daemon.hits.copy()
        await node.engine.request(request)
        tiers, levels = node.report.hits - tiers, node.daemon.hits - levels
        places = {"device": tiers["device"], "host": tiers["host"]}
        took = tiers["none"] * self.token_s + tiers["host"] * self.sizes.host / self.rates.host
        for number, (level, rate) in enumerate(zip(self.sizes.levels, self.rates.storage, strict=True)):
            places[level.name] = levels[number]
            took += levels[number] * level.stored / rate
        self.blocks.update(places | {"computed": tiers["none"]})
        node.free_at = max(now, node.free_at) + took
        node.busy_s += took
        node.looked_up[window] += len(chain) - tiers["device"]
        self.first_token_s.append(node.free_at - now)
        if pool is not None:
            self.network[window] += pool.moved - moved

    def point(self, costs: FleetCosts) -> FleetPoint:
        total, nodes = self.blocks.total() or 1, [*self.nodes, *self.gone]
        seconds = max(1.0, (self.requests[-1].timestamp - self.requests[0].timestamp) / 1000)
        busy: Counter[int] = Counter()
        for node in nodes:
            busy[node.number] += node.busy_s  # type: ignore[assignment]
        stored = next((level.stored for level in self.sizes.levels if level.lent is not None), 0)
        ordered = sorted(self.first_token_s)
        return FleetPoint(
            fleet=self.fleet,
            requests=len(self.requests),
            truncated=sum(node.report.truncated for node in nodes),
            hit_rate={place: count / total for place, count in self.blocks.items()},
            ttft_s={f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 90, 99)},
            busy={"mean": sum(busy.values()) / self.fleet.nodes / seconds, "max": max(busy.values()) / seconds},
            network_bytes=self.network.total() * stored,
            network_peak=max(self.network.values(), default=0) * stored / WINDOW_S / self.fleet.nodes,
            disk_bytes=sum(medium.statistics()["stored"] * level.stored for medium, level in self.disks),
            pool_bytes=self.pool.most * stored if self.pool is not None else 0,
            lost_bytes=self.lost * stored,
            walls=self.walls(costs, nodes, seconds),
        )

    def walls(self, costs: FleetCosts, nodes: Sequence[FleetNode], seconds: float) -> dict[str, dict[str, float]]:
        """Amounts are those of all ranks. A share is of one core, or of the memory that one node gives to the store."""
        keys, each = self.sizes.keys, self.sizes.keys * self.sizes.ranks  # objects of a block
        known, most = 0, 0.0
        for node in nodes:
            both = zip(node.daemon.figures(), self.sizes.levels, strict=True)
            known = max(known, sum(one.most for one, level in both if level.known))
            most = max(most, *node.looked_up.values(), 0)
        memory = sum(level.lent or level.capacity or 0 for level in self.sizes.levels if level.reserve is None)
        firsts = {id(medium): medium.statistics() for node in nodes for medium in node.daemon.media[:1]}.values()
        changed = sum(2 * one["stored"] - one["objects"] for one in firsts)
        walls = {
            "index memory": _wall(known * each * costs.index_bytes, memory),
            "look-ups": _wall(most / WINDOW_S * each, costs.lookup_s and 1 / costs.lookup_s),
            "events": _wall(changed * keys / seconds, costs.event_s and 1 / costs.event_s),
        }
        if self.pool is not None and any(level.lent for level in self.sizes.levels):
            calls = (self.pool.statistics()["stored"] + self.pool.loaded + self.pool.asked) * each / seconds
            walls["master's memory"] = _wall(self.pool.most * each * costs.master_bytes, memory)
            walls["master's calls"] = _wall(calls, costs.master_s and 1 / costs.master_s)
        return walls


def _wall(amount: float, most: float) -> dict[str, float]:
    return {"amount": amount, "share": amount / most if most else 0.0}


def fleet_point(
    requests: Sequence[TraceRequest], sizes: BlockSizes, rates: Rates, costs: FleetCosts, fleet: Fleet
) -> FleetPoint:
    """Predict one fleet. Each level of `sizes` has its capacity on a node, or what a node lends to it."""
    run = FleetRun(requests, sizes, rates, fleet)
    virtually(run.play())
    return run.point(costs)


def times(requests: Sequence[TraceRequest], copies: int) -> list[TraceRequest]:
    """So many populations of users with the same habits, at about the same times. What many requests have is common."""
    if copies == 1:
        return list(requests)
    often = Counter(content for request in requests for content in request.hash_ids)
    common = {content for content, count in often.items() if count >= COMMON * len(requests)}
    above, chance = max(often) + 1, random.Random(0)
    all_requests = [
        TraceRequest(
            hash_ids=tuple(one if one in common else one + copy * above for one in request.hash_ids),
            timestamp=request.timestamp + (chance.uniform(0, APART_MS) if copy else 0),
            input_length=request.input_length,
            output_length=request.output_length,
        )
        for copy in range(copies)
        for request in requests
    ]
    return sorted(all_requests, key=lambda request: request.timestamp)


def tree(points: Sequence[FleetPoint], rates: Rates, costs: FleetCosts) -> dict[str, Any]:
    """The result as plain data."""
    return {"rates": asdict(rates), "costs": asdict(costs), "points": [asdict(point) for point in points]}


def print_points(points: Sequence[FleetPoint], console: Console) -> None:
    """Print the result as text."""
    table = Table(title="where blocks come from, and the seconds until the first token")
    places = list(points[0].hit_rate)
    columns = ["nodes", "router", "event", *places, "p50", "p90", "p99", "busy", "busiest"]
    for column in [*columns, "network TB", "Gbit/s a node", "disks TB", "pool TB", "lost TB"]:
        table.add_column(column, justify="right")
    for point in points:
        sizes = (point.disk_bytes, point.pool_bytes, point.lost_bytes)
        table.add_row(
            *(str(point.fleet.nodes), point.fleet.router, point.fleet.event or "none"),
            *(f"{point.hit_rate[place]:.1%}" for place in places),
            *(f"{seconds:.2f}" for seconds in point.ttft_s.values()),
            *(f"{share:.0%}" for share in point.busy.values()),
            *(f"{point.network_bytes / 1e12:.3g}", f"{point.network_peak * 8 / 1e9:.3g}"),
            *(f"{nbytes / 1e12:.3g}" for nbytes in sizes),
        )
    console.print(table)
    walls = Table(title="what adds up: the amount, and its share of one core, or of the memory one node gives")
    for column in ("nodes", "router", *points[0].walls, "the first wall"):
        walls.add_column(column, justify="right")
    for point in points:
        if not point.fleet.event:
            cells = [f"{one['amount']:.3g} ({one['share']:.1%})" for one in point.walls.values()]
            first = max(point.walls, key=lambda name: point.walls[name]["share"])
            walls.add_row(str(point.fleet.nodes), point.fleet.router, *cells, first)
    console.print(walls)
    if points[0].truncated:
        console.print(f"{points[0].truncated:,} requests are longer than a device; only what fits there was counted")


def costs_from(text: str) -> FleetCosts:
    """From `lookup_s=2e-6,…`. Raises ValueError."""
    named = dict(part.split("=", 1) for part in text.split(",") if part.strip())
    known = {field.name for field in fields(FleetCosts)}
    if unknown := named.keys() - known:
        raise ValueError(f"no such cost: {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    return FleetCosts(**{name.strip(): float(value) for name, value in named.items()})
