"""docs/lmcache.md says what is so: its JSON is accepted, its keys exist, its version is the tested one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from tests.machine.with_lmcache.check import VERSION
from transferd.adapters import lmcache
from transferd.adapters.lmcache.settings import L2Settings, settings
from transferd.errors import ConfigError

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "lmcache.md").read_text(encoding="utf-8")


def test_the_json_to_paste_is_accepted_and_names_the_class() -> None:
    (text,) = re.findall(r"--l2-adapter '(.*)'", TEXT)
    said = json.loads(text)
    assert settings(said["adapter_params"]) == L2Settings(weights=said["adapter_params"]["weights"])
    assert (said["type"], said["module_path"], said["class_name"]) == ("plugin", lmcache.__name__, *lmcache.__all__)


def test_the_table_of_settings_has_every_key_with_its_default_and_no_other() -> None:
    table = TEXT.partition("## Settings")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([a-z_, ]+) \| (.+?) \|", table, re.MULTILINE)
    named = {name: default.strip("`") for names, default in rows for name in names.split(", ") if names != "key"}
    fields = {field.name: field.default for field in msgspec.structs.fields(L2Settings)}
    assert set(named) == set(fields)
    for name in ("buffer", "threads", "pin", "timeout", "load_timeout", "start_timeout"):
        assert named[name] == str(fields[name]).removesuffix(".0")


def test_the_version_that_is_tested_is_named() -> None:
    assert f"LMCache {VERSION}" in TEXT


@pytest.mark.parametrize(
    ("key", "value"),
    [("load_timeout", 0), ("pin", -1), ("threads", 0), ("threads", 65), ("buffer", "much"), ("buffer", 0), ("ttl", 1)],
)
def test_a_wrong_setting_is_one_line_that_names_it(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key) as caught:
        settings({key: value})
    assert "\n" not in str(caught.value)
