"""What a store of all features promises, checked against its media and never against its catalogue (store_world.py)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.support.simulation.bucket import SimBucket
from tests.support.simulation.medium import Medium
from transferd.daemon.daemon import Daemon
from transferd.storage.base import Storage

PUSHY_S, MOST_REFUSED = 10.0, 60  # a bucket that refuses is written to so often within so long, at most


class Judge:
    """One seed's. names: of the objects, by key. durable: keys whose pin a restart leaves, and until when."""

    names: dict[str, str]
    media: list[Medium]
    bucket: SimBucket
    drained: set[str]
    through: bool
    storage: Storage
    shape: str
    daemon: Daemon
    durable: dict[str, float]
    objects: dict[str, int]

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
        storage = self.storage if len(self.levels) == 1 else self.storage.all_levels[0].storage  # type: ignore[attr-defined]
        return {key for key, name in self.names.items() if storage.index.find([name], None) == [True]}

    def left(self, key: str, since: float) -> bool:
        """Whether a disk or the bucket had an object, and lost it since, or went away with it."""
        name = self.names[key]
        if any(medium.away and medium.went >= since and medium.has(name) for medium in self.media):
            return True
        return any(gone.get(name, -1.0) >= since for gone in [self.bucket.gone, *(one.gone for one in self.media)])

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
        pinned = self.storage.keeper.statistics()["pinned"] if lasting and self.storage.keeper is not None else 0
        assert pinned >= len(lasting), f"pin: {lasting} were pinned durably, and a restart has left {pinned} pinned"

    def check_purged(self, gone: Iterable[str], aside: Mapping[Medium, set[str]], not_reached: Iterable[str]) -> None:
        """aside: what was in quarantine before, of each disk that the purge must empty."""
        for medium in self.media:
            left = [key for key in gone if medium.has(self.names[key])]
            named = any(str(medium.root) in place for place in not_reached)
            assert medium.unwell or named or not left, f"purge: {left} lie on {medium.root.name} still"
            kept = aside.get(medium, set()) & medium.set_aside()
            assert medium.unwell or named or not kept, f"purge: {kept} are in the quarantine of {medium.root.name}"

    def check_alone(self, name: str, began: float, alone: int) -> None:
        places = self.where(name)
        if name == "file":  # the objects of a disk that has failed have left the level, and nobody can count them
            places = {key for key in places if any(one.has(self.names[key]) and not one.unwell for one in self.media)}
        others = [self.where(other) for other in self.levels if other != name]
        only = {key for key in places if not any(key in one for one in others) and not self.left(key, began)}
        assert len(only) <= alone, f"drain: {name} says {alone} alone, and {sorted(only)} are nowhere else"

    def check_refused(self) -> None:
        """A bucket that refuses is not hammered."""
        times = self.bucket.refused
        for first, last in zip(times, times[MOST_REFUSED:], strict=False):
            assert last - first > PUSHY_S, f"load: {MOST_REFUSED} refused writes within {last - first:.1f} s"

    # --- at rest ------------------------------------------------------------------------------------

    def check_rest(self, report: Mapping[str, Any], written: int) -> None:
        """written: objects that were written while nobody asked for anything."""
        assert report["staging"]["used"] == 0, f"buffers: {report['staging']} at rest"
        assert not written, f"rest: {written} objects were written, and nobody asked for anything"
        said = {key for key, name in self.names.items() if self._said(name)}
        held = set[str]().union(*(self.where(name) for name in self.levels if name != "object"))
        assert said - self.where("object") <= held, f"rest: said {sorted(said - held)} too much"
        assert held <= said, f"rest: {sorted(held - said)} lie on media, and the store has not found them"
        for above, below in zip(self.levels, self.levels[1:], strict=False):
            lacking = self.where(above) - self.where(below)
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
