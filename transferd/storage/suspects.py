"""Objects of a shared medium that came here damaged: one node's word removes nothing that others can read.

The damage may lie in the medium, or on the way here: a flipped bit, a proxy's page, half a body. So such an object is
read once more, over another connection. If it is whole then, the *link* was at fault. If it is damaged again, it is a
*suspect*: this node does not read it for a while, which grows, and counts it as missing. So the next task that has its
block stores it again, and that overwrites it, for all nodes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from transferd.errors import StorageUnavailable

FIRST_S = 30.0  # how long a suspect is not read; each time it is damaged again doubles that
LONGEST_S = 3600.0
MOST = 65_536  # names that are remembered
FAULTS, WITHIN_S = 5, 60.0  # so many faults of the link, and it is left alone
SILENCE_S = 2.0  # nobody has complained about an object for so long: it was whole


@dataclass(slots=True)
class _Doubt:
    pause_s: float = 0.0  # 0 until it was damaged twice
    until: float = 0.0
    came_whole: bool = False  # the last time, and nobody has complained since


class Suspects:
    """See the module. Used on one loop. now: monotonic seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._doubts: OrderedDict[str, _Doubt] = OrderedDict()
        self._came: deque[tuple[float, str]] = deque()  # when, and which; until nobody can complain any more
        self._faults: deque[float] = deque(maxlen=FAULTS)
        self._link_faults = 0

    def __len__(self) -> int:
        return len(self._doubts)

    def __contains__(self, name: object) -> bool:
        return name in self._doubts

    def damaged(self, name: str) -> None:
        """Note that an object was wrong when it came here."""
        if name in self._doubts:
            self.avoid(name)
        else:
            self.doubt(name)

    def doubt(self, name: str) -> _Doubt:
        """Note that an object was wrong when it came here, unless that is known."""
        doubt = self._doubts.setdefault(name, _Doubt())
        if len(self._doubts) > MOST:
            self._doubts.popitem(last=False)
        return doubt

    def avoid(self, name: str) -> None:
        """Do not read the object for a while: the medium itself has it wrong."""
        doubt = self.doubt(name)
        doubt.came_whole = False
        doubt.pause_s = min(LONGEST_S, max(FIRST_S, 2 * doubt.pause_s))
        doubt.until = self._now() + doubt.pause_s

    def avoided(self, name: str) -> bool:
        """Whether the object counts as missing now."""
        doubt = self._doubts.get(name)
        return doubt is not None and doubt.until > self._now()

    def doubted(self, name: str) -> bool:
        """Whether a load has to read the object over another connection."""
        doubt = self._doubts.get(name)
        return doubt is not None and not doubt.came_whole

    def came(self, names: Iterable[str]) -> None:
        """Note that objects that were `doubted` have come, and seem to be whole."""
        for name in names:
            self.doubt(name).came_whole = True
            self._came.append((self._now(), name))

    def stored(self, names: Iterable[str]) -> None:
        """Note that good bytes have replaced these objects."""
        for name in names if self._doubts else ():
            self._doubts.pop(name, None)

    def check_link(self, medium: str) -> None:
        """Raise StorageUnavailable while the way from this medium spoils what comes."""
        if problem := self.bad_link:
            raise StorageUnavailable(f"{problem}; nothing is loaded from the {medium} for a while")

    def statistics(self) -> dict[str, int | str]:
        return {"link_faults": self.link_faults, "bad_link": self.bad_link}

    @property
    def link_faults(self) -> int:
        """Objects that came damaged, and whole when they were read again."""
        while self._came and self._came[0][0] <= self._now() - SILENCE_S:
            at, name = self._came.popleft()
            doubt = self._doubts.get(name)
            if doubt is not None and doubt.came_whole:
                del self._doubts[name]
                if not doubt.pause_s:  # else another node has mended it
                    self._link_faults += 1
                    self._faults.append(at)
        return self._link_faults

    @property
    def bad_link(self) -> str:
        """Why nothing should be loaded now, for people; "" if all is well."""
        if self.link_faults < FAULTS or self._faults[0] <= self._now() - WITHIN_S:
            return ""
        return (
            f"{FAULTS} objects came here damaged within {WITHIN_S:g} s and were whole when they were read again: this "
            "node's link, network card or proxy spoils what it carries"
        )
