"""FastDeploy's command for a transfer process becomes the daemon's configuration, or one line that says why not."""

from __future__ import annotations

import json
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from transferd.adapters.fastdeploy import companion
from transferd.adapters.fastdeploy.arguments import (
    RoutingShape,
    configuration,
    is_transfer_process,
    read_command,
    unknown_flags,
)
from transferd.adapters.fastdeploy.companion import differences, filled_in, find_or_start, named_endpoint
from transferd.client.launch import running
from transferd.client.sync_client import SyncClient
from transferd.config.loading import from_tree
from transferd.errors import ConfigError

# As release/2.6 makes it (prefix_cache_manager.py, launch_cache_manager); {more} and {model} are what tests vary.
COMMAND = (
    "FLAGS_allocator_strategy=auto_growth CUDA_VISIBLE_DEVICES=0,1 NCCL_MAX_NCHANNELS=1 NCCL_BUFFSIZE=0"
    " FD_ENABLE_SWAP_SPACE_CLEARING=0 FD_AS_ONLY_FLUSH={flush} /usr/bin/python3 /x/cache_transfer_manager.py"
    " --device_id {device} --rank {rank} --splitwise_role {role} --num_layers 3 --mp_num 2 --cache_dtype {dtype}"
    " --key_cache_shape {key} {value} --cache_queue_port 9100 --enable_splitwise 0 --pod_ip 127.0.0.1"
    " --engine_worker_queue_port 9200 --num_cpu_blocks {cpu} --protocol ipc --local_data_parallel_id 1 --rdma_port 0"
    " --speculative_config '{spec}' --default_dtype 'bfloat16' {storage} --write_policy write_through"
    " --max_model_len 256 --model_path {model} {more} >/log/launch_cache_transfer_manager_0.log 2>&1"
)


def command(**values: Any) -> str:
    given = {
        "flush": 0, "device": 4, "rank": 0, "role": "mixed", "dtype": "bfloat16", "key": "64,2,16,8", "cpu": 32,
        "value": "--value_cache_shape 64,2,16,8", "spec": "{}", "storage": "", "model": "/models/some-model/",
        "more": "",
    }  # fmt: skip
    return COMMAND.format(**given | values)


def derived(**values: Any) -> dict[str, Any]:
    group = [read_command(command(rank=rank, device=4 + rank, **values)) for rank in range(2)]
    sections = configuration(group, device="shm")
    from_tree(sections)  # a daemon takes it
    return sections


def test_every_flag_is_where_the_daemon_looks_for_it() -> None:
    sections = derived(storage="--kvcache_storage_backend mooncake --create_cache_tensor")
    assert sections == {
        "cache": {
            "ranks": 2, "devices": [4, 5], "device": "shm", "ownership": "create", "role": "mixed", "layers": 3,
            "dtype": "bfloat16", "device_blocks": 64, "host_blocks": 32, "mtp_layers": 0, "attention": "gqa",
            "kv_heads": 2, "block_size": 16, "head_dim": 8,
        },
        "storage": {"backend": "mooncake", "model": "some-model"},
    }  # fmt: skip
    arguments = read_command(command())
    assert (arguments.cache_queue_port, arguments.engine_worker_queue_port) == (9100, 9200)
    assert arguments.data_parallel_id == 1
    assert arguments.visible_devices == {"CUDA_VISIBLE_DEVICES": "0,1"}


def test_without_a_creating_transfer_process_workers_create() -> None:
    sections = derived()
    assert sections["cache"]["ownership"] == "attach"
    assert sections["storage"]["backend"] == "none"


def test_no_value_shape_is_mla() -> None:
    cache = derived(key="64,1,64,576", value="")["cache"]
    assert cache["attention"] == "mla"
    assert cache["kv_lora_rank"] + cache["qk_rope_head_dim"] == 576


