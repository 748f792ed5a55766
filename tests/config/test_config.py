"""Configuration: four sources, later ones win, and every mistake is one line that names it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transferd.config import Config, Size, from_tree, load, to_tree
from transferd.config.toml import to_toml
from transferd.errors import ConfigError
from transferd.runtime.compat import tomllib


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
    assert (config.cache.ranks, config.cache.layers, config.cache.kv_heads, config.storage.model) == (6, 8, 5, "a")


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
        ("cuda.slot_bytes=4KiB", "cuda.slot_bytes: must be between 64KiB and 1GiB ('4KiB')"),
        ("cuda.largest_dma=7", "cuda.largest_dma: must be at least 4KiB, or 0 ('7')"),
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
    from_tree({"server": {"endpoint": ["tcp://127.0.0.1:5555", "tcp://localhost:*", "ipc:///tmp/x"]}})
    from_tree({"server": {"endpoint": "tcp://10.0.0.1:5555", "curve": {"secret_key_file": "/k"}}})


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("64MiB", 64 * 2**20),
        ("1 KB", 1000),
        ("1.5GiB", 3 * 2**29),
        (7, 7),
        ("0", 0),
        ("12B", 12),
        ("9" * 400, 10**400 - 1),
    ],
)
def test_sizes(text: str | int, nbytes: int) -> None:
    assert Size.parse(text) == nbytes


@given(st.integers(0, 2**80))
def test_a_size_reads_back_as_it_is_printed(nbytes: int) -> None:
    assert Size.parse(str(Size(nbytes))) == nbytes


def test_the_effective_configuration_as_toml_is_the_configuration(tmp_path: Path) -> None:
    config = load(overrides=["cache.ranks=3", 'storage.model=a "quoted" \\ name'], env={})
    file = tmp_path / "t.toml"
    file.write_text(to_toml(to_tree(config)))
    assert load(file, env={}) == config
    assert from_tree(to_tree(Config())) == Config()


@pytest.mark.parametrize("name", ["carriage\rreturn", "nul\0", "del\x7f", "tab\t", 'quote"', "new\nline", "模型"])
def test_what_check_config_prints_can_be_read_back_whatever_a_value_holds(name: str) -> None:
    tree = to_tree(load(overrides=[f"storage.model={name}"], env={}))
    assert tomllib.loads(to_toml(tree))["storage"]["model"] == name


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
