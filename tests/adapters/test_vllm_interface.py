"""The adapter and the fakes of test_vllm_scheduling.py against what vLLM's real classes have, without vLLM.

tests/machine/with_vllm/interface.json was recorded from the real ones, and `make vllm-check` compares it with them
again: a fake may only be as kind as the real thing was seen to be.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.adapters import test_vllm_scheduling as fakes
from transferd.adapters.common import link
from transferd.adapters.vllm import interfaces

ROOT = Path(__file__).parents[2]
RECORDED = json.loads((ROOT / "tests/machine/with_vllm/interface.json").read_text(encoding="ascii"))
ADAPTER = ROOT / "transferd/adapters/vllm"
SINCE_033 = {"supports_sleep_mode", "config_info", "config_info_keys"}  # 0.32 was recorded, and does not call them
OURS = [
    ("connector.py", "TransferdConnector", "KVConnectorBase_V1"),
    ("tier.py", "TransferdTier", "SecondaryTierManager"),
]


def methods(file: str, name: str) -> dict[str, list[str]]:
    """The public methods of a class of the adapter, and their parameters. Read, not imported: that needs vLLM."""
    tree = ast.parse((ADAPTER / file).read_text(encoding="utf-8"))
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    functions = [node for node in found.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    return {one.name: _parameters(one.args, one.decorator_list) for one in functions}


def _parameters(arguments: ast.arguments, decorators: list[ast.expr]) -> list[str]:
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
    names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    names += [one.arg for one in arguments.kwonlyargs]
    names += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    is_bound = any(isinstance(one, ast.Name) and one.id == "classmethod" for one in decorators)
    return names[1:] if is_bound else names


def both(base: str, file: str) -> dict[str, Any]:
    """What a class and, for the connector, the interface beside it have."""
    facts, more = RECORDED["classes"][base], RECORDED["classes"]["SupportsHMA"] if file == "connector.py" else {}
    merged: dict[str, Any] = facts | {"methods": more.get("methods", {}) | facts["methods"]}
    return merged


@pytest.mark.parametrize(("file", "name", "base"), OURS)
def test_every_method_overrides_one_of_vllm_with_the_same_parameters(file: str, name: str, base: str) -> None:
    real = both(base, file)
    ours = methods(file, name)
    assert set(ours) - SINCE_033 <= {*real["methods"], *real["fields"]}
    assert {one: ours[one] for one in ours if one in real["methods"]} == {
        one: real["methods"][one] for one in ours if one in real["methods"]
    }


@pytest.mark.parametrize(("file", "name", "base"), OURS)
def test_nothing_abstract_is_left(file: str, name: str, base: str) -> None:
    assert set(RECORDED["classes"][base]["abstract"]) <= set(methods(file, name))


@pytest.mark.parametrize(
    ("made", "real"),
    [(fakes.Block(1), "KVCacheBlock"), (fakes.FakePool(2), "BlockPool"), (fakes.Request("r", 8), "Request")],
    ids=["block", "pool", "request"],
)
def test_a_fake_has_nothing_that_the_real_one_lacks(made: Any, real: str) -> None:
    facts, fake = RECORDED["classes"][real], type(made)
    for_tests = {"pinned", "keys", "references"}  # what tests ask, and the adapter must not
    offered = {name for name in (*vars(made), *vars(fake)) if not name.startswith("_")} - for_tests
    assert offered <= {*facts["methods"], *facts["fields"]}
    for name, function in inspect.getmembers(fake, inspect.isfunction):
        if name in offered:
            assert list(inspect.signature(function).parameters) == facts["methods"][name]


def test_the_fake_step_has_the_fields_of_the_real_one() -> None:
    classes = RECORDED["classes"]
    assert {"scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens"} <= set(
        classes["SchedulerOutput"]["fields"]
    )
    assert {"req_id", "num_computed_tokens"} <= set(classes["NewRequestData"]["fields"])
    assert {"req_ids", "num_computed_tokens"} <= set(classes["CachedRequestData"]["fields"])
    assert classes["KVCacheManager"]["methods"]["get_block_ids"] == ["self", "request_id"]
    assert "block_pool" in classes["KVCacheManager"]["fields"]


def test_the_fake_link_is_called_as_the_real_one() -> None:
    for name in ("ask", "submit"):
        real = inspect.signature(getattr(link.Link, name)).parameters
        assert list(inspect.signature(getattr(fakes.FakeLink, name)).parameters) == list(real)


def test_the_version_that_was_recorded_is_the_tested_one() -> None:
    assert RECORDED["vllm"] in interfaces.TESTED


@pytest.mark.parametrize(
    ("files", "listed"),
    [(("tier.py",), interfaces.TIER), (("connector.py", "metrics.py"), interfaces.CONNECTOR)],
    ids=["tier", "connector"],
)
def test_whatever_is_imported_from_vllm_is_missed_by_name(files: tuple[str, ...], listed: Mapping[str, Any]) -> None:
    """Or an older vLLM ends in an ImportError of its own, and not in the one error that names version and remedy."""
    for file in files:
        for node in ast.parse((ADAPTER / file).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                known = {name.split(".")[0] for name in listed[str(node.module)]}
                assert {one.name for one in node.names} <= known, (file, node.module)
