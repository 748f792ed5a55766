"""Which computed blocks are saved, and what keeps them in vLLM's pool meanwhile.

Blocks that see all tokens stay while their request lives, so those without room are chosen by a later step. Blocks of
windows, and states, are gone with the next step: they come first. Of them only those are saved that a later request can
load, by vLLM's rule (`KvGroups.kept`), and those at the request's end: the next turn of a conversation goes on there.
Those of vLLM's intervals come last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from transferd.adapters.common.link import Link
from transferd.adapters.vllm.groups import KvGroups
from transferd.adapters.vllm.known import Known, Place
from transferd.tasks import NO_ROOM, NOT_READY

PINNED_SHARE = 4  # saves hold at most a quarter of vLLM's blocks; others wait while their request lives
UNREACHABLE = "unreachable"  # a reason of vLLM's alone: no later request can use these blocks of a window


class Chosen(NamedTuple):
    """A block to be saved. block: vLLM's."""

    known: Known
    place: Place
    key: str
    block: Any


@dataclass(slots=True)
class Choice:
    """Blocks to be saved. room: for how many more there is."""

    room: int
    blocks: list[Chosen] = field(default_factory=list)

    def chains(self, model: KvGroups) -> tuple[list[tuple[int, int, str]], list[Chosen]]:
        """The blocks, each request's from the root on, and what each continues (`WriteStorageTask.chains`)."""
        by_request: dict[str, list[Chosen]] = {}
        for one in self.blocks:
            by_request.setdefault(one.known.request.request_id, []).append(one)
        chains: list[tuple[int, int, str]] = []
        ordered: list[Chosen] = []
        for some in by_request.values():
            some.sort(key=lambda one: model.order(one.place))
            chains.append((len(ordered), model.before(some[0].place), some[0].known.key_before(some[0].place)))
            ordered += some
        return chains, ordered


