"""docs/sglang.md says what is so: its JSON is accepted, its keys exist, its version is the tested one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec

from tests.machine.with_sglang import check
from transferd.adapters import sglang
from transferd.adapters.sglang.settings import HiCacheSettings, LinkerSettings, checked, settings

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "sglang.md").read_text(encoding="utf-8")


def test_the_json_to_paste_is_accepted_and_names_the_class() -> None:
    (text,) = re.findall(r"--hicache-storage-backend-extra-config '(.*)'", TEXT)
    said = json.loads(text)
    assert settings(said) == HiCacheSettings()
    assert said["allocator"] == "shm"
    (text,) = re.findall(r"--unified-cache-external-linker-config '(.*)'", TEXT)
    linker = json.loads(text)
    assert checked(linker.get("linker_extra_config", {}), LinkerSettings) == LinkerSettings()
    assert [said["class_name"], linker["linker"]] == sglang.__all__
    assert said["module_path"] == linker["linker_module_path"] == sglang.__name__


def test_the_table_of_settings_has_every_key_and_no_other() -> None:
    table = TEXT.partition("## Settings")[2].partition("\n## ")[0]
    named = {name for line in re.findall(r"^\| ([a-z_, ]+) \|", table, re.MULTILINE) for name in line.split(", ")} - {
        "key"
    }
    assert named == {field.name for field in msgspec.structs.fields(HiCacheSettings)}


def test_the_version_that_is_tested_is_named() -> None:
    (version,) = [one.partition("==")[2] for one in check.WITHOUT_DEPENDENCIES if one.startswith("sglang==")]
    assert f"SGLang {version}" in TEXT
