"""Tracks a request's blocks: which ones the daemon has, which failed to load, and which are still to be saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transferd.adapters.vllm.groups import KvGroup, reach

STALE_S = 1.0  # a request that waits longer for GPU memory asks again: blocks were stored and evicted meanwhile

Place = tuple[int, int]  # a group, and a block of the request in it


@dataclass(slots=True)
class LookUp:
    """A question to the daemon."""

    found: list[list[bool]] | None = None  # for each group and block, whether it can be loaded; None until answered
    arrived: float = 0.0  # when the answer came, in seconds
    used: bool = False  # whether vLLM has seen it


@dataclass(slots=True)
class Known:
    """A request."""

    request: Any
    groups: Sequence[KvGroup]
    salt: str | None = ""  # what its keys contain besides vLLM's hashes; None: its blocks are neither loaded nor saved
    look_up: LookUp | None = None  # None until the daemon was asked
    # blocks whose load has failed; vLLM would ask for them and load them for ever
    lost: set[Place] = field(default_factory=set)
    local: int = 0  # tokens that vLLM had when it last asked
    full: int = 0  # how many leading blocks have been computed
    fresh: int = 0  # blocks before this one were not computed by this request
    saved: int = 0  # how many leading blocks need no save (any more)
    ahead: int = 0  # blocks from `fresh` up to here need none either: they were saved before the daemon answered
    most_loaded: int | None = None  # the request's own limit, in tokens
    most_saved: int | None = None  # the same
    by_layer: bool = False  # whether we last offered vLLM a load during the step

    def must_ask(self, now: float) -> bool:
        """Whether to ask the daemon: it has not been asked, or its answer is old. Each answer is used at least once."""
        asked = self.look_up
        return asked is None or (asked.found is not None and asked.used and now - asked.arrived > STALE_S)

    def loadable(self, first: int, end: int, tokens: int) -> int:
        """How many blocks behind the `first` ones, which vLLM has, can be loaded. tokens: of a block."""
        if self.most_loaded is not None:
            end = min(end, first + self.most_loaded // tokens)
        found = [[self.has(group, i) for i in range(end)] for group in range(len(self.groups))]
        return reach(found, self.groups, first, end, tokens) - first

    def has(self, group: int, i: int) -> bool:
        """Whether the daemon has a block, as far as it has said."""
        found = None if self.look_up is None else self.look_up.found
        return found is not None and i < len(found[group]) and found[group][i] and (group, i) not in self.lost

    def computed(self, first: int, full: int) -> None:
        """vLLM computes this request's blocks from `first` up to `full`."""
        if not self.full:
            self.fresh = self.ahead = first
        self.full = max(self.full, full)

    def needs_none(self, group: int, i: int) -> bool:
        """Whether a block needs no save: the daemon has it, or it was saved before the daemon has answered."""
        return self.has(group, i) or self.fresh <= i < self.ahead

    @property
    def answered(self) -> bool:
        return self.look_up is not None and self.look_up.found is not None

    def to_save(self, *, answered: bool) -> range:
        """The blocks to be considered for a save. answered: as `answered` was, which may change at any moment."""
        return range(self.saved if answered else self.ahead, self.full)

    def considered(self, i: int, *, answered: bool) -> None:
        """A block of `to_save` needs no save any more."""
        if answered:
            self.saved = i + 1
        else:
            self.ahead = i + 1

    @property
    def unsaved(self) -> int:
        """How many computed blocks the daemon does not have and no task is saving."""
        places = ((group, i) for group in range(len(self.groups)) for i in range(self.saved, self.full))
        return sum(not self.needs_none(*place) for place in places)

    def begin_again(self) -> None:
        """vLLM has taken the request's blocks away: look up, load and compute all of them again."""
        self.look_up, self.full, self.fresh, self.saved, self.ahead = None, 0, 0, 0, 0
        self.lost.clear()


def limit(params: Mapping[str, Any] | None, name: str) -> int | None:
    """A request's own limit in its kv_transfer_params, in tokens; None if absent or invalid."""
    given = (params or {}).get(name)
    return given if type(given) is int and given >= 0 else None
