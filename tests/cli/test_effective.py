"""What check-config says besides the configuration: memory, and where each setting comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from transferd.cli.effective import comments
from transferd.config import from_tree, load, origins
from transferd.config.loading import takes_effect
from transferd.daemon.preflight import build
from transferd.runtime.compat import tomllib


def test_each_setting_that_is_not_the_default_names_its_source(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text(
        '[cache]\nranks = 4\ndevices = [0, 1, 2, 3]\nlayers = 4\n[storage]\nbackend = "none"\n[log]\nlevel = "debug"\n'
    )
    env = {"TRANSFERD_HOST__STAGING": "128MiB", "TRANSFERD_LOG__LEVEL": "error"}
    env["FILE_BACKEND_STORAGE_DIR"] = "/var/lib/transferd/blocks"  # the default
    overrides = ["cache.host_blocks=7", "log.format=console"]
    config = load(file, overrides=overrides, env=env)
    told = origins(file, overrides=overrides, env=env)
    text = comments(config, build(config).sizes, told)
    lines = text.partition("and their sources:\n")[2].splitlines()
    assert lines == [
        f"# cache.ranks = 4   {file}",
        f"# cache.devices = [0, 1, 2, 3]   {file}",
        "# cache.host_blocks = 7   --set",
        '# host.staging = "128MiB"   TRANSFERD_HOST__STAGING',
        f'# storage.backend = "none"   {file}',
        '# log.level = "error"   TRANSFERD_LOG__LEVEL',
        '# log.format = "console"   --set',
    ]
    assert told["storage.file.path"].startswith("the environment of FastDeploy")


def test_memory_is_listed_by_rank_by_tier_and_in_total() -> None:
    tree = {"cache": {"ranks": 4}, "storage": {"backend": "mooncake", "mooncake": {"master_server_addr": "h:1"}}}
    config = from_tree(tree)
    sizes = build(config).sizes
    rows = {line[2:30].strip(): line[30:].split() for line in comments(config, sizes, {}).splitlines()}
    assert rows["device cache, in /dev/shm"] == ["8.0", "MiB", "32.0", "MiB"]
    assert rows["host tier"] == ["16.0", "MiB", "64.0", "MiB"]
    assert rows["staging"] == ["64.0", "MiB", "256", "MiB"]
    assert rows["lent to a Mooncake pool"] == ["1.1", "GiB"]
    assert rows["in all"][2:] == [f"({sizes.memory}", "bytes)"]


def test_a_configuration_of_defaults_says_so_and_all_of_it_is_toml() -> None:
    config = from_tree({})
    text = comments(config, build(config).sizes, {})
    assert "Every setting has its default." in text
    assert tomllib.loads(text) == {}


@pytest.mark.parametrize(
    ("storage", "keys"),
    [
        ({}, "log.level"),
        ({"backend": "file"}, "log.level, storage.file.capacity, storage.file.reserve"),
        (
            {"levels": ["memory", "file"], "level": {"file": {"promote": 1}}},
            "log.level, storage.memory.capacity, storage.file.reserve, storage.level.file.promote",
        ),
    ],
)
def test_settings_that_a_reload_changes_are_named(storage: dict[str, Any], keys: str) -> None:
    config = from_tree({"storage": storage})
    text = comments(config, build(config).sizes, {})
    (line,) = (line for line in text.splitlines() if "a reload (SIGHUP) changes" in line)
    named = line.partition(": ")[2].removesuffix(". The others need a restart.").split(", ")
    assert set(keys.split(", ")) <= set(named)
    assert all(takes_effect(key) for key in named)
    assert ("storage.memory.capacity" in named) == ("memory" in config.storage.backends)


def test_a_retired_setting_is_named_with_its_source() -> None:
    given = ["cuda.grid=4", "cuda.batches=false"]
    lines = comments(config := load(overrides=given, env={}), build(config).sizes, origins(overrides=given, env={}))
    assert "# cuda.grid (--set) has no effect any more: the kind of GPU decides" in lines
    assert "# cuda.batches = false   --set" in lines.splitlines()


def test_the_bounds_of_registering_engines_are_listed() -> None:
    trees: list[dict[str, Any]] = [{}, {"cache": {}}]
    for tree in trees:
        config = from_tree(tree | {"engines": {"host_memory": "3GiB", "host_memory_each": "1GiB"}})
        told = "# Engines that register: 3.0 GiB of host memory for all of them, at most 1.0 GiB for each."
        assert told in comments(config, build(config).sizes, {}).splitlines()
