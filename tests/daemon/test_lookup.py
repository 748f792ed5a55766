"""Which blocks could be loaded now: on every rank or not at all, and each way of asking where it cannot be answered."""

from __future__ import annotations

from socket import gethostname
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.dispatch import limits
from transferd.blocks.formats import object_format
from transferd.blocks.keys import path_keys
from transferd.blocks.layout import build_layout
from transferd.config import from_tree
from transferd.control.dispatcher import Dispatcher
from transferd.daemon import lookup
from transferd.errors import RequestError
from transferd.runtime.loop_turns import OneATurn
from transferd.storage.attention_store.open_index import TokenIndex
from transferd.storage.lru import Use
from transferd.tasks import TokenIds
from transferd.wire.kv_events import BlockStored, block_hash

CONFIG = from_tree({"cache": {"ranks": 2, "layers": 1, "kv_heads": 1, "head_dim": 8, "block_size": 4}})
FORMAT = object_format(CONFIG.storage, build_layout(CONFIG.geometry))


class Rank:
    """A rank whose part of storage has these names."""

    def __init__(self, rank: int) -> None:
        self.context = SimpleNamespace(object_rank=rank)
        self.names: set[str] = set()

    def put(self, *keys: str, generation: str = "g1") -> None:
        self.names |= set(FORMAT.names(generation, FORMAT.ids(keys), self.context.object_rank))


class Tokens:
    """A token-indexed storage. asked: (path, start, generation, salt)."""

    def __init__(self, *, salts: bool = True) -> None:
        self.salts = salts
        self.asked: list[tuple[list[int], int, str, str]] = []

    async def match(self, path: TokenIds, start: int, generation: str, salt: str) -> int:
        self.asked.append((list(path), start, generation, salt))
        return 7


class Levels:
    """A level of the storage. put: as by these ranks."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def put(self, *keys: str, ranks: tuple[int, ...] = (0, 1), generation: str = "g1") -> None:
        for rank in ranks:
            self.names |= set(FORMAT.names(generation, FORMAT.ids(keys), rank))


class World:
    """uses: what calls of storage's index were made for. known: whether it knows what storage has."""

    def __init__(self, *, storage: bool = True, tokens: Tokens | None = None, index: TokenIndex | None = None) -> None:
        self.uses: list[Use] = []
        self.known = True
        self.ranks = [Rank(0), Rank(1)]
        self.cache = SimpleNamespace(missing=[])
        self.dispatcher = Dispatcher(limits(token_block=4), generation="g1")
        self.levels = {"memory": Levels(), "file": Levels()}
        parts = {"levels": SimpleNamespace(where=self._where), "index": SimpleNamespace(find=self._find)}
        whole: Any = SimpleNamespace(**parts, exists=self._exists) if storage else None
        feed: Any = SimpleNamespace(has_followers=True, up_to_date=lambda: index, not_found=lambda _: None)
        nothing = SimpleNamespace(looked_up=lambda *_: None)
        self.engine: Any = SimpleNamespace(
            name="e",
            workers=self.ranks,
            dispatcher=self.dispatcher,
            coordinator=None,
            cache=self.cache,
            objects=FORMAT,
            blocks=whole,
            tokens=tokens,
            kv_events=feed,
            owner=None,
            shared=SimpleNamespace(pieces=OneATurn(), tasks=nothing, traffic=nothing),
        )

    def _find(self, names: list[str], use: Use) -> list[bool] | None:
        self.uses.append(use)
        return [any(name in rank.names for rank in self.ranks) for name in names] if self.known else None

    async def _exists(self, names: list[str]) -> list[bool]:
        return [any(name in rank.names for rank in self.ranks) for name in names]

    async def _where(self, names: list[str]) -> dict[str, list[bool]]:
        return {name: [one in level.names for one in names] for name, level in self.levels.items()}

    async def code(self, asking: Any) -> str:
        with pytest.raises(RequestError) as refused:
            await asking
        return refused.value.reason


@pytest.mark.parametrize("known", [True, False])
async def test_a_block_is_there_if_every_rank_has_its_part(known: bool) -> None:
    world = World()
    world.known = known
    world.ranks[0].put("a", "b", "c")
    world.ranks[1].put("a", "c", "d")
    assert await lookup.exists(world.engine, ["a", "b", "c", "d", "e"]) == [True, False, True, False, False]
    assert await lookup.match(world.engine, ["a", "b", "c"]) == 1
    assert await lookup.match(world.engine, ["a", "c", "b", "a"]) == 2
    assert await lookup.match(world.engine, []) == 0
    first, second = world.uses[:2]
    assert first is second, "one use for the look-up of all ranks"


