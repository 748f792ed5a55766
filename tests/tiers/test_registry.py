"""Device tiers by name: each is under the contracts, and in the reference."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tiers import test_contract, test_failures_contract
from transferd.blocks.layout.families import FAMILIES
from transferd.config import from_tree
from transferd.errors import ConfigError
from transferd.tiers.registry import DEVICES, check_device

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", DEVICES)
def test_each_device_is_under_both_contracts_and_in_the_reference(name: str) -> None:
    class_name = DEVICES[name].partition(":")[2]
    for suite in (test_contract, test_failures_contract):
        classes = [one for one in vars(suite).values() if isinstance(one, type)]
        bases = {base.__name__ for one in classes for base in one.__mro__}
        assert class_name in bases, f"{suite.__name__} does not make one"
    [row] = re.findall(r"(?m)^\| `cache.device` \|.*$", (ROOT / "docs" / "configuration.md").read_text())
    assert f"`{name}`" in row


@pytest.mark.parametrize("name", FAMILIES)
def test_each_attention_family_is_copied_by_every_device_and_in_the_reference(name: str) -> None:
    copied = {cache.attention for cache in test_contract.LAYOUTS.values()} | {"pages"}  # which test_pages.py has
    assert name in copied, "add a layout to LAYOUTS of tests/tiers/test_contract.py"
    [row] = re.findall(r"(?m)^\| `cache.attention` \|.*$", (ROOT / "docs" / "configuration.md").read_text())
    assert f"`{name}`" in row


def test_an_unknown_device_is_one_line_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError) as refusal:
        check_device(from_tree({"cache": {"device": "tpu"}}))
    expected = f"expected one of {', '.join(DEVICES)}, or package.module:Class"
    assert str(refusal.value) == f"cache.device: {expected} ('tpu')"


@pytest.mark.parametrize(
    ("device", "problem"),
    [
        (":Thing", "fails to load"),
        ("transferd.tiers.nothing:Thing", "this installation has no module transferd.tiers.nothing"),
        ("transferd.tiers.shm:SharedSegment", "has no DeviceTier class 'SharedSegment'"),
        ("transferd.tiers.shm:", "has no DeviceTier class ''"),
    ],
)
def test_a_device_that_cannot_be_had_is_one_line_with_its_name(device: str, problem: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_device(from_tree({"cache": {"device": device}}))
    text = str(refusal.value)
    assert text.startswith("cache.device: ")
    assert problem in text
    assert repr(device) in text