class Saving:
    """For the scheduler's thread only.

    model: its KV groups.
    link: asks whether a daemon answers.
    ask: looks up a request's blocks.
    skipped: counts blocks that are not saved, by reason.
    """

    def __init__(
        self, model: KvGroups, link: Link, ask: Callable[[Known], None], skipped: Callable[[str, int], None]
    ) -> None:
        self._model, self._link, self._ask, self._skipped = model, link, ask, skipped
        self._whole = [number for number, group in enumerate(model.groups) if group.whole]
        self._windows = [number for number, group in enumerate(model.groups) if not group.whole]
        self._pool: Any = None
        self._block_ids: Callable[[str], Sequence[Sequence[int]]] = lambda _: ()
        self._keys: set[str] = set()  # of the blocks that saves hold
        self.pinned = 0  # how many these are
        self._held = 0  # blocks that are kept, because they may be the last ones of a request

    def bind(self, manager: Any) -> None:
        """Set vLLM's KVCacheManager, which owns the pool of blocks and knows which blocks a request has."""
        self._pool, self._block_ids = manager.block_pool, manager.get_block_ids

    # --- choosing -----------------------------------------------------------------------------------

    def of_step(self, scheduled: Sequence[Known], states: Iterable[tuple[Known, Place, int]]) -> Choice:
        """The blocks that these requests have computed, and the daemon does not have.

        states: those that vLLM hands over, with the number of their block.
        """
        choice = self._choice()
        for known, place, block in states:
            if not self._link.ready:
                self._skipped(NOT_READY, 1)
            elif not self._add(known, place, self._pool.blocks[block], choice):
                self._skipped(NO_ROOM, 1)
        able = [known for known in scheduled if known.salt is not None and self._link.ready]
        for known in able:
            self._choose_ends(known, choice)
        for groups in (self._whole, self._windows):
            for known in able:
                self._choose(known, choice, groups)
        for known in scheduled:
            known.alone |= not self._link.ready
            self._hold(known)
        return choice

    def of_end(self, known: Known, block_ids: Sequence[Sequence[int]]) -> Choice:
        """What a next turn needs of the windows of a request that ends. Counts what was never saved."""
        choice, marks = self._choice(), known.marks(finished=True)
        if known.salt is not None and self._link.ready:
            for group, ids in enumerate(block_ids):
                for i in known.tail(group, marks[-1] if marks else 0):
                    self._add(known, (group, i), known.held.get((group, i)) or self._pool.blocks[ids[i]], choice)
        usable = Counter(known.unsaved(marks))
        there = known.answered and self._link.ready and not known.alone
        self._skipped(NO_ROOM if there else NOT_READY, usable[True])
        self._skipped(UNREACHABLE, usable[False])
        return choice

    def _choice(self) -> Choice:
        return Choice(len(self._pool.blocks) // PINNED_SHARE - self.pinned - self._held)

    def _choose_ends(self, known: Known, choice: Choice) -> None:
        """Choose what windows need where a later request goes on."""
        if known.look_up is None:
            self._ask(known)
        groups, answered = self._windows, known.answered
        if not any(known.to_save(group, answered=answered) for group in groups):
            return
        ids = self._block_ids(known.request.request_id)
        for mark in known.marks():
            for group in groups:
                begun, tail = known.to_save(group, answered=answered), known.tail(group, mark)
                for i in range(max(begun.start, tail.start), min(begun.stop, tail.stop)):
                    if not self._add(known, (group, i), self._pool.blocks[ids[group][i]], choice):
                        return

    def _choose(self, known: Known, choice: Choice, groups: Sequence[int]) -> None:
        """Choose blocks in their order; a later step chooses those without room."""
        answered = known.answered
        places = [(group, i) for group in groups for i in known.to_save(group, answered=answered)]
        if not places:  # most steps fill no block
            return
        ids, marks = self._block_ids(known.request.request_id), known.marks()
        waiting: set[int] = set()  # groups
        for group, i in sorted(places, key=self._model.order):
            if group in waiting:
                continue
            block = self._pool.blocks[ids[group][i]]
            if self._model.kept(group, i, marks) and not self._add(known, (group, i), block, choice):
                waiting.add(group)
            else:
                known.considered(group, i, answered=answered)

    def _add(self, known: Known, place: Place, block: Any, choice: Choice) -> bool:
        """Add a block that has to be saved. False if there is no room."""
        key = known.key(*place)
        if known.needs_none(*place) or key in self._keys or block.is_null:
            return True
        if choice.room <= 0:
            return False
        choice.room -= 1
        self._keys.add(key)
        if not self._model.groups[place[0]].whole:
            known.chosen.add(place)
        choice.blocks.append(Chosen(known, place, key, block))
        return True

    # --- references ---------------------------------------------------------------------------------

    def pin(self, choice: Choice) -> None:
        """Hold blocks until `unpin`."""
        self._pool.touch([one.block for one in choice.blocks])
        self.pinned += len(choice.blocks)

    def unpin(self, keys: Sequence[str], blocks: Sequence[Any]) -> None:
        self._pool.free_blocks(list(reversed(blocks)))
        self.pinned -= len(blocks)
        self._keys.difference_update(keys)

    def _hold(self, known: Known) -> None:
        """Keep what a next turn needs of the windows, if the request ends before its next boundary.

        vLLM keeps what the request's next token needs, which is less.
        """
        end = self._model.aligned(known.full)
        if end <= known.held_at or self._model.every is None or known.salt is None:
            return
        ids = self._block_ids(known.request.request_id)
        places = [(group, i) for group in range(len(self._model.groups)) for i in known.leaving(group, end)]
        blocks = {place: self._pool.blocks[ids[place[0]][place[1]]] for place in places}
        self.release(known)
        known.held_at = end
        if 0 < len(blocks) <= self._choice().room:
            known.held = {place: block for place, block in blocks.items() if not block.is_null}
            self._pool.touch(list(known.held.values()))
            self._held += len(known.held)

    def release(self, known: Known) -> None:
        """Give back what was kept of a request."""
        self._pool.free_blocks(list(known.held.values()))
        self._held -= len(known.held)
        known.held = {}
