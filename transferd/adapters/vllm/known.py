"""Tracks a request's blocks: which ones the daemon has, which failed to load, and which are still to be saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transferd.adapters.vllm.groups import KvGroups

STALE_S = 1.0  # a request that waits longer for GPU memory asks again: blocks were stored and evicted meanwhile

Place = tuple[int, int]  # a group, and a block of the request in it


@dataclass(slots=True)
class LookUp:
    """A question to the daemon."""

    found: list[list[bool]] | None = None  # for each group and block, whether it can be loaded; None until answered
    junction: int = 0  # where prompts have parted that share a prefix, as far as the store shows it
    arrived: float = 0.0  # when the answer came, in seconds
    used: bool = False  # whether vLLM has seen it


@dataclass(slots=True)
class Known:
    """A request."""

    request: Any
    model: KvGroups
    salt: str | None = ""  # what its keys contain besides vLLM's hashes; None: its blocks are neither loaded nor saved
    look_up: LookUp | None = None  # None until the daemon was asked
    # blocks whose load has failed; vLLM would ask for them and load them for ever
    lost: set[Place] = field(default_factory=set)
    local: int = 0  # tokens that vLLM had when it last asked
    full: int = 0  # how many leading tokens have been computed
    fresh: int = 0  # tokens before this one were not computed by this request
    # for each group, how many leading blocks need no save (any more)
    saved: list[int] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)  # the same, of those from `fresh` on, before the daemon has answered
    chosen: set[Place] = field(default_factory=set)  # blocks of windows that were to be saved
    held: dict[Place, Any] = field(default_factory=dict)  # vLLM's blocks that are kept for a next turn,
    held_at: int = 0  # which goes on at this boundary
    most_loaded: int | None = None  # the request's own limit, in tokens
    most_saved: int | None = None  # the same
    by_layer: bool = False  # whether we last offered vLLM a load during the step
    alone: bool = False  # whether it was computed without a daemon for a while

    def __post_init__(self) -> None:
        self.begin_again()

    def must_ask(self, now: float) -> bool:
        """Whether to ask the daemon: it has not been asked, or its answer is old. Each answer is used at least once."""
        asked = self.look_up
        return asked is None or (asked.found is not None and asked.used and now - asked.arrived > STALE_S)

    def named(self, group: int) -> int:
        """How many of its blocks have a key: vLLM has hashed them, and knows what a draft model sees behind them."""
        one, hashed = self.model.groups[group], len(self.request.block_hashes) * self.model.hashed
        return min(hashed, len(self.request.all_token_ids) - one.ahead if one.ahead else hashed) // one.tokens

    def key(self, group: int, i: int) -> str:
        """The key of a block: vLLM's hash, which stands for all tokens up to its end, and all else that its bytes need.

        Of a draft model's layers these are the tokens behind it.
        """
        one, request = self.model.groups[group], self.request
        name: str = request.block_hashes[self.model.hash_of(group, i)].hex()
        if len(self.model.groups) > 1:
            name = f"{name}/{group}"
        if one.ahead:
            end = (i + 1) * one.tokens
            name = f"{name}~{','.join(map(str, request.all_token_ids[end : end + one.ahead]))}"
        return f"{name}+{self.salt}" if self.salt else name

    def key_before(self, place: Place) -> str:
        """The key of a block before this one, of a group of which all are stored if there is one; "" at the root."""
        group, i = self.model.before_of_whole(place)
        return self.key(group, i) if i >= 0 else ""

    # --- loading ------------------------------------------------------------------------------------

    def loadable(self, first: int, end: int) -> int:
        """How many tokens behind the `first` ones, which vLLM has, can be loaded. Both are boundaries."""
        if self.most_loaded is not None:
            end = min(end, first + self.model.aligned(self.most_loaded))
        groups = enumerate(self.model.groups)
        found = [[self.has(group, i) for i in range(end // one.tokens)] for group, one in groups]
        return self.model.reach(found, first, end) - first

    def has(self, group: int, i: int) -> bool:
        """Whether the daemon has a block, as far as it has said."""
        found = None if self.look_up is None else self.look_up.found
        return found is not None and i < len(found[group]) and found[group][i] and (group, i) not in self.lost

    # --- saving -------------------------------------------------------------------------------------

    def computed(self, first: int, full: int) -> None:
        """vLLM computes this request's tokens from `first` up to `full`."""
        if not self.full:
            self.fresh = first
            self.ahead = [first // one.tokens for one in self.model.groups]
        self.full = max(self.full, min(full, self.request.num_tokens))  # behind them are guesses of a draft model

    def ended(self, group: int) -> int:
        """How many leading blocks are computed, have a key, and change no more."""
        one = self.model.groups[group]
        most = self.full if self.most_saved is None else min(self.full, self.most_saved)
        # The last of several drafts' layers is computed again with the next tokens.
        return max(0, min((most - max(0, one.ahead - 1)) // one.tokens, self.named(group)))

    def needs_none(self, group: int, i: int) -> bool:
        """Whether a block needs no save: the daemon has it, or it was saved already."""
        if self.has(group, i):
            return True
        one = self.model.groups[group]
        if one.whole:
            return self.fresh // one.tokens <= i < self.ahead[group]
        return (group, i) in self.chosen

    @property
    def answered(self) -> bool:
        return self.look_up is not None and self.look_up.found is not None

    def to_save(self, group: int, *, answered: bool) -> range:
        """The blocks to be considered for a save. answered: as `answered` was, which may change at any moment.

        vLLM hands over states by itself.
        """
        begun = self.saved if answered else self.ahead
        return range(0) if self.model.groups[group].state else range(begun[group], self.ended(group))

    def considered(self, group: int, i: int, *, answered: bool) -> None:
        """A block of `to_save` needs no save any more."""
        (self.saved if answered else self.ahead)[group] = i + 1

    def marks(self, *, finished: bool = False) -> list[int]:
        """The boundaries where a later request may go on, besides vLLM's intervals.

        They are the prompt's end, where it has parted from others that share a prefix, and its own end, if it has
        finished.
        """
        known = [self.request.num_prompt_tokens - 1, self.request.shared_prefix_boundary]
        if self.look_up is not None and self.look_up.found is not None:
            known.append(self.look_up.junction)
        if finished:
            known.append(min(self.full, self.request.num_tokens - 1))
        return [self.model.aligned(tokens) for tokens in known if tokens > 0]

    def tail(self, group: int, mark: int) -> range:
        """The computed blocks of a window that a request needs that goes on at this boundary."""
        one = self.model.groups[group]
        if one.whole or one.state or self.ended(group) < mark // one.tokens:
            return range(0)
        return range(one.first_needed(mark), mark // one.tokens)

    def leaving(self, group: int, end: int) -> range:
        """The blocks that a request needs that goes on at a boundary, and not at the next one.

        None if it is in the prompt: those are saved.
        """
        one = self.model.groups[group]
        if one.whole or one.state or end < self.request.num_prompt_tokens:
            return range(0)
        most = min(one.first_needed(end + self.model.unit), end // one.tokens)
        return range(one.first_needed(end), most)

    def unsaved(self, marks: Sequence[int]) -> Iterator[bool]:
        """Each computed block that the daemon does not have and no task was to save: can a later request use it?"""
        for group, one in enumerate(self.model.groups):
            first = self.saved[group] if one.whole else self.fresh // one.tokens
            for i in range(first, 0 if one.state else self.ended(group)):
                if not self.needs_none(group, i):
                    yield self.model.kept(group, i, marks)

    def begin_again(self) -> None:
        """vLLM has taken the request's blocks away: look up, load and compute all of them again."""
        count = len(self.model.groups)
        self.look_up, self.full, self.fresh, self.saved, self.ahead = None, 0, 0, [0] * count, [0] * count
        self.held_at = 0
        self.lost.clear()
        self.chosen.clear()


def limit(params: Mapping[str, Any] | None, name: str) -> int | None:
    """A request's own limit in its kv_transfer_params, in tokens; None if absent or invalid."""
    given = (params or {}).get(name)
    return given if type(given) is int and given >= 0 else None
