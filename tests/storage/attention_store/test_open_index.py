"""The open token index: what is where, and how far a path can be followed."""

from __future__ import annotations

from transferd.blocks.keys import block_keys, path_keys
from transferd.storage.attention_store.open_index import TokenIndex
from transferd.tasks import TokenIds
from transferd.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored


def stored(medium: str, *hashes: int) -> BlockStored:
    return BlockStored(list(hashes), None, [], 0, None, medium, None)


def test_leading_blocks_are_counted_for_each_node_and_medium() -> None:
    index = TokenIndex()
    index.apply("n1", stored("GPU", 1, 2, 4))
    index.apply("n1", stored("STORAGE", 3, 1))
    index.apply("n2", stored("CPU", 2, 3))
    index.apply("n3", stored("STORAGE", 1, 2, 3, 4, 5))
    assert index.locate([1, 2, 3, 4]) == {
        "n1": {"GPU": 2, "STORAGE": 1, "any": 4},
        "n3": {"STORAGE": 4, "any": 4},
    }
    assert index.locate([5, 9]) == {"n3": {"STORAGE": 1, "any": 1}}
    assert index.locate([]) == {}


def test_a_withdrawn_block_is_not_found_and_other_nodes_keep_theirs() -> None:
    index = TokenIndex()
    for node in ("n1", "n2"):
        index.apply(node, stored("GPU", 1, 2))
    index.apply("n1", BlockRemoved([1, 7], "GPU"))
    index.apply("n1", BlockRemoved([2], "CPU"))
    index.apply("unknown", BlockRemoved([2], "CPU"))
    assert index.locate([1]) == {"n2": {"GPU": 1, "any": 1}}
    assert index.locate([2]) == {"n1": {"GPU": 1, "any": 1}, "n2": {"GPU": 1, "any": 1}}
    index.apply("n2", AllBlocksCleared())
    assert index.locate([2]) == {"n1": {"GPU": 1, "any": 1}}
    assert index.statistics() == {"n1": {"GPU": 1}}


def test_the_keys_of_a_path_are_its_chained_block_keys_of_full_blocks() -> None:
    tokens = TokenIds(list(range(18)))
    assert path_keys(tokens, 4) == block_keys(tokens, 4, partial=False) == block_keys(tokens, 4)[:4]
    assert path_keys(tokens, 4, "s") != path_keys(tokens, 4)
    assert path_keys(TokenIds([7] * 4), 4) == block_keys([7] * 4, 4)


def test_each_engine_of_a_node_has_its_own_blocks_and_clears_its_own() -> None:
    index = TokenIndex()
    index.apply("n", stored("GPU", 1, 2), 0)
    index.apply("n", stored("GPU", 1), 1)
    index.apply("n", stored("CPU", 2, 3), 1)
    assert index.locate([1, 2, 3]) == {"n": {"GPU": 2, "any": 3}}, "no engine has 2 and 3 in its memory of one kind"
    assert (index.blocks_of("n"), index.statistics()) == (5, {"n": {"GPU": 3, "CPU": 2}})
    index.apply("n", BlockRemoved([1], "GPU"), 1)
    index.apply("n", AllBlocksCleared(), 1)
    assert index.locate([1, 2, 3]) == {"n": {"GPU": 2, "any": 2}}
    index.apply("n", AllBlocksCleared(), 0)
    assert index.statistics() == {}
