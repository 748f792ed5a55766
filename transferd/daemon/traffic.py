"""What engines look up and store, by key: why look-ups miss, what other sizes would do, and where a key has gone."""

from __future__ import annotations

import operator
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from transferd.blocks.formats import ObjectFormat
from transferd.daemon.coordinator import Coordinator
from transferd.observability.key_trace import KeyTrace
from transferd.observability.report import MISSED_FOR, LevelReport, WhatIfReport
from transferd.observability.what_if import WhatIf
from transferd.runtime.clock import Clock
from transferd.runtime.loop_turns import InPieces
from transferd.storage.admission import SecondUse
from transferd.storage.base import Storage
from transferd.storage.queues import STORED, EngineOwner, Noted
from transferd.tasks import Lane, Task, TaskResult

MINUTES = 60  # of misses that are remembered
GENERATIONS = 8  # earlier ones of an engine, in which its blocks are looked for
MOST_OTHERS = 32  # models, layouts and generations in which a block is looked for that its own has not
REMEMBERED = 8192  # events of each place
SIZES = (0.5, 1.0, 2.0, 4.0)  # of what a level has
NEVER, OTHER, OUT, REFUSED, INCOMPLETE = "never_stored", "other_identity", "level_out", "not_admitted", "incomplete"
assert {NEVER, OTHER, OUT, REFUSED, INCOMPLETE} < set(MISSED_FOR)


class Happened(NamedTuple):
    """One thing that happened to an object. at: monotonic seconds. before: how it was stored, if that is known."""

    at: float
    what: str
    whose: Hashable
    before: Happened | None

    @property
    def engine(self) -> str:
        """The name of the engine that caused it; "" for none."""
        return self.whose.engine if isinstance(self.whose, EngineOwner) else ""


class KeyHistory:
    """What last happened to stored objects: when each was stored and by whom, and when, why and for whom it left.

    Each backend, or level of storage, notes its own objects (Index.trace). The newest REMEMBERED to 2 * REMEMBERED of a
    place are kept. It is for people: an object that was found at start, or that nobody remembers, has no history.

    now: monotonic seconds.
    """

    def __init__(self, now: Callable[[], float], most: int = REMEMBERED) -> None:
        self._now, self._most = now, most
        self._places: dict[str, list[dict[str, Happened]]] = {}  # the newer half, and the older one

    def at(self, place: str) -> Noted:
        """What a place calls for each object. It costs less than a microsecond."""
        halves, now, most = self._places.setdefault(place, [{}, {}]), self._now, self._most

        def noted(name: str, what: str, whose: Hashable) -> None:
            newer = halves[0]
            before = None if what == STORED else newer.get(name) or halves[1].get(name)
            if before is not None and before.what != STORED:
                before = None
            newer[name] = Happened(now(), what, whose, before)
            if len(newer) > most:
                halves[:] = {}, newer

        return noted

    def of(self, name: str) -> dict[str, Happened]:
        """What happened to an object last, by place."""
        found = {place: newer.get(name) or older.get(name) for place, (newer, older) in self._places.items()}
        return {place: one for place, one in found.items() if one is not None}


class _Asked:
    """An engine that has looked something up, or stored it, the last one of its name.

    minutes: how many of its look-ups missed in each minute, by reason. generations: those in which it has looked.
    """

    core: Coordinator

    def __init__(self) -> None:
        self.minutes: deque[tuple[int, Counter[str]]] = deque(maxlen=MINUTES)
        self.generations: deque[str] = deque(maxlen=GENERATIONS)

    def served(self) -> list[str]:
        """The generations that the engine has served, the present one first."""
        return list(dict.fromkeys([self.core.dispatcher.generation, *self.generations]))


