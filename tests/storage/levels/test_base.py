"""A stack and a store of divided blocks have the same methods, and the contract of every backend stays small."""

from __future__ import annotations

import inspect

import pytest

from transferd.storage.base import Index, PoolNode, Storage
from transferd.storage.divided import DividedStorage
from transferd.storage.levels.base import Levels
from transferd.storage.levels.stack import LevelsStorage


def methods(contract: type) -> set[str]:
    """The public methods that a contract declares itself."""
    return {name for name, part in vars(contract).items() if inspect.isroutine(part) and not name.startswith("_")}


@pytest.mark.parametrize("contract", [Index, Levels, PoolNode])
def test_no_method_stands_in_two_contracts(contract: type) -> None:
    assert not methods(contract) & methods(Storage)


def test_a_block_of_several_objects_has_levels_as_one_object_has() -> None:
    abstract = {name for name in vars(Levels) if not name.startswith("_")}
    for made in (LevelsStorage, DividedStorage):
        assert not inspect.isabstract(made)
        assert {name for name in abstract if name in vars(made)} == abstract
    asked = {"find", "stored", "look", "tell_departures"}
    assert asked <= set(vars(DividedStorage)), "names of blocks mean nothing to the storage behind"
