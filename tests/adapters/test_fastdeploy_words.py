"""FastDeploy's words mean FastDeploy's things: each variable and backend name, its effect there beside ours."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.test_fastdeploy_arguments import derived
from transferd.adapters.fastdeploy import companion, words
from transferd.adapters.fastdeploy.companion import _to_start, load_sections, shares, whole
from transferd.adapters.fastdeploy.words import SDK, storage_in_words, storage_settings
from transferd.config import Config, to_tree

DOCS = Path(__file__).parents[2] / "docs"
TEXT = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("fastdeploy.md", "fastdeploy_details.md"))
WORDS = TEXT.partition("\n## Environment variables\n")[2].partition("\n## ")[0]
MASTER = {"MOONCAKE_MASTER_SERVER_ADDR": "10.0.0.1:50051", "MOONCAKE_METADATA_SERVER": "http://10.0.0.1:8080/metadata"}


def started(backend: str, monkeypatch: pytest.MonkeyPatch, place: Path, **variables: str) -> Config:
    """The configuration of the daemon that an engine with these variables would start."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    made = _to_start(derived(storage=f"--kvcache_storage_backend {backend}"), None, {}, {}, {})
    if made.place is not None:
        made.place.close()
    assert made.sections is not None
    return load_sections(made.sections, made.environment)


# Variable, its value, the key of the daemon's configuration, and what FastDeploy's own processes would take from it.
SAME = [
    ("MOONCAKE_MASTER_SERVER_ADDR", "10.0.0.7:1", "mooncake.master_server_addr", "10.0.0.7:1"),
    ("MOONCAKE_METADATA_SERVER", "http://m:1/metadata", "mooncake.metadata_server", "http://m:1/metadata"),
    ("MOONCAKE_LOCAL_HOSTNAME", "10.0.0.2", "mooncake.local_hostname", "10.0.0.2"),
    ("MOONCAKE_PROTOCOL", "rdma", "mooncake.protocol", "rdma"),
    ("MOONCAKE_PROTOCOL", "tcp", "mooncake.protocol", "tcp"),
    ("MOONCAKE_RDMA_DEVICES", "mlx5_0,mlx5_1", "mooncake.rdma_devices", "mlx5_0,mlx5_1"),
    ("MOONCAKE_GLOBAL_SEGMENT_SIZE", "50000000000", "mooncake.global_segment_size", 50_000_000_000),
    ("MOONCAKE_LOCAL_BUFFER_SIZE", "134217728", "mooncake.local_buffer_size", 128 * 1024**2),
    ("AS_NAMESPACE", "space", "attention_store.namespace", "space"),
    ("AS_POD_NAME", "pod", "attention_store.pod_name", "pod_mixed_1"),
    ("AS_MODEL_VERSION", "v7", "attention_store.model_version", "v7"),
    ("AS_WRITE_SLICE_BLOCK_NUM", "7", "attention_store.slice_blocks", 7),
    ("AS_WRITE_SLICE_TIMEOUT", "3", "attention_store.slice_timeout", 3.0),
    ("AS_WRITE_TOTAL_TIMEOUT", "9", "attention_store.total_timeout", 9.0),
]


@pytest.mark.parametrize(("variable", "value", "key", "theirs"), SAME)
def test_a_variable_means_here_what_it_means_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, value: str, key: str, theirs: Any
) -> None:
    backend, _, setting = key.partition(".")
    config = started(backend, monkeypatch, tmp_path, **MASTER | {variable: value})
    assert getattr(getattr(config.storage, backend), setting) == theirs
    assert variable in WORDS or f"`_{variable.partition('_')[2]}`" in WORDS


def test_a_segment_is_lent_for_each_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """MOONCAKE_GLOBAL_SEGMENT_SIZE is what each of FastDeploy's transfer processes lends."""
    assert started("mooncake", monkeypatch, tmp_path, **MASTER).storage.mooncake.segment_per_rank
    monkeypatch.setenv("TRANSFERD_STORAGE__MOONCAKE__SEGMENT_PER_RANK", "false")
    assert not started("mooncake", monkeypatch, tmp_path, **MASTER).storage.mooncake.segment_per_rank


def test_without_a_protocol_a_machine_with_rdma_uses_it_and_another_does_not(tmp_path: Path) -> None:
    some, none = tmp_path / "infiniband", tmp_path / "none"
    (some / "mlx5_0").mkdir(parents=True)
    assert storage_settings("mooncake", {}, some)["mooncake"]["protocol"] == "rdma"
    for variables, devices in (({}, none), ({"MOONCAKE_PROTOCOL": "tcp"}, some)):
        assert "protocol" not in storage_settings("mooncake", variables, devices)["mooncake"]
    assert "rdma_devices" not in storage_settings("mooncake", {}, some)["mooncake"], "FastDeploy is not here to say"
    file = tmp_path / "mooncake.json"
    file.write_text('{"protocol": "tcp"}')
    assert "protocol" not in storage_settings("mooncake", {"MOONCAKE_CONFIG_PATH": str(file)}, some)["mooncake"]


