"""Answers which blocks of an engine could be loaded now, and where blocks are. Moves nothing and changes nothing.

It asks the engine's ranks, its token storage or its token index, whichever exists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from socket import gethostname

from transferd.blocks.keys import path_keys
from transferd.control.admission import check_salt
from transferd.daemon.engine import HostedEngine
from transferd.errors import RequestError
from transferd.runtime.aio import every
from transferd.storage.attention_store.open_index import ANY_MEDIUM
from transferd.storage.base import Storage
from transferd.storage.lru import Use
from transferd.tasks import TokenIds
from transferd.wire.kv_events import block_hash
from transferd.workers.read import leading

PIECE = 2048  # keys: about 2 ms of the event loop. So many are looked up at once; more wait their turn
KEY_BYTES = 64  # memory of a key besides its text
MAX_MATCH_KEYS = 65536  # so that one request cannot block the loop; more blocks than any sequence has


async def match(engine: HostedEngine, keys: Sequence[str]) -> int:
    """How many leading keys every rank could load now. Raises StorageError; RequestError without storage."""
    found = leading(await _exists(engine, keys, use=True))
    _looked_up(engine, len(keys), found, keys, found if found < len(keys) else None)
    return found


async def exists(engine: HostedEngine, keys: Sequence[str], *, use: bool = True) -> list[bool]:
    """For each key, whether every rank could load its block now. use: whether that counts as a use of the blocks.

    Raises like `match`.
    """
    found = await _exists(engine, keys, use=use)
    if use:
        _looked_up(engine, len(keys), sum(found), keys, None if all(found) else found.index(False))
    return found


async def _exists(engine: HostedEngine, keys: Sequence[str], *, use: bool) -> list[bool]:
    if engine.cache.missing:
        return [False] * len(keys)
    found: list[bool] = []
    asked = Use(counts=use, owner=engine.owner)
    many = len(keys) > PIECE and engine.blocks is not None
    over_network = many and needed(engine.blocks).index.find([], None) is None
    async for names in _names(engine, keys, at_once=over_network):
        storage = needed(engine.blocks)
        asked.start = len(found)  # all of them are one chain
        known = [storage.index.find(of_rank, asked) for of_rank in names]
        by_rank = [there for there in known if there is not None]
        if len(by_rank) < len(names):  # storage must ask
            by_rank = await every(map(storage.exists, names))
        found += [all(there) for there in zip(*by_rank, strict=True)]
    if engine.kv_events.has_followers and not all(found):
        engine.kv_events.not_found([key for key, there in zip(keys, found, strict=True) if not there])
    return found


async def locate_keys(engine: HostedEngine, keys: Sequence[str]) -> dict[str, dict[str, int]]:
    """How many leading keys every rank has in each level of this node's storage. Raises like `match`."""
    counts, before = Counter[str](), 0
    async for names in _names(engine, keys):
        each = len(names[0])
        if engine.cache.missing or not each:
            return {}
        found = await _where(needed(engine.blocks), [name for rank in names for name in rank])
        media = found | {ANY_MEDIUM: [any(levels) for levels in zip(*found.values(), strict=True)]}
        for level, there in media.items():
            if counts[level] == before:  # names are rank after rank
                counts[level] += leading([all(there[i::each]) for i in range(each)])
        before += each
        if counts[ANY_MEDIUM] < before:
            break
    return {gethostname(): {level: count for level, count in counts.items() if count}} if counts[ANY_MEDIUM] else {}


async def object_names(engine: HostedEngine, keys: Sequence[str], generation: str | None = None) -> list[list[str]]:
    """For each key, the names of all objects that its block has on this node. generation: None for the served one."""
    parts, blocks = [part.suffix for part in engine.objects.parts], list[list[str]]()
    async for ranks in _names(engine, keys, generation):
        blocks += ([name + part for name in of_ranks for part in parts] for of_ranks in zip(*ranks, strict=True))
    return blocks


