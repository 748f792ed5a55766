"""Loads by holder: objects of a node that is slow, cut off or dead keep no other object waiting.

    get ─ one call for all that arrived ─ which nodes have the objects?
              all of one node, and our own:  loaded in the same call
              of several nodes:              our own in the same call; the rest in a call for each node

The thread of the load asks the master which nodes have them, for 0.3 ms a call. With `local first` (client.py), a
chain lies with one node, so the usual load is still one call. For an object that a call left, the answer is its node's
endpoint in place of a code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from weakref import WeakValueDictionary

from transferd.errors import StorageError, StorageUnavailable
from transferd.runtime.aio import every
from transferd.storage.mooncake import error_codes
from transferd.storage.mooncake.client import Batch, PoolClient, part_of
from transferd.storage.mooncake.error_codes import describe
from transferd.storage.mooncake.native_calls import Merger
from transferd.storage.mooncake.peers import Call, Peers, unreachable

MOST = 2  # calls of a node's own merger. With one beside them, a node that is slow takes three of the eight threads

Answer = int | str | StorageError
"""For each key: its length, a code, the node that has it and was not asked, or the error of that node's call."""


Codes = dict[str, int | str]
Native = Callable[[Callable[[PoolClient], Codes], Call], Awaitable[Codes]]
"""Makes a native call: MooncakeStorage's. The function runs in a thread. The Call says whom it waits for."""


class Loads:
    """Gets objects from the pool, each node's apart. peers: borrowed. counts: see Merger."""

    def __init__(self, native: Native, peers: Peers, counts: Counter[str]) -> None:
        self._native = native
        self._peers = peers
        self._counts = counts
        self._all: Merger[Answer] = Merger(self._ours_and_one, counts)
        self._by_peer = WeakValueDictionary[str, Merger[Answer]]()  # each for as long as a load waits for it
        self._awaited: dict[str, Call] = {}  # nodes that a call of `_all` waits for; its thread sets it

    async def run(self, batch: Batch) -> dict[str, Answer]:
        """The answer for each key, without endpoints. Raises StorageError if the master does not answer."""
        answers = await self._all.run(batch)
        left: dict[str, list[str]] = {}
        for key, answer in answers.items():
            if isinstance(answer, str):
                left.setdefault(answer, []).append(key)
        if left:
            self._peers.met(left)
            parts = [self._of(endpoint, part_of(batch, keys)) for endpoint, keys in left.items()]
            for part in await every(parts):
                answers |= part
        return answers

    async def _ours_and_one(self, batch: Batch) -> dict[str, Answer]:
        call = Call(moves=len(batch))
        answers = await self._native(lambda client: self._get_ours_and_one(client, call, batch), call)
        self._peers.met(call.peers)
        return self._named(answers, call)

    async def _of(self, endpoint: str, batch: Batch) -> dict[str, Answer]:
        """Get one node's objects. Its error is the answer for each of its keys, and does not concern other nodes."""
        try:
            await self._peers.verdict(endpoint)
            merger = self._by_peer.get(endpoint)
            if merger is None:
                merger = Merger(lambda joined: self._get(endpoint, joined), self._counts, MOST)
                self._by_peer[endpoint] = merger
            return await merger.run(batch)
        except StorageError as error:
            return dict.fromkeys(batch, error)

    async def _get(self, endpoint: str, batch: Batch) -> dict[str, Answer]:
        await self._peers.verdict(endpoint)  # it may have gone down while the batch waited for its turn
        call = Call(frozenset({endpoint}), len(batch))
        return self._named(await self._native(lambda client: {**client.get(batch)}, call), call)

    def _named(self, answers: Mapping[str, Answer], call: Call) -> dict[str, Answer]:
        """The answers, with an error that names node and key in place of the code of a failed transfer."""
        named = dict(answers)
        if error_codes.TRANSFER_FAIL not in named.values() or len(call.peers) != 1:
            return named
        (endpoint,) = call.peers
        why = self._peers.down.get(endpoint)
        for key in [key for key, answer in named.items() if answer == error_codes.TRANSFER_FAIL]:
            if why is not None:
                named[key] = StorageUnavailable(f"Mooncake could not load {key}: {unreachable(endpoint, why)}")
            else:
                code = describe(error_codes.TRANSFER_FAIL)
                named[key] = StorageError(f"Mooncake could not load {key} from the node {endpoint} ({code})")
        return named

    def _get_ours_and_one(self, client: PoolClient, call: Call, batch: Batch) -> Codes:
        """In a thread: look up who has each object, and get those that wait for one node at most.

        Where an earlier such call still waits for that node, it is slow, and its own merger bounds what it takes.
        """
        holders = {key: held[0] if held else "" for key, held in client.holders(batch).items()}
        others = frozenset(holders.values()) - {""}
        if len(others) == 1 and not others & (self._peers.doubted | self._peers.down.keys()):
            (other,) = others
            if self._awaited.setdefault(other, call) is call:
                call.peers = others
                try:
                    return {**client.get(batch)}
                finally:
                    del self._awaited[other]
        here = part_of(batch, [key for key, holder in holders.items() if not holder])
        return {**holders, **(client.get(here) if here else {})}