@pytest.mark.parametrize(
    ("variables", "chosen"),
    [
        ({}, "mlx5_3,mlx5_4"),
        ({"MOONCAKE_PROTOCOL": "rdma"}, "mlx5_3,mlx5_4"),
        ({"MOONCAKE_RDMA_DEVICES": "mlx5_9"}, None),
        ({"MOONCAKE_PROTOCOL": "tcp"}, None),
    ],
)
def test_without_a_list_of_devices_ranks_get_those_next_to_the_gpus_as_fastdeploy_finds_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str], chosen: str | None
) -> None:
    (tmp_path / "mlx5_3").mkdir()
    monkeypatch.setattr(words, "gpu_nics", lambda: "mlx5_3,mlx5_4")
    assert storage_settings("mooncake", variables, tmp_path)["mooncake"].get("rdma_devices") == chosen


@pytest.mark.parametrize("value", ["0", "1", "yes"])
def test_the_way_of_a_hand_over_changes_no_daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str) -> None:
    """0 is FastDeploy's own default said aloud: the daemon must neither open a port nor leave its neighbours."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    asked = derived(storage="--kvcache_storage_backend file")
    before = _to_start(asked, None, {}, {}, {})
    monkeypatch.setenv("FD_PD_TRANSFER_VIA_STORAGE", value)
    after = _to_start(asked, None, {}, {}, {})
    assert after.directory == before.directory
    assert shares(whole(asked))
    assert whole(asked).pd.mode == "storage"


def test_a_setting_that_a_release_adds_hides_no_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    asked = derived(storage="--kvcache_storage_backend file")
    before = _to_start(asked, None, {}, {}, {}).directory
    monkeypatch.setattr(companion, "to_tree", lambda config: to_tree(config) | {"new": {"setting": 1}})
    assert _to_start(asked, None, {}, {}, {}).directory == before
    monkeypatch.setenv("TRANSFERD_STORAGE__FILE__CAPACITY", "3GiB")
    assert _to_start(asked, None, {}, {}, {}).directory != before, "two daemons of different settings can run here"


@pytest.mark.parametrize(("value", "on"), [("0", False), ("1", True), ("2", True), ("True", True), ("", False)])
def test_a_switch_is_on_for_any_number_but_0(value: str, on: bool) -> None:
    sections = derived(flush=value or "''", storage="--kvcache_storage_backend attention_store")
    assert sections["storage"]["attention_store"]["only_flush"] is on


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A package of the SDK's name, where Python looks."""
    package = tmp_path / "site" / SDK
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(package.parent))


@pytest.mark.usefixtures("sdk")
def test_attention_store_is_the_service_where_its_sdk_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = started("attention_store", monkeypatch, tmp_path)
    assert config.storage.attention_store.driver == "sdk"
    assert storage_in_words(config) == "AttentionStore's service, through attentionstore_sdk"
    assert SDK not in sys.modules, "a look, no import"
    monkeypatch.setenv("TRANSFERD_STORAGE__ATTENTION_STORE__DRIVER", "open")
    config = started("attention_store", monkeypatch, tmp_path)
    assert config.storage.attention_store.driver == "open"
    assert "TRANSFERD_STORAGE__ATTENTION_STORE__DRIVER=open" in storage_in_words(config)


def test_without_the_sdk_one_line_says_that_the_service_hears_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = started("attention_store", monkeypatch, tmp_path)
    assert config.storage.attention_store.driver == "open"
    assert "attentionstore_sdk is not installed, so AttentionStore hears nothing" in storage_in_words(config)


@pytest.mark.parametrize(("backend", "told"), [
    ("mooncake", "the Mooncake pool of 10.0.0.1:50051, over tcp, as the address by which this host reaches it, lending"
                 " 1GiB for each rank"),
    ("file", "file"), ("none", ""),
])  # fmt: skip
def test_one_line_says_where_blocks_are_stored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, backend: str, told: str
) -> None:
    monkeypatch.setattr(words, "RDMA_DEVICES", tmp_path)
    assert storage_in_words(started(backend, monkeypatch, tmp_path, **MASTER)) == told


def test_every_row_of_the_table_says_what_fastdeploy_does_and_what_we_do() -> None:
    rows = re.findall(r"^\| `.*\|$", WORDS, re.MULTILINE)
    assert len(rows) > 20
    assert all(len(row.strip("|").split("|")) == 3 for row in rows), "variable, FastDeploy, transferd"