async def test_objects_of_another_generation_or_rank_are_not_there() -> None:
    world = World()
    for rank in world.ranks:
        rank.put("a", generation="g0")
    world.ranks[1].names |= set(FORMAT.names("g1", FORMAT.ids(["b"]), 0))
    world.ranks[0].put("b")
    assert await lookup.exists(world.engine, ["a", "b"]) == [False, False]


async def test_a_rank_without_memory_can_load_nothing_and_storage_is_not_asked() -> None:
    world = World(tokens=Tokens())
    world.cache.missing = [1]
    assert await lookup.exists(world.engine, ["a", "b"]) == [False, False]
    assert await lookup.match_tokens(world.engine, TokenIds(range(8)), 0) == 0
    assert not world.uses


async def test_a_look_up_without_its_storage_names_the_right_one() -> None:
    assert (
        await World(tokens=Tokens()).code(lookup.exists(World(tokens=Tokens()).engine, ["a"])) == "token_ids_required"
    )
    world = World(storage=False)
    assert await world.code(lookup.match(world.engine, ["a"])) == "no_storage_tier"
    assert await world.code(lookup.match_tokens(world.engine, TokenIds([1]), 0)) == "not_token_indexed"
    with pytest.raises(RequestError) as refused:
        lookup.locate(world.engine, TokenIds([1]))
    assert refused.value.reason == "no_token_index"


async def test_one_request_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "MAX_MATCH_KEYS", 3)
    world = World(index=TokenIndex())
    assert await lookup.exists(world.engine, ["a"] * 3) == [False] * 3
    assert await world.code(lookup.exists(world.engine, ["a"] * 4)) == "too_many_keys"
    tokens = World(tokens=Tokens())
    assert await lookup.match_tokens(tokens.engine, TokenIds(range(15)), 3) == 7
    assert await tokens.code(lookup.match_tokens(tokens.engine, TokenIds(range(16)), 0)) == "bad_value"
    assert lookup.locate(world.engine, TokenIds(range(15))) == {}
    with pytest.raises(RequestError, match="more than 3 blocks"):
        lookup.locate(world.engine, TokenIds(range(16)))


@pytest.mark.parametrize("start", [-1, 3])
async def test_a_start_beyond_the_path_is_refused_with_its_value(start: int) -> None:
    world = World(tokens=Tokens())
    with pytest.raises(RequestError, match=rf"path's 2 blocks .*not {start}$"):
        await lookup.match_tokens(world.engine, TokenIds(range(11)), start)


async def test_tokens_are_matched_in_the_served_generation_with_a_salt_that_storage_keeps() -> None:
    tokens = Tokens()
    world = World(tokens=tokens)
    assert await lookup.match_tokens(world.engine, TokenIds([5, 6, 7, 8]), 1, "tenant") == 7
    assert tokens.asked == [([5, 6, 7, 8], 1, "g1", "tenant")]
    deaf = World(tokens=Tokens(salts=False))
    assert await deaf.code(lookup.match_tokens(deaf.engine, TokenIds([5]), 0, "tenant"))


async def test_a_path_is_located_by_its_blocks_in_every_medium() -> None:
    index = TokenIndex()
    world = World(index=index)
    path = TokenIds(range(12))
    plain, salted = ([block_hash(key) for key in path_keys(path, 4, salt)] for salt in ("", "tenant"))
    index.apply("near", BlockStored(plain[:2], None, [], 4, None, "GPU", None))
    index.apply("near", BlockStored(plain[2:], None, [], 4, None, "CPU", None))
    index.apply("far", BlockStored(salted, None, [], 4, None, "STORAGE", None))
    assert lookup.locate(world.engine, path) == {"near": {"GPU": 2, "any": 3}}
    assert lookup.locate(world.engine, path, "tenant") == {"far": {"STORAGE": 3, "any": 3}}


async def test_keys_are_located_in_each_level_as_far_as_every_rank_has_them_there() -> None:
    world = World()
    world.levels["memory"].put("a")
    world.levels["memory"].put("b", ranks=(0,))
    world.levels["file"].put("b", "c")
    world.levels["file"].put("a", generation="g0")
    assert await lookup.locate_keys(world.engine, ["a", "b", "c", "d"]) == {gethostname(): {"memory": 1, "any": 3}}
    world.levels["file"].put("a")
    assert await lookup.locate_keys(world.engine, ["a", "b", "c"]) == {
        gethostname(): {"memory": 1, "file": 3, "any": 3}
    }
    assert await lookup.locate_keys(world.engine, ["d"]) == {}
    assert await lookup.locate_keys(world.engine, []) == {}
    world.cache.missing = [0]
    assert await lookup.locate_keys(world.engine, ["a"]) == {}
    assert not world.uses, "it is no use of the blocks"
    assert await World(storage=False).code(lookup.locate_keys(World(storage=False).engine, ["a"])) == "no_storage_tier"
    assert await world.code(lookup.locate_keys(World(tokens=Tokens()).engine, ["a"])) == "token_ids_required"
