"""What a store of all features promises (store_world.py). The judge believes the media, never the catalogue.

bytes       a load never delivers others than those of its key
promise     `ok` of a hand-over or of a level that is `through`: that level had the block within the task
buffers     a store to a healthy first level does not expire, whatever lower levels do; all staging comes back, and
            nothing is damaged that no medium or link has spoilt
kept        while a disk works, a store goes well; and what lies on a disk that works is read, also if a purge comes
            while it is read
lost        what only a failed disk has is not there, and its departure was reported
purge       what was purged, and not stored since, is never read, and lies on no medium that the purge reached
drain       as many objects are only in a drained level as it says
shared      this node never deletes a good object of the bucket
rest        when all is well, what a store says that it has is what lies on its media, what has left was reported,
            and each level has what the levels above it have, as far as there is room; a purge leaves nothing
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextvars import Context
from typing import Any

from tests.support.simulation.bucket import SimBucket
from tests.support.simulation.medium import Medium
from transferd.daemon.daemon import Daemon
from transferd.storage.base import Storage
from transferd.storage.levels.stack import LevelsStorage

NOTICED_S = 0.1  # what has left a disk before that is in no answer
COPIED_S = 45.0  # after a purge no copy that was asked for before it is still to be made
PUSHY_S, MOST_REFUSED = 10.0, 60  # a bucket that refuses is written to so often within so long, at most


class Reading:
    """A read that runs. kept: of each key, the promise about it at its begin. begun: what it read when a purge came.

    starved: whether at its end, or as disks stopped hanging, its engine had no slot left for reads, or one of its keys
    lay on such a disk.
    """

    def __init__(self, keys: Sequence[str], engine: str, judge: Judge) -> None:
        self.keys, self.engine, self.starved = keys, engine, False
        self.kept = {key: judge.kept[key] for key in keys if key in judge.kept}
        self.begun: dict[str, dict[Medium, int]] = {}
        self.own = {key for key in keys if not judge.reads(key)}  # others' reads do not show when it begins


class Judge:
    """One seed's. names: of the objects, by key. durable: keys whose pin a restart leaves, and until when.

    kept: keys that were stored, on which media, and how often these had died then. present: names of objects that were
    stored and have not left, as the store tells who asks for departures. spoils: whether bytes were ever spoilt.
    """

    names: dict[str, str]
    media: list[Medium]
    unlisted: list[Medium]  # those that were not well when this life began, and have not served since
    bucket: SimBucket
    drained: set[str]
    using: set[str]  # levels that are being put back
    through: bool
    storage: Storage
    context: Context  # of the daemon's process
    shape: str
    daemon: Daemon
    durable: dict[str, float]
    objects: dict[str, int]
    kept: dict[str, dict[Medium, int]]
    reading: list[Reading]
    storing: Counter[str]  # how many stores of a key run
    present: set[str]
    spoils: bool
    rotten: set[str]
    started: dict[str, float]  # when the latest store of a key began
    own: dict[str, float]  # and the latest that went well
    found_at: float
    came: set[str]  # keys that this life has found on its media: each belongs to whichever engine used it first
    pinned: set[str]  # keys that were ever pinned
    purged_at: dict[str, float]
    gone: tuple[int, float]  # copies that were not made because memory had lost the object, and when that was judged

    @property
    def levels(self) -> list[str]:
        return [name for kind, name in (("m", "memory"), ("d", "file"), ("b", "object")) if kind in self.shape]

    def where(self, level: str) -> set[str]:
        """The keys of objects that a level's medium has now."""
        if level == "object":
            return {key for key, name in self.names.items() if name in self.bucket.objects}
        if level == "file":
            return {
                key for key, name in self.names.items() if any(one.has(name) and not one.away for one in self.media)
            }
        storage = self.storage.all_levels[0].storage if isinstance(self.storage, LevelsStorage) else self.storage
        return {key for key, name in self.names.items() if storage.index.find([name], None) == [True]}

    def shown(self, level: str) -> set[str]:
        """The keys of objects in a level that no purge has hidden from this node."""
        storage = self.storage
        hidden = storage.all_levels[-1].hidden if level == "object" and isinstance(storage, LevelsStorage) else ()
        return {key for key in self.where(level) if self.names[key] not in hidden}

    def left(self, key: str, since: float) -> bool:
        """Whether a disk or the bucket had an object, and lost it since, or went away with it."""
        name = self.names[key]
        if any(medium.away and medium.went >= since and medium.has(name) for medium in self.media):
            return True
        return any(gone.get(name, -1.0) >= since for gone in [self.bucket.gone, *(one.gone for one in self.media)])

    def seen_to_leave(self, key: str, began: float, now: float) -> bool:
        """Whether the store itself has removed an object from disks since `began`, and some time ago."""
        name = self.names[key]
        if self.bucket.gone.get(name, -1.0) >= began:
            return False
        return all(
            one.serves
            and not one.away
            and one.disk is not None
            and one.disk.find([name], None) == [False]
            and one.gone.get(name, -1.0) < now - NOTICED_S
            for one in self.media
        )

    # --- what a disk that works keeps ----------------------------------------------------------------

    @property
    def plain(self) -> bool:
        """Whether the store is disks alone, and evicts nothing."""
        return self.levels == ["file"] and self.objects["d"] >= 1000

    def turns(self) -> list[tuple[int, int, bool]]:
        return [(medium.deaths, medium.returns, medium.good) for medium in self.media]

    @property
    def lists_unread(self) -> bool:
        """Whether a disk may still bring orders that this life does not know, and that take what it stores now."""
        self.unlisted = [medium for medium in self.unlisted if not medium.serves]
        return bool(self.unlisted)

    def reads(self, key: str) -> bool:
        """Whether an object is being read on a disk now."""
        disks = [medium.disk for medium in self.media if self.plain and medium.disk is not None]
        return any(disk._traffic.reads.has(self.names[key]) for disk in disks)

    def forget(self, key: str) -> None:
        """Nothing was promised of this object any more."""
        self.durable.pop(key, None)
        self.kept.pop(key, None)

    def purges(self, engine: str | None, now: float) -> None:
        """A purge begins or has ended. What a load reads when it begins, it goes on reading."""
        for one in self.reading:
            others = {key for other in self.reading if other is not one for key in other.keys}  # whose read may it be?
            own = one.own.intersection(one.kept) - others
            one.begun |= {key: one.kept[key] for key in own if self.reads(key)}
        for key in self.names:  # what a life has found belongs to whichever engine uses it first
            found = self.own.get(key, -1.0) <= self.found_at or key in self.came or bool(self.using)
            if engine in (None, key[0]) or found or key in self.pinned:
                self.kept.pop(key, None)
                self.purged_at[key] = now

    def check_taken(
        self,
        keys: Sequence[str],
        stored: set[str],
        before: Sequence[tuple[int, int, bool]],
        unlisted: bool,
        began: float,
    ) -> None:
        """A store has ended. before, unlisted: the turns of the media, and `lists_unread`, when it began."""
        if not self.plain or any(self.purged_at.get(key, -1.0) >= began for key in keys):
            return
        change = [(dead - d, back - b) for (dead, back, _), (d, b, _) in zip(self.turns(), before, strict=True)]
        died = [medium for medium, (deaths, _) in zip(self.media, change, strict=True) if deaths or medium.unwell]
        lived = [medium for medium in self.media if medium not in died]
        turned = any(returns for _, returns in change)  # then a trial may have gone well after a write that did not
        hung = any(medium.hangs for medium in self.media) or turned
        good = [medium for medium, (_, _, was_good) in zip(self.media, before, strict=True) if was_good]
        serving = [medium for medium in lived if medium.serves]
        idle = [medium for medium in serving if medium in good]
        failed = [key for key in keys if key not in stored]
        assert not failed or hung or not idle, f"kept: {failed} were not stored, and a disk works"
        for key in stored.difference(self.rotten):
            there = {medium: medium.deaths for medium in serving if medium.has(self.names[key])}
            held = turned or any(medium.has(self.names[key]) for medium in died)
            assert there or held, f"kept: {key} is stored, it says, and no disk has it"
            self.kept[key] = {} if unlisted else there

    def note_answer(self, keys: Sequence[str]) -> None:
        """A store has ended: what it did not store, or has left meanwhile, is not present."""
        self.present -= {name for key in keys if not self._said(name := self.names[key])}

    def check_lost(self) -> None:
        """What only a disk has that has failed is not there, and whoever asked for departures was told."""
        lost = [medium for medium in self.media if self.plain and not medium.serves]
        for name in [name for key, name in self.names.items() if lost and not self.storing[key]]:
            here = any(one.serves and (one.has(name) or name in one.gone) for one in self.media)
            assert here or not self._said(name), f"lost: {name} is there, it says, and no disk that works has it"
            assert self._said(name) or name not in self.present, f"lost: {name} has left, and nobody was told"

    def note_starved(self) -> None:
        """A read has ended, or disks are about to stop hanging: now it shows which reads had no slot left.

        A call keeps its slots until it ends (docs/faults.md), and an engine here has two for reads. So while two reads
        of a disk that hangs hold these, a read of another disk, too, waits until its deadline. So does what one call
        reads together with what lies on the disk that hangs.
        """
        hanging = [medium for medium in self.media if medium.hangs]
        for one in self.reading if hanging else ():
            hosted = self.daemon.engines.get(one.engine)
            one.starved |= hosted is not None and not hosted.workers[0].context.staging._shares["read"].free
            one.starved |= any(medium.has(self.names[key]) for medium in hanging for key in one.keys)

    def check_loaded(self, reading: Reading, loaded: set[str], *, expired: bool) -> None:
        """A read has ended, with these keys."""
        for key in reading.keys:
            if key in loaded:
                continue
            lasting = [m for m, deaths in reading.kept.get(key, {}).items() if m.deaths == deaths]
            same = key in self.kept and self.kept[key] is reading.kept.get(key)
            there = self._said(self.names[key]) and any(medium.has(self.names[key]) for medium in lasting)
            late = expired and reading.starved and there
            assert late or not (lasting and same), f"kept: {key} was stored on a disk that works, and is not there"
            begun = [m for m, deaths in reading.begun.get(key, {}).items() if m.deaths == deaths]
            assert not begun or key in self.rotten, f"kept: {key} was being read when a purge came, and is not there"

    def check_empty(self) -> None:
        """Everything was purged, and nothing runs."""
        assert not self.present or "b" in self.shape, f"rest: {sorted(self.present)} were purged, and nobody was told"
        report = self.context.run(self.storage.statistics)  # what that begins ends with the daemon
        if "b" not in self.shape:
            books = {key: report.get(key, 0) for key in ("objects", "bytes", "in_flight_bytes", "purging", "pinned")}
            assert not any(books.values()), f"rest: everything was purged, and the books say {books}"
        left = [path.name for one in self.media for path in (one.root / "objects").rglob("*@*") if path.is_file()]
        assert not left, f"purge: everything was purged, and {left} lie on disks"

    # --- at an answer -------------------------------------------------------------------------------

    def deleted(self, name: str, _data: bytes) -> None:
        """This node has removed an object of the bucket, though nobody has purged it for all nodes."""
        raise AssertionError(f"shared: this node deletes {name}, which other nodes may read")

    def check_stored(self, keys: set[str], began: float, *, shared: bool) -> None:
        for key in sorted(keys):
            name = self.names[key]
            if shared:
                there = name in self.bucket.objects or self.bucket.gone.get(name, -1.0) >= began
                assert there, f"promise: a hand-over of {key} is ok, and the bucket has nothing"
            if self.through and "file" not in self.drained:
                there = any(medium.has(name) or medium.gone.get(name, -1.0) >= began for medium in self.media)
                assert there, f"promise: a store of {key} is ok, and no disk has it, which is through"

    def check_pinned(self, keys: Sequence[str], durable: int, began: float) -> None:
        """durable: as many of these lie on a disk, pinned, says the store."""
        safe = [key for key in keys if key in self.where("file") or self.left(key, began)]
        assert durable <= len(safe), f"pin: {durable} of {list(keys)} are durable, it says, and only {safe} are on disk"

    def check_durable(self, now: float) -> None:
        """What is pinned durably stays, over restarts too."""
        there = self.where("file")
        gone = [key for key, until in self.durable.items() if until > now and key not in there]
        assert not gone, f"pin: {gone} are pinned durably, and no disk has them"

    def check_pinned_again(self, now: float) -> None:
        """After a restart."""
        lasting = [key for key, until in self.durable.items() if until > now + 1.0]
        pinned = self.context.run(self.storage.statistics).get("pinned", 0) if lasting else 0
        assert pinned >= len(lasting), f"pin: {lasting} were pinned durably, and a restart has left {pinned} pinned"

    def check_purged(self, gone: Iterable[str], aside: Mapping[Medium, set[str]], not_reached: Iterable[str]) -> None:
        """aside: what was in quarantine before, of each disk that the purge must empty."""
        for medium in self.media:
            left = [key for key in gone if medium.has(self.names[key])]
            named = any(str(medium.root) in place for place in not_reached)
            assert medium.unwell or named or not left, f"purge: {left} lie on {medium.root.name} still"
            kept = aside.get(medium, set()) & medium.set_aside()
            assert medium.unwell or named or not kept, f"purge: {kept} are in the quarantine of {medium.root.name}"

    def check_alone(self, name: str, began: float, now: float, alone: int, evicted: set[str]) -> None:
        """evicted: the keys that have left memory since `began`, perhaps since the answer."""
        places = self.where(name) - evicted
        if name == "file":  # the objects of a disk that has failed have left the level, and nobody can count them
            places = {key for key in places if any(one.has(self.names[key]) and not one.unwell for one in self.media)}
        others = [self.where(other) for other in self.levels if other != name]
        places = {
            key
            for key in places
            if self.started.get(key, -1.0) <= self.own.get(key, -1.0)  # else nobody was told that it is there
            and self.purged_at.get(key, -1.0) < began  # it may have left the index, and its bytes follow
        }
        unseen = {key for key in places if self.left(key, began) and not self.seen_to_leave(key, began, now)}
        only = {key for key in places - unseen if not any(key in one for one in others)}
        assert len(only) <= alone, f"drain: {name} says {alone} alone, and {sorted(only)} are nowhere else"

    def check_leaving(self, name: str, began: float, there: set[str]) -> None:
        """A drain has ended. there: what the level had when it began, or was being stored."""
        stored = [key for key in self.where(name) - there if self.started.get(key, -1.0) > began and name == "memory"]
        assert not stored, f"drain: {sorted(stored)} were stored in {name}, which was being taken out"

    def check_forgotten(self, name: str, began: float) -> None:
        """A level was put back, from `began` on: what a bucket said before counts no more."""
        if isinstance(self.storage, LevelsStorage) and name == "object":
            hints = [self.storage.all_levels[-1].hint(one) for one in self.names.values()]
            old = [hint for hint in hints if hint is not None and hint.at < began]
            assert not old, f"use: the bucket was put back, and {len(old)} of its old answers are believed"

    def check_held(self, now: float) -> None:
        """What memory is to hand down stays there until that is done: only a purge removes it before, or damage."""
        storage, latest = self.storage, max(self.purged_at.values(), default=-math.inf)
        if isinstance(storage, LevelsStorage) and self.shape in ("mb", "md", "mdd"):
            before, self.gone = self.gone, (storage.all_levels[-1].lost["gone"], now)
            early, forgiven = self.gone[0] - before[0], before[1] - latest < COPIED_S or self.spoils
            assert forgiven or early <= 0, f"copies: {early} objects left memory before they were copied"

    def check_refused(self) -> None:
        """A bucket that refuses is not hammered."""
        times = self.bucket.refused
        for first, last in zip(times, times[MOST_REFUSED:], strict=False):
            assert last - first > PUSHY_S, f"load: {MOST_REFUSED} refused writes within {last - first:.1f} s"

    # --- at rest ------------------------------------------------------------------------------------

    def check_rest(self, report: Mapping[str, Any], written: int) -> None:
        """written: objects that were written while nobody asked for anything."""
        assert report["staging"]["used"] == 0, f"buffers: {report['staging']} at rest"
        corrupt = report["storage"].get("corrupt", 0)
        assert self.spoils or not corrupt, f"buffers: {corrupt} objects are damaged, and nobody has spoilt any"
        assert not written, f"rest: {written} objects were written, and nobody asked for anything"
        said = {key for key, name in self.names.items() if self._said(name)}
        held = set[str]().union(*(self.where(name) for name in self.levels if name != "object"))
        assert said - self.where("object") <= held, f"rest: said {sorted(said - held)} too much"
        assert held <= said, f"rest: {sorted(held - said)} lie on media, and the store has not found them"
        gone = self.present - {self.names[key] for key in said}
        assert not gone or "b" in self.shape, f"rest: {sorted(gone)} have left, and nobody was told"
        if isinstance(self.storage, LevelsStorage):
            assert not self.storage.unsaved, f"rest: copies of {sorted(self.storage.unsaved)} wait"
            assert not self.storage._promotions.buffers.used, "rest: buffers of promotions are in use"
        for above, below in zip(self.levels, self.levels[1:], strict=False):
            lacking = self.where(above) - self.shown(below)
            room = below == "object" or len(self.where(below)) < self.objects["d"] - 1
            assert not lacking or not room, f"rest: {below} lacks {sorted(lacking)}, which {above} has"

    @property
    def written(self) -> int:
        """Objects written to disks and the bucket so far."""
        return self.bucket.writes + sum(medium.writes for medium in self.media)

    def _said(self, name: str) -> bool:
        if (levels := self.storage.levels) is not None:
            return bool(levels.having(name))
        return self.storage.index.find([name], None) == [True]
