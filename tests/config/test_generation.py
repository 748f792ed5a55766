"""version.yaml: the one field that is read, in every way it may be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from transferd.config import StorageSection, from_tree
from transferd.config.generation import configured_generation, generation_of
from transferd.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "generation"),
    [
        ("version: RL-STEP03-20260801-5d1f\n", "RL-STEP03"),
        ("version: RL-STEP03", "RL-STEP03"),
        ("version: 'RL-STEP03-x'\n", "RL-STEP03"),
        ('version: "RL-STEP03-x"  # of tonight\n', "RL-STEP03"),
        ('"version": RL-STEP03-x # of tonight\n', "RL-STEP03"),
        ("step: 3\nversion :   RL-STEP03-x   \nmore: {a: 1}\n", "RL-STEP03"),
        ("---\r\nversion: RL-STEP03-x\r\n", "RL-STEP03"),
        ("version: v1", "v1"),
        ("version: 7", "7"),
        ("model_version: no\nnested:\n  version: no\nversion: a-b-c", "a-b"),
    ],
)
def test_the_first_two_parts_of_the_version_are_the_generation(tmp_path: Path, text: str, generation: str) -> None:
    file = tmp_path / "version.yaml"
    file.write_bytes(text.encode())
    assert generation_of(file) == generation
    assert configured_generation(StorageSection(version_file=str(file))) == generation


@pytest.mark.parametrize(
    "text", ["", "version:\n", "version: # none\n", "version: ''\n", "  version: x\n", "version:x\x00y"]
)
def test_a_file_without_a_version_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "version.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"storage\.version_file: the file has no line"):
        generation_of(file)


@pytest.mark.parametrize("name", ["absent.yaml", "", "nul\0.yaml"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        generation_of(tmp_path / name)


def test_without_a_file_the_configuration_says_it_and_both_together_are_refused() -> None:
    assert configured_generation(StorageSection(generation="g")) == "g"
    with pytest.raises(ConfigError, match=r"storage\.generation"):
        from_tree({"storage": {"generation": "g", "version_file": "/model/version.yaml"}})
