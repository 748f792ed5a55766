"""Configuration: four sources, later ones win, and every mistake is one line that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from transferd.config import Config, from_tree, load, origins, outdated, to_tree
from transferd.config.loading import RETIRED, TUNING, leaves, of_tuning
from transferd.config.toml import to_toml
from transferd.errors import ConfigError


def test_without_any_source_the_defaults_are_those_of_the_contract() -> None:
    config = load(env={})
    assert config.server.endpoints == ["ipc:///run/transferd/transferd.sock"]
    assert (config.server.max_queued_tasks, config.server.max_message) == (4096, 64 * 2**20)
    assert config.cache is None, "engines register"
    cache = from_tree({"cache": {}}).geometry
    assert (cache.ranks, cache.device_of_rank) == (2, [0, 1])
    assert (config.host.staging, config.storage.file.capacity) == (64 * 2**20, 64 * 2**30)
    assert config.metrics.listen == "127.0.0.1:9464"


def test_environment_wins_over_the_file_and_set_over_both(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text('[cache]\nranks = 3\nlayers = 7\nkv_heads = 5\n[storage]\nmodel = "a"\n')
    env = {"TRANSFERD_CACHE__RANKS": "4", "TRANSFERD_CACHE__LAYERS": "8", "TRANSFERD_ENDPOINT": "not a key"}
    config = load(file, overrides=["cache.ranks=6"], env=env)
    assert (config.geometry.ranks, config.geometry.layers, config.geometry.kv_heads) == (6, 8, 5)
    assert config.storage.model == "a"


def test_a_nested_section_is_reached_from_the_environment() -> None:
    config = load(env={"TRANSFERD_STORAGE__FILE__CAPACITY": "2GiB", "TRANSFERD_STORAGE__GENERATION": "RL-STEP03"})
    assert (config.storage.file.capacity, config.storage.generation) == (2 * 2**30, "RL-STEP03")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("events.replay_endpoint=ipc:///r", "events.replay_endpoint: requires events.endpoint ('ipc:///r')"),
        ("events.endpoint=udp://a:1", "events.endpoint: expected ipc://PATH or tcp://HOST:PORT ('udp://a:1')"),
        ("cache.rank=2", "cache.rank: unknown key; did you mean ranks? (2)"),
        ("cache.ranks=-1", "cache.ranks: expected `int` >= 1 (-1)"),
        ("cache.ranks=many", "cache.ranks: expected `int`, got `str` ('many')"),
        ("cache.dtype=int3", "cache.dtype: expected one of bfloat16, block_wise_fp8, float16, uint8 ('int3')"),
        ("cache.devices=[0]", "cache.devices: must have one device index per rank (2 ranks) ([0])"),
        ("cache.devices=['GPU-1',1]", "cache.devices: the shm device takes indices, not UUIDs"),
        ("cache.mtp_blocks=99", "cache.mtp_blocks: requires cache.mtp_layers (99)"),
        ("host.staging=8XB", "host.staging: expected a size such as '64MiB' ('8XB')"),
        ("server.endpoint=tcp://0.0.0.0:5", "server.endpoint: tcp:// beyond loopback requires [server.curve]"),
        ("server.endpoint=http://x", "server.endpoint: expected ipc://PATH or tcp://HOST:PORT ('http://x')"),
        ("server.socket_mode='rw'", "server.socket_mode: expected octal permissions such as '0660' ('rw')"),
        ("storage.model=''", "storage.model: must not be empty: it is part of every key ('')"),
        ("metrics.listen=9464", "metrics.listen: expected `str`, got `int` (9464)"),
        ("log.level=loud", "log.level: expected one of debug, error, info, warning ('loud')"),
        ("pd.mode=mail", "pd.mode: expected one of direct, storage ('mail')"),
        ("storage.mooncake.protocol=udp", "storage.mooncake.protocol: expected one of rdma, tcp ('udp')"),
        ("nonsense.x=1", "nonsense: unknown key ("),
        ("storge.backend=none", "storge: unknown key; did you mean storage? ("),
        (
            "storage.attention_store.peers.a.endpont=x",
            "storage.attention_store.peers[...].endpont: unknown key; did you mean endpoint?",
        ),
        ("no-equals-sign", "--set: expected section.key=value ('no-equals-sign')"),
    ],
)
def test_a_mistake_is_one_line_with_key_and_value(override: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(overrides=[override], env={})
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", sorted(RETIRED))
def test_a_retired_key_is_accepted_without_effect_and_named_with_what_decides_now(key: str, tmp_path: Path) -> None:
    section, _, name = key.partition(".")
    file = tmp_path / "old.toml"
    file.write_text(f"[{section}]\n{name} = 'whatever it was'\n")
    variable = {f"TRANSFERD_{section}__{name}".upper(): "7"}
    sources: list[tuple[str, dict[str, Any]]] = [
        (str(file), {"path": file, "env": {}}),
        (next(iter(variable)), {"env": variable}),
        ("--set", {"overrides": [f"{key}=1"], "env": {}}),
    ]
    for source, found in sources:
        assert load(**found) == load(env={})
        [sentence] = outdated(origins(**found))
        assert sentence == f"{key} ({source}) has no effect any more: {RETIRED[key]}"
    documented = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    assert f"`{key}`" in documented


def test_no_key_is_both_retired_and_in_use() -> None:
    tree = to_tree(load(env={}))
    assert not [key for key in RETIRED if key.partition(".")[2] in tree[key.partition(".")[0]]]
    assert outdated(origins(overrides=["cuda.batches=false"], env={})) == []


def test_a_setting_of_tuning_is_the_same_in_its_section_which_is_said(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text("[tuning.server]\nlane_depth = 3\n")
    variable = "TRANSFERD_TUNING__SERVER__LANE_DEPTH"
    for found in ({"path": file}, {"env": {variable: "3"}}, {"overrides": ["tuning.server.lane_depth=3"]}):
        given: dict[str, Any] = {"env": {}} | found
        assert load(**given).server.lane_depth == 3
        assert outdated(origins(**given)) == []
    file.write_text("[server]\nlane_depth = 3\n")
    assert load(file, env={}) == load(env={variable: "3"})
    assert outdated(origins(file, env={})) == [f"server.lane_depth ({file}) is tuning.server.lane_depth now"]


def test_a_later_source_wins_whichever_name_it_uses(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    names = ("server.lane_depth", "tuning.server.lane_depth")
    for early, late in (names, reversed(names)):
        file.write_text(f"{early} = 3\n")
        assert load(file, overrides=[f"{late}=4"], env={}).server.lane_depth == 4
        assert origins(file, overrides=[f"{late}=4"], env={})[late] == "--set"
        assert early not in origins(file, overrides=[f"{late}=4"], env={})


def test_fastdeploys_variables_of_tuning_are_in_their_place() -> None:
    env = {"AS_WRITE_SLICE_BLOCK_NUM": "7", "TRANSFERD_STORAGE__BACKEND": "attention_store"}
    assert load(env=env).storage.attention_store.slice_blocks == 7
    assert origins(env=env)["tuning.storage.attention_store.slice_blocks"].startswith("the environment of FastDeploy")
    assert outdated(origins(env=env)) == []


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("tuning.server.endpoint=x", "tuning.server.endpoint: is no key of [tuning]: it stands in its own section"),
        (
            "tuning.server.lane_dept=x",
            "tuning.server.lane_dept: is no key of [tuning]; did you mean server.lane_depth?",
        ),
        ("tuning.server.lane_depth=0", "tuning.server.lane_depth: expected `int` >= 1 (0)"),
        ("server.lane_depth=0", "tuning.server.lane_depth: expected `int` >= 1 (0)"),
        ("tuning.cache={}", ""),
        ("tuning.server=3", "tuning.server: is no key of [tuning]"),
    ],
)
def test_a_mistake_in_tuning_names_the_key(override: str, line: str) -> None:
    if not line:
        assert load(overrides=[override], env={}) == load(env={}), "an empty table makes no [cache]"
        return
    with pytest.raises(ConfigError) as caught:
        load(overrides=[override], env={})
    assert str(caught.value).startswith(line)


def test_the_effective_configuration_has_each_setting_of_tuning_there_and_nowhere_else() -> None:
    levels = {"levels": ["memory", "file"], "level": {"file": {"recheck": 7}}}
    keys = [key for key, _ in leaves(to_tree(from_tree({"storage": levels})))]
    tuned = [key.removeprefix("tuning.") for key in keys if key.startswith("tuning.")]
    assert {key.replace(".file.", ".NAME.") for key in tuned} == TUNING
    assert not [key for key in keys if of_tuning(key)]


@pytest.mark.parametrize("uuid", ["GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "7" * 32])
def test_gpus_are_named_by_index_or_by_uuid(uuid: str) -> None:
    config = load(overrides=["cache.device=cuda", f"cache.devices=[0,'{uuid}']"], env={})
    assert config.geometry.device_of_rank == [0, uuid]
    with pytest.raises(ConfigError, match=r"cache.devices: expected an index, or a UUID .*\('GPU-8932'\)"):
        load(overrides=["cache.device=cuda", "cache.devices=[0,'GPU-8932']"], env={})


@pytest.mark.parametrize("content", ["[cache", "\xff".encode("latin-1"), None])
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, content: str | bytes | None) -> None:
    file = tmp_path / "t.toml"
    if content is not None:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError, match=r"t\.toml"):
        load(file, env={})


def test_tcp_is_allowed_on_loopback_and_elsewhere_with_curve() -> None:
    near = ["tcp://127.0.0.1:5555", "tcp://localhost:*", "ipc:///tmp/x"]
    assert from_tree({"server": {"endpoint": near}}).server.endpoints == near
    far: dict[str, Any] = {"endpoint": "tcp://10.0.0.1:5555"}
    with pytest.raises(ConfigError, match=r"requires \[server\.curve\]"):
        from_tree({"server": far})
    assert from_tree({"server": far | {"curve": {"secret_key_file": "/k"}}}).server.endpoints == [far["endpoint"]]


def test_the_effective_configuration_as_toml_is_the_configuration(tmp_path: Path) -> None:
    config = load(overrides=["cache.ranks=3", 'storage.model=a "quoted" \\ name'], env={})
    file = tmp_path / "t.toml"
    file.write_text(to_toml(to_tree(config)))
    assert load(file, env={}) == config
    assert from_tree(to_tree(Config())) == Config()
