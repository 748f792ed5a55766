"""How a node joins a pool: the configuration first, then FastDeploy's file or variables, then Mooncake's own names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from transferd.config import MooncakeStorageSection, load
from transferd.errors import ConfigError
from transferd.storage.mooncake.join import check_section


def joining_with(env: dict[str, str], *overrides: str) -> MooncakeStorageSection:
    """What a daemon of this environment joins with."""
    keys = [f"storage.mooncake.{override}" for override in overrides]
    section = load(overrides=["storage.backend=mooncake", *keys], env=env).storage.mooncake
    check_section(section)
    return section


def test_fastdeploys_variables_are_honoured_and_toml_wins() -> None:
    env = {
        "MOONCAKE_MASTER_SERVER_ADDR": "m:1",
        "MOONCAKE_PROTOCOL": "rdma",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "33554432",
    }
    joining = joining_with(env, "master_server_addr=toml:2")
    assert (joining.master_server_addr, joining.protocol, joining.global_segment_size) == ("toml:2", "rdma", 33554432)


def test_a_setting_that_equals_the_default_still_wins_over_a_variable() -> None:
    joining = joining_with({"MOONCAKE_PROTOCOL": "rdma"}, "master_server_addr=toml:2", "protocol=tcp")
    assert joining.protocol == "tcp"


def test_mooncakes_own_names_are_taken_after_fastdeploys() -> None:
    env = {"MOONCAKE_MASTER": "own:1", "MOONCAKE_DEVICE": "mlx5_0", "MOONCAKE_RDMA_DEVICES": "mlx5_1"}
    joining = joining_with(env)
    assert (joining.master_server_addr, joining.rdma_devices) == ("own:1", "mlx5_1")


def test_a_config_file_replaces_the_variables(tmp_path: Path) -> None:
    file = tmp_path / "mooncake.json"
    file.write_text(json.dumps({"master_server_addr": "file:1", "local_buffer_size": 5}))
    env = {"MOONCAKE_CONFIG_PATH": str(file), "MOONCAKE_PROTOCOL": "rdma"}
    joining = joining_with(env)
    assert (joining.master_server_addr, joining.protocol, joining.local_buffer_size) == ("file:1", "tcp", 5)


@pytest.mark.parametrize(
    "env",
    [
        {"MOONCAKE_PROTOCOL": "carrier pigeon"},
        {"MOONCAKE_GLOBAL_SEGMENT_SIZE": "much"},
        {"MOONCAKE_CONFIG_PATH": "/nonexistent"},
    ],
)
def test_a_bad_value_is_named(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="MOONCAKE_"):
        joining_with(env)


@pytest.mark.parametrize("size", [1, 16 * 1024**2 - 1])
def test_a_segment_that_mooncake_would_refuse_is_refused_before_anything_is_asked(size: int) -> None:
    with pytest.raises(ConfigError, match=r"global_segment_size: must be 0 or at least 16MiB"):
        joining_with({"MOONCAKE_GLOBAL_SEGMENT_SIZE": str(size)}, "master_server_addr=m:1")


@pytest.mark.parametrize("size", [0, 16 * 1024**2])
def test_a_node_may_lend_nothing_or_a_whole_segment(size: int) -> None:
    env = {"MOONCAKE_GLOBAL_SEGMENT_SIZE": str(size)}
    assert joining_with(env, "master_server_addr=m:1").global_segment_size == size


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [("lender", "10.0.0.1", "host:port"), ("segment_per_rank", "true", "itself"), ("drain_at_stop", "60", "itself")],
)
def test_where_another_process_lends_what_needs_a_lending_daemon_is_refused(key: str, value: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"storage.mooncake.{key}: .*{problem}"):
        joining_with({}, "master_server_addr=m:1", "lender=10.0.0.1:17999", f"{key}={value}")