async def _names(
    engine: HostedEngine, keys: Sequence[str], generation: str | None = None, *, at_once: bool = False
) -> AsyncIterator[list[list[str]]]:
    """The objects of these keys, for each rank; of many keys piece by piece, each in a turn of the event loop.

    at_once: all of them together at the end.
    """
    if engine.tokens is not None:
        what = "storage is token-indexed: match token_ids; there are no keys to ask for"
        raise RequestError(what, code="token_ids_required")
    needed(engine.blocks)
    check_keys(keys)
    generation = engine.dispatcher.generation if generation is None else generation
    ranks = [worker.context.object_rank for worker in engine.workers]
    names: list[list[str]] = [[] for _ in ranks]
    async for piece in engine.shared.pieces.each(keys, PIECE):
        ids = engine.objects.ids(piece)
        for mine, rank in zip(names, ranks, strict=True):
            mine += engine.objects.names(generation, ids, rank)
        if not at_once:
            yield names
            names = [[] for _ in ranks]
    if at_once:
        yield names


async def match_tokens(engine: HostedEngine, path: TokenIds, start: int, salt: str = "") -> int:
    """How many blocks of a path, from block `start` on, every rank could load now. Raises like `match`."""
    if engine.tokens is None:
        raise RequestError("storage is not token-indexed: match keys", code="not_token_indexed")
    if salt:
        check_salt(salt, salts=engine.tokens.salts)
    blocks = len(path) // engine.dispatcher.limits.token_block
    if not 0 <= start <= blocks <= MAX_MATCH_KEYS:
        what = f"start must be 0 to the path's {blocks} blocks (at most {MAX_MATCH_KEYS}), not {start}"
        raise RequestError(what, code="bad_value")
    if engine.cache.missing:
        return 0
    found = await engine.tokens.match(path, start, engine.dispatcher.generation, salt)
    _looked_up(engine, blocks - start, found, (), None)
    return found


def locate(engine: HostedEngine, path: TokenIds, salt: str = "") -> dict[str, dict[str, int]]:
    """How many leading blocks of a path each node has in each medium. Raises RequestError."""
    index = engine.kv_events.up_to_date()
    if index is None:
        raise RequestError("this daemon keeps no open token index", code="no_token_index")
    block_size = engine.dispatcher.limits.token_block
    if len(path) // block_size > MAX_MATCH_KEYS:
        raise RequestError(f"the path has more than {MAX_MATCH_KEYS} blocks, the limit", code="bad_value")
    check_salt(salt, salts=True)
    return index.locate([block_hash(key) for key in path_keys(path, block_size, salt)])


def _looked_up(engine: HostedEngine, blocks: int, found: int, keys: Sequence[str], missing: int | None) -> None:
    """Note a look-up. keys: none of token-indexed storage. missing: the position of the first that is not there."""
    engine.shared.tasks.looked_up(engine.name, blocks, found)
    if keys:
        engine.shared.traffic.looked_up(engine.coordinator, keys, missing)


def needed(storage: Storage | None) -> Storage:
    """The daemon's storage of blocks by keys. Raises RequestError without one."""
    if storage is None:
        raise RequestError('this daemon has no storage tier (storage.backend = "none")', code="no_storage_tier")
    return storage


def check_keys(keys: Sequence[str]) -> None:
    """Raise RequestError if a request names too many keys."""
    if len(keys) > MAX_MATCH_KEYS:
        what = f"{len(keys)} keys, at most {MAX_MATCH_KEYS} can be named at once"
        raise RequestError(what, code="too_many_keys")


def keys_bytes(keys: Sequence[str]) -> int:
    """Memory of a request's keys."""
    return sum(map(len, keys)) + KEY_BYTES * len(keys)


async def _where(storage: Storage, names: Sequence[str]) -> dict[str, list[bool]]:
    """For each level by its name, which of these it has. Does not count as a use. Raises StorageError."""
    if storage.levels is not None:
        return await storage.levels.where(names)
    found = storage.index.find(names, None)
    return {storage.backend: await storage.exists(names) if found is None else found}
