"""Variables of FastDeploy, Mooncake and AttentionStore: they fill what nobody configured, and a wrong one is named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from transferd.config import from_tree, load
from transferd.config.environment import LONGEST_FILE, fold, open_regular, read_file
from transferd.errors import ConfigError


def test_fastdeploys_directory_counts_where_nothing_else_says_it(tmp_path: Path) -> None:
    theirs = {"FILE_BACKEND_STORAGE_DIR": "/tmp/fastdeploy"}
    assert load(env=theirs).storage.file.path == "/tmp/fastdeploy"
    file = tmp_path / "c.toml"
    file.write_text('[storage.file]\npath = "/ours"\n')
    assert load(file, env=theirs).storage.file.path == "/ours"
    assert load(env=theirs | {"TRANSFERD_STORAGE__FILE__PATH": "/env"}).storage.file.path == "/env"
    assert load(env={"FILE_BACKEND_STORAGE_DIR": ""}).storage.file.path == "/var/lib/transferd/blocks"
    file.write_text('[storage]\nfile = "no section"\n')
    with pytest.raises(ConfigError, match=r"storage\.file"):
        load(file, env=theirs)


def folded(tree: dict[str, Any], **env: str) -> dict[str, Any]:
    fold(tree, env)
    return tree


@pytest.mark.parametrize("backend", ["file", "memory", "none", None])
def test_variables_of_a_storage_that_is_not_used_are_not_even_read(backend: str | None) -> None:
    tree = {"storage": {"backend": backend}} if backend else {}
    before = json.dumps(tree)
    wrong = {"MOONCAKE_PROTOCOL": "udp", "MOONCAKE_CONFIG_PATH": "/nowhere", "AS_WRITE_SLICE_BLOCK_NUM": "many"}
    assert json.dumps(folded(tree, **wrong)) == before


def test_mooncakes_own_names_count_after_ours() -> None:
    tree = folded(
        {"storage": {"backend": "mooncake", "mooncake": {"protocol": "tcp"}}},
        MOONCAKE_PROTOCOL="RDMA",
        MOONCAKE_MASTER="theirs:1",
        MOONCAKE_MASTER_SERVER_ADDR="ours:1",
        MOONCAKE_DEVICE="mlx5_0",
        MOONCAKE_GLOBAL_SEGMENT_SIZE="1073741824",
        MOONCAKE_LOCAL_BUFFER_SIZE="1.5GiB",
    )
    assert tree["storage"]["mooncake"] == {
        "protocol": "tcp",
        "master_server_addr": "ours:1",
        "rdma_devices": "mlx5_0",
        "global_segment_size": 2**30,
        "local_buffer_size": 3 * 2**29,
    }


def test_mooncakes_file_replaces_its_variables(tmp_path: Path) -> None:
    file = tmp_path / "mooncake.json"
    settings = {"master_server_address": "file:1", "protocol": "RDMA", "global_segment_size": 4096, "unknown": [1]}
    file.write_text(json.dumps(settings))
    tree: dict[str, Any] = {"storage": {"backend": "attention_store", "attention_store": {"data": "mooncake"}}}
    folded(tree, MOONCAKE_CONFIG_PATH=str(file), MOONCAKE_LOCAL_HOSTNAME="ignored")
    assert tree["storage"]["mooncake"] == {
        "master_server_addr": "file:1", "protocol": "rdma", "global_segment_size": 4096
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[1]", "MOONCAKE_CONFIG_PATH: does not hold a JSON object"),
        ("{", "MOONCAKE_CONFIG_PATH: is not a readable JSON file"),
        ("[" * 50_000, "MOONCAKE_CONFIG_PATH: is not a readable JSON file"),
        ("{}" + " " * LONGEST_FILE, "MOONCAKE_CONFIG_PATH: is not a readable JSON file"),
        ('{"protocol": "udp"}', "MOONCAKE_CONFIG_PATH, protocol: expected tcp or rdma"),
        ('{"metadata_server": 7}', "MOONCAKE_CONFIG_PATH, metadata_server: expected text"),
        ('{"global_segment_size": "4 pounds"}', "MOONCAKE_CONFIG_PATH, global_segment_size: expected a size"),
        (None, "MOONCAKE_CONFIG_PATH: is not a readable JSON file"),
    ],
)
def test_a_file_of_mooncake_that_cannot_be_used_is_named_with_its_key(
    tmp_path: Path, content: str | None, problem: str
) -> None:
    file = tmp_path / "mooncake.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError) as refused:
        folded({"storage": {"backend": "mooncake"}}, MOONCAKE_CONFIG_PATH=str(file))
    assert str(refused.value).startswith(problem)


def test_attention_stores_variables_fill_the_section_and_name_the_pod() -> None:
    tree: dict[str, Any] = {"storage": {"backend": "attention_store", "model": "/models/llama-7b/"}}
    folded(tree, AS_WRITE_SLICE_BLOCK_NUM="16", AS_WRITE_SLICE_TIMEOUT="0.5", FD_AS_ONLY_FLUSH="1", AS_POD_NAME="pod-3")
    assert tree["storage"]["attention_store"] == {
        "slice_blocks": 16,
        "slice_timeout": 0.5,
        "only_flush": True,
        "pod_name": "pod-3_mixed_0",
        "namespace": "llama-7b",
    }
    alone: dict[str, Any] = {"storage": {"backend": "attention_store", "attention_store": {"pod_name": ""}}}
    section = folded(alone, AS_POD_NAME="pod", ENABLE_EP_DP_IN_FD="0", AS_NAMESPACE="n")["storage"]["attention_store"]
    assert section == {"pod_name": "pod", "namespace": "n"}


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("AS_WRITE_SLICE_BLOCK_NUM", "0"), ("AS_WRITE_SLICE_BLOCK_NUM", "٣"), ("AS_WRITE_SLICE_BLOCK_NUM", "9" * 10),
        ("AS_WRITE_SLICE_TIMEOUT", "0"), ("AS_WRITE_TOTAL_TIMEOUT", "inf"), ("AS_WRITE_TOTAL_TIMEOUT", "nan"),
        ("FD_AS_ONLY_FLUSH", "yes"), ("ENABLE_EP_DP_IN_FD", "2"),
    ],
)  # fmt: skip
def test_a_variable_that_does_not_parse_is_named_with_its_value(variable: str, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        folded({"storage": {"backend": "attention_store"}}, **{variable: text})
    assert str(refused.value).startswith(f"{variable}: expected ")
    assert f"({text!r})" in str(refused.value)


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"storage": 7}, "storage"), ({"storage": {"file": "x"}}, "storage.file"),
        ({"storage": {"backend": "attention_store", "attention_store": 1}}, "storage.attention_store"),
    ],
)  # fmt: skip
def test_a_section_that_is_no_table_is_left_to_the_one_that_reports_it(tree: dict[str, Any], key: str) -> None:
    folded(tree, FILE_BACKEND_STORAGE_DIR="/d", AS_NAMESPACE="n")
    with pytest.raises(ConfigError, match=rf"^{key}: expected `object`"):
        from_tree(tree)


def test_a_file_that_could_block_or_never_end_is_not_read(tmp_path: Path) -> None:
    fifo, directory, large = tmp_path / "fifo", tmp_path / "d", tmp_path / "large"
    os.mkfifo(fifo)
    directory.mkdir()
    large.write_bytes(b"x" * 11)
    for path in (fifo, directory, Path("/dev/zero")):
        with pytest.raises((ValueError, OSError)):
            read_file(path, 10)
    with pytest.raises(ValueError, match="larger than 10 bytes"):
        read_file(large, 10)
    assert read_file(large, 11) == b"x" * 11
    with open_regular(large) as file:
        assert file.read() == b"x" * 11