class KeyTraffic:
    """One for the daemon. An engine is its coordinator here, `core`.

    storage: that of blocks by keys, if any. trace: of look-ups, for those who record.

    admission: chooses which blocks engines store; None stores all.
    """

    def __init__(self, storage: Storage | None, clock: Clock, admission: SecondUse | None) -> None:
        self._storage, self.admission = storage, admission
        self._now = clock.monotonic
        self._what_if, self._following = WhatIf(clock.monotonic), InPieces()
        self._history = KeyHistory(clock.monotonic)
        self.trace = KeyTrace(clock.monotonic)
        self._asked: defaultdict[str, _Asked] = defaultdict(_Asked)  # by the engine's name
        if storage is not None:
            storage.index.trace(self._history.at, storage.backend)

    # --- what engines do ----------------------------------------------------------------------------

    def looked_up(self, core: Coordinator, keys: Sequence[str], missing: int | None) -> str:
        """Note a look-up of a chain of blocks. missing: the position of the first one that is not there.

        Returns why that one is missing: one of MISSED_FOR, or "" if none is.
        """
        self._following.run(self._what_if.looked_up(core.engine, keys, self._came(core)))
        self.trace.looked_up(core.engine, keys, core.workers[0].context.block_size)
        missed = self._asked[core.engine]
        if not missed.generations or missed.generations[-1] != core.dispatcher.generation:
            missed.generations.append(core.dispatcher.generation)
        if missing is None:
            return ""
        minute = int(self._now() // 60)
        if not missed.minutes or missed.minutes[-1][0] != minute:
            missed.minutes.append((minute, Counter()))
        why = self._why(core, keys[missing])
        missed.minutes[-1][1][why] += 1
        return why

    def ended(self, core: Coordinator, task: Task, result: TaskResult, *, asks: bool) -> None:
        """Note a task that was answered. asks: the engine looks up what it reads."""
        keys: Sequence[str] = getattr(task, "keys", ())
        if not keys or self._storage is None:
            return
        done = len(result.block_ids)
        if task.lane is Lane.WRITE and done:
            self._following.run(self._what_if.stored(core.engine, keys[:done], self._came(core)))
        elif task.lane is Lane.READ and result.error is None:
            missing = done if done < len(keys) else None
            why = "" if asks else self.looked_up(core, keys, missing)
            if missing is not None:
                why = why or self._why(core, keys[missing])
                (name,) = self._names(core, core.dispatcher.generation, keys[missing], 1)
                events = (one for one in self._story(name) if one["what"] == why)  # none for reasons of other kinds
                left = min(events, key=operator.itemgetter("ago_s"), default={})
                level, whose, ago_s = left.get("level"), left.get("engine"), left.get("ago_s")
                core.recorder.note(task.task_id, "missed", missing, why, level, whose, ago_s)

    def left(self, engine: str) -> None:
        self._following.run(self._what_if.left(engine))
        self._asked.pop(engine, None)

    def _came(self, core: Coordinator) -> int:
        """Bytes of a stored block of this engine, all ranks together."""
        self._asked[core.engine].core = core
        return core.workers[0].context.format.slot_bytes * len(core.workers)  # each task comes here: no call

    # --- why ----------------------------------------------------------------------------------------

    def _why(self, core: Coordinator, key: str) -> str:
        """Why a block is not there for an engine: one of MISSED_FOR."""
        names, out = self._names(core, core.dispatcher.generation, key), self._out()
        absent = [name for name in names if not self._there(name)]
        places = self._history.of(absent[0] if absent else names[0])
        left = [one.what for one in places.values() if one.what != STORED]
        if left and len(left) == len(places):
            return left[-1]
        if any(place in out for place in places):
            return OUT
        if places or len(absent) < len(names):
            return INCOMPLETE
        if any(self._history.of(other) or self._there(other) for other in self._elsewhere(core, key)):
            return OTHER
        if out:
            return OUT
        objects = _objects(core)
        named = objects.space, core.dispatcher.generation, objects.ids([key])[0]
        if self.admission is not None and self.admission.named(named):
            return REFUSED
        return NEVER

    def _names(self, core: Coordinator, generation: str, key: str, ranks: int | None = None) -> list[str]:
        """The first object of a block of this generation, of each rank, or of the first `ranks` ones."""
        objects, each = _objects(core), [worker.context.object_rank for worker in core.workers[:ranks]]
        ids, suffix = objects.ids([key]), objects.parts[0].suffix
        return [name + suffix for rank in each for name in objects.names(generation, ids, rank)]

    def _elsewhere(self, core: Coordinator, key: str) -> Iterator[str]:
        """The first rank's object of this key in other models, layouts and generations, MOST_OTHERS at most.

        Each look-up that misses asks this on the loop, and engines of one model would name the same objects.
        """
        seen = {(_objects(core).space, core.dispatcher.generation)}
        for other in self._asked.values():
            for generation in other.served():
                if (place := (_objects(other.core).space, generation)) not in seen:
                    seen.add(place)
                    yield self._names(other.core, generation, key, 1)[0]
                if len(seen) > MOST_OTHERS:
                    return

    def _there(self, name: str) -> bool:
        return any(self._places(name).values())

    def _places(self, name: str) -> dict[str, bool]:
        """For each level, whether it has an object, as far as that is known without asking anybody."""
        storage = self._storage
        if storage is None:
            return {}
        if storage.levels is not None:
            having = storage.levels.having(name)
            return {level: bool(having >> number & 1) for number, level in enumerate(storage.levels.names)}
        found = storage.index.find([name], None)
        return {} if found is None else {storage.backend: found[0]}

    def _out(self) -> Sequence[str]:
        return () if self._storage is None or self._storage.levels is None else self._storage.levels.out

    def key(self, key: str, engines: Collection[str]) -> list[dict[str, Any]]:
        """What is known of a block, a row for each of these engines and generation that may have stored it.

        {engine, generation, serves, ranks, there: {level: ranks}, history: [{level, what, engine, ago_s, stored_s,
        stored_by}]}; serves: the engine serves that generation now; history: of the first rank's object; stored_s: for
        how many seconds it had been stored when that happened.
        """
        rows = []
        for name, one in self._asked.items():
            served = one.served()
            for generation in served if name in engines else ():
                names = self._names(one.core, generation, key)
                there = Counter(level for object_ in names for level, has in self._places(object_).items() if has)
                row = {"engine": name, "generation": generation, "serves": generation == served[0]}
                row |= {"ranks": len(names), "there": dict(there), "history": list(self._story(names[0]))}
                rows.append(row)
        return [row for row in rows if row["there"] or row["history"]] or rows[:1]

    def _story(self, name: str) -> Iterator[dict[str, Any]]:
        for level, one in self._history.of(name).items():
            row: dict[str, Any] = {"level": level, "what": one.what, "engine": one.engine}
            row |= {"ago_s": self._now() - one.at, "stored_s": None, "stored_by": ""}
            if one.before is not None:
                row |= {"stored_s": one.at - one.before.at, "stored_by": one.before.engine}
            yield row

    # --- reports ------------------------------------------------------------------------------------

    def missed_for(self, engine: str) -> dict[str, int]:
        """Look-ups of the last hour that missed, by why their first missing block was not there."""
        first, total = int(self._now() // 60) - MINUTES, Counter[str]()
        for minute, counts in self._asked[engine].minutes if engine in self._asked else ():
            total.update(counts if minute > first else ())
        return dict(total)

    def what_if(self, levels: Sequence[LevelReport], engine: str | None = None) -> list[WhatIfReport]:
        """The share of hits that each level would have with other sizes. engine: only of its look-ups."""
        rows = []
        for level in levels:
            sizes = [int(times * level.capacity) for times in SIZES] if level.capacity else []
            shares = self._what_if.shares(sizes, engine)
            each = zip(SIZES, sizes, shares, strict=True) if shares and sizes else ()
            rows += [WhatIfReport(level.name, times, size, share) for times, size, share in each]
        return rows


def _objects(core: Coordinator) -> ObjectFormat:
    """The format of an engine's objects."""
    return core.workers[0].context.format