def test_scales_mtp_flushes_and_versions(tmp_path: Path) -> None:
    (tmp_path / "version.yaml").write_text("version: RL-STEP01-x\n")
    spec = json.dumps({"method": "mtp", "num_extra_cache_layer": 1, "num_gpu_block_expand_ratio": 1.5})
    sections = derived(dtype="block_wise_fp8", spec=spec, model=tmp_path)
    assert sections["cache"]["scale_dtype"] == "bfloat16"
    assert (sections["cache"]["mtp_layers"], sections["cache"]["mtp_blocks"]) == (1, 96)
    assert sections["storage"]["version_file"] == str(tmp_path / "version.yaml")
    sections = derived(flush=1, storage="--kvcache_storage_backend attention_store", role="prefill")
    assert sections["storage"]["attention_store"] == {"only_flush": True, "splitwise_role": "prefill", "dp_id": 1}


REPLAY = (
    '--routing_replay_config \'{"enable_routing_replay": true, "num_moe_layers": 3, "moe_top_k": 2,'
    ' "routing_dtype": "uint16"}\''
)


def test_routing_replay_is_known_by_its_shape() -> None:
    assert read_command(command(more=REPLAY)).routing == RoutingShape(16, 3, 2, "uint16")
    for nothing in ("", REPLAY.replace("true", "false"), REPLAY.replace('"moe_top_k": 2', '"moe_top_k": 0')):
        assert read_command(command(more=nothing)).routing is None


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"value": "--value_cache_shape 64,2,16,4"}, "value_cache_shape: in layers 0 to 2, as .* differs"),
        ({"key": "64,2,16"}, "key_cache_shape: must be blocks,heads,block_size,dim"),
        ({"more": "--routing_replay_config '{\"enable_routing_replay\": true}'"}, "no usable layers, experts and type"),
        ({"more": REPLAY, "storage": "--kvcache_storage_backend attention_store"}, "no place for the routing"),
        ({"spec": "[]"}, "speculative_config: is not a JSON object"),
        ({"value": "", "dtype": "block_wise_fp8"}, "cache_dtype: transferd does not move the scales of latent blocks"),
        ({"cpu": "many"}, "num_cpu_blocks: is not a number"),
    ],
)
def test_an_unsupported_cache_fails_with_one_line(values: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        derived(**values)
    assert "\n" not in str(caught.value)


def test_other_commands_are_left_alone() -> None:
    assert is_transfer_process(command())
    assert not is_transfer_process("python /x/cache_messager.py --rank 0")
    assert not is_transfer_process("less cache_transfer_manager.py.log")
    assert not is_transfer_process(None)


def test_a_command_in_words_is_the_same_command() -> None:
    words = shlex.split(command())
    assert is_transfer_process(words)
    assert read_command(words) == read_command(command())


def test_unknown_flags_are_reported() -> None:
    assert unknown_flags(command(storage="--kvcache_storage_backend file --create_cache_tensor")) == []
    assert unknown_flags(command(more="--new_thing 7 --dry")) == ["dry", "new_thing"]


@pytest.mark.parametrize("spec", ['{"num_extra_cache_layer": null}', '{"num_gpu_block_expand_ratio": null}'])
def test_a_null_of_the_speculative_configuration_is_the_default(spec: str) -> None:
    assert derived(spec=spec) == derived()


def test_port_and_dp_stand_for_the_groups_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFERD_ENDPOINT", "ipc:///run/{port}-{dp}.sock")
    assert named_endpoint(9100, 1) == "ipc:///run/9100-1.sock"
    with pytest.raises(ConfigError, match="filled in"):
        filled_in("ipc:///{what}", 1, 1)


def test_a_daemon_that_runs_already_is_used_if_it_is_configured_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    creating = "--kvcache_storage_backend file --create_cache_tensor"
    asked = derived(storage=creating)
    with running({**asked, "metrics": {"listen": ""}}, tmp_path) as daemon:
        monkeypatch.setenv("TRANSFERD_ENDPOINT", daemon.endpoint)
        found = find_or_start(asked, port=9200, data_parallel_id=1)
        assert (found.endpoint, found.process) == (daemon.endpoint, None)
        other = derived(cpu=33, key="64,2,16,16", value="--value_cache_shape 64,2,16,16", storage=creating)
        with pytest.raises(ConfigError) as caught:
            find_or_start(other, port=9200, data_parallel_id=1)
        for difference in ("cache.host_blocks is 32, FastDeploy needs 33", "cache.head_dim is 8, FastDeploy needs 16"):
            assert difference in str(caught.value)
        assert "\n" not in str(caught.value)
        assert "or set TRANSFERD_ENDPOINT to another address" in str(caught.value)


def test_a_group_registers_at_a_daemon_without_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no [cache], so every single setting would differ."""
    monkeypatch.delenv("TRANSFERD_CACHE__DEVICE", raising=False)
    with running({}, tmp_path) as daemon:
        monkeypatch.setenv("TRANSFERD_ENDPOINT", daemon.endpoint)
        for storage in ("", "--kvcache_storage_backend file"):
            found = find_or_start(derived(storage=storage), port=9200, data_parallel_id=1)
            assert (found.endpoint, found.registers, found.process) == (daemon.endpoint, True, None)
        with pytest.raises(ConfigError, match=r"has no \[cache\] section, so it serves only engines that register"):
            find_or_start(derived(storage="--create_cache_tensor"), port=9200, data_parallel_id=1)
        with pytest.raises(ConfigError, match="stores blocks in file, FastDeploy needs memory"):
            find_or_start(derived(storage="--kvcache_storage_backend memory"), port=9200, data_parallel_id=1)


def test_a_daemon_whose_cache_another_engine_uses_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines of the same settings would read and write each other's blocks."""
    asked = derived(storage="--kvcache_storage_backend file --create_cache_tensor")
    with running({**asked, "metrics": {"listen": ""}}, tmp_path) as daemon:
        monkeypatch.setenv("TRANSFERD_ENDPOINT", daemon.endpoint)
        with SyncClient(daemon.endpoint) as another, monkeypatch.context() as patched:
            another.attach(0)
            patched.setattr("transferd.adapters.fastdeploy.companion.FREE_TIMEOUT_S", 0.2)
            with pytest.raises(ConfigError, match="another engine uses its cache"):
                find_or_start(asked, port=9200, data_parallel_id=1)
        assert find_or_start(asked, port=9200, data_parallel_id=1).endpoint == daemon.endpoint


def test_a_daemon_that_stands_still_does_not_count_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = derived(storage="--kvcache_storage_backend file --create_cache_tensor")
    same = companion._check_same
    with running({**asked, "metrics": {"listen": ""}}, tmp_path) as daemon, SyncClient(daemon.endpoint) as another:
        another.attach(0)
        pid = another.stats()["pid"]

        def stop(*given: Any) -> None:
            same(*given)
            monkeypatch.setattr(companion, "ANSWER_TIMEOUT_S", 0.5)
            os.kill(pid, signal.SIGSTOP)

        monkeypatch.setenv("TRANSFERD_ENDPOINT", daemon.endpoint)
        monkeypatch.setattr(companion, "_check_same", stop)
        monkeypatch.setattr(companion, "FREE_TIMEOUT_S", 0.2)
        try:
            with pytest.raises(ConfigError, match="does not answer whether another engine uses its cache"):
                find_or_start(asked, port=9200, data_parallel_id=1)
        finally:
            os.kill(pid, signal.SIGCONT)


def test_settings_that_fastdeploy_does_not_decide_may_differ() -> None:
    asked = derived()
    wanted = from_tree(asked)
    told = {"cache": dict(asked["cache"]), "storage": {**asked["storage"], "key_schema": "fastdeploy"}}
    assert differences(wanted, asked, told) == []
