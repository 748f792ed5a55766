"""FastDeploy's V1 storage through a daemon: scheduler and connectors as FastDeploy calls them, every byte compared."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from transferd.adapters.fastdeploy import plugin, v1
from transferd.adapters.fastdeploy.companion import for_objects
from transferd.adapters.fastdeploy.v1 import Connector, Scheduler
from transferd.client.launch import running
from transferd.client.sync_client import SyncClient
from transferd.errors import ConfigError

KEY, SCALE, INDEXER = 3 * 656 * 64, 3 * 2 * 64 * 4, 3 * 132 * 64  # bytes of a block's object: all layers together
PLANES = {
    "gqa": {"key": KEY, "value": KEY},
    "fp8": {"key": KEY, "value": KEY, "key_scale": SCALE, "value_scale": SCALE},
    "mla": {"key": KEY},
    "dsa": {"key": KEY, "indexer": INDEXER},
}


class Host:
    """A worker's host memory: private, as pinned memory is."""

    def __init__(self, planes: dict[str, int], blocks: int) -> None:
        self.planes = {name: np.zeros((blocks, nbytes), dtype=np.uint8) for name, nbytes in planes.items()}

    def objects(self, hashes: list[str], rank: int) -> tuple[list[str], list[int], list[int]]:
        """Names, addresses and sizes of these blocks' objects, as FastDeploy makes them."""
        names, addresses, sizes = [], [], []
        for block, key in enumerate(hashes):
            for name, array in self.planes.items():
                names.append(f"{key}_{rank}_{name}")
                addresses.append(int(array[block].ctypes.data))
                sizes.append(array.shape[1])
        return names, addresses, sizes

    def fill(self, seed: int) -> None:
        for array in self.planes.values():
            array[...] = np.random.default_rng(seed).integers(0, 256, array.shape, dtype=np.uint8)

    def bytes(self) -> dict[str, npt.NDArray[np.uint8]]:
        return {name: array.copy() for name, array in self.planes.items()}


def config(backend: str | None = "file", **more: Any) -> Any:
    given = {"kvcache_storage_backend": backend, "cache_dtype": "bfloat16", "block_size": 64, "model_cfg": None}
    return SimpleNamespace(**given | more)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A daemon for the objects, and a directory for this user's."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv(v1.ENGINE_VARIABLE, "engine-1")
    monkeypatch.setattr(
        sys, "argv", ["worker_process.py", "--model", "/models/some-model", "--tensor_parallel_size", "2"]
    )
    monkeypatch.setenv("TRANSFERD_WEIGHTS", "these")
    tree = {"storage": {"backend": "file"}, "host": {"staging": "64MiB"}, "engines": {"devices": ["shm"]}}
    with running(tree, tmp_path) as daemon:
        monkeypatch.setenv("TRANSFERD_ENDPOINT", daemon.endpoint)
        yield tmp_path


def connector_name(rank: int, nbytes: int) -> str:
    """The engine's of a rank's objects of one size, in this process."""
    return f"fastdeploy-v1-{os.getpid()}-{rank}-{nbytes}"


def connected(rank: int = 0) -> Connector:
    made = Connector(config(), rank)
    made.register_buffer(4096, 4096)
    assert not made.is_connected()
    assert made.connect()
    assert made.is_connected()
    return made


@pytest.mark.parametrize("family", PLANES)
def test_every_plane_of_every_rank_comes_back_with_its_bytes(place: Path, family: str) -> None:
    blocks = [f"{number:064x}" for number in range(70)]  # more than there are slots
    ranks = [connected(rank) for rank in range(2)]
    hosts = [Host(PLANES[family], len(blocks)) for _ in ranks]
    scheduler = Scheduler(config())
    assert scheduler.connect()
    probes = [f"{key}_0_key" for key in blocks]
    assert scheduler.batch_exists(probes) == [False] * len(blocks), "nobody has stored anything"
    try:
        for rank, (connector, host) in enumerate(zip(ranks, hosts, strict=True)):
            host.fill(rank)
            assert all(connector.batch_set(*host.objects(blocks, rank)))
        assert all(scheduler.batch_exists(probes))
        with SyncClient(os.environ["TRANSFERD_ENDPOINT"], await_ready=False) as client:
            engines = client.stats()["engines"]
        sizes = set(PLANES[family].values())
        assert {name: one["first_rank"] for name, one in engines.items()} == {
            connector_name(rank, nbytes): rank for rank in range(2) for nbytes in sizes
        }
        assert scheduler.query_prefix_count(probes, probes) == len(blocks)
        assert scheduler.batch_exists(["another_0_key"]) == [False]
        for rank, (connector, host) in enumerate(zip(ranks, hosts, strict=True)):
            stored = host.bytes()
            host.fill(77)
            assert all(connector.batch_get(*host.objects(blocks, rank)))
            for name, array in host.planes.items():
                assert np.array_equal(array, stored[name]), f"rank {rank}: {name}"
    finally:
        scheduler.disconnect()
        for connector in ranks:
            connector.disconnect()


def test_what_is_missing_is_false_and_its_memory_stays_as_it_was(place: Path) -> None:
    connector, host = connected(), Host(PLANES["gqa"], 2)
    host.fill(1)
    names, addresses, sizes = host.objects(["a", "b"], 0)
    assert connector.batch_set(names[:2], addresses[:2], sizes[:2]) == [True, True]
    before = host.bytes()
    host.planes["key"][0] = 0
    assert connector.batch_get(names, addresses, sizes) == [True, True, False, False]
    assert all(np.array_equal(array, before[name]) for name, array in host.planes.items())
    assert connector.batch_delete(names[:1]) == [True]
    assert connector.batch_exists(names) == [False, True, False, False]
    assert connector.get(names[1], addresses[1], sizes[1])
    assert not connector.exists(names[0])
    assert connector.clear() == 1
    assert connector.batch_exists(names) == [False] * 4
    with pytest.raises(ValueError, match="same length"):
        connector.batch_set(names, addresses, sizes[:1])
    connector.disconnect()
    assert connector.batch_get(names, addresses, sizes) == [False] * 4


def test_the_next_engine_finds_what_the_last_one_stored_before_it_writes(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector, host = connected(), Host(PLANES["gqa"], 1)
    host.fill(3)
    objects = host.objects(["a"], 0)
    assert all(connector.batch_set(*objects))
    connector.disconnect()
    monkeypatch.setenv(v1.ENGINE_VARIABLE, "engine-2")
    later, scheduler = connected(), Scheduler(config())
    assert scheduler.connect()
    assert scheduler.query(["a_0_key", "b_0_key"]) == {"a_0_key": True, "b_0_key": False}
    scheduler.disconnect()
    later.disconnect()


def test_what_workers_left_for_the_schedulers_of_ended_engines_is_removed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"""
import sys
from tests.adapters.test_fastdeploy_v1 import Host, PLANES, connected
sys.argv = {sys.argv!r}
connector = connected()
assert all(connector.batch_set(*Host(PLANES["fp8"], 1).objects(["a"], 0)))
connector.disconnect()
"""
    root = Path(__file__).parents[2]
    environment = {**os.environ, v1.ENGINE_VARIABLE: "ended"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=root, env=environment)
    left = place / "run" / f"transferd-fastdeploy-{os.getuid()}" / "v1"
    assert [one.name for one in left.iterdir() if one.is_dir()] == ["ended"]
    objects = Host(PLANES["fp8"], 1).objects(["b"], 0)
    lives = []
    for name in ("lives", "new"):
        monkeypatch.setenv(v1.ENGINE_VARIABLE, name)
        lives.append(connected())
        assert all(lives[-1].batch_set(*objects))
    assert sorted(one.name for one in left.iterdir() if one.is_dir()) == ["lives", "new"]
    for one in lives:
        one.disconnect()


@pytest.mark.parametrize(
    ("changed", "value"), [("--tensor_parallel_size", "4"), ("--model", "/models/another"), ("--quantization", "wint4")]
)
def test_objects_of_another_shape_model_or_quantization_are_never_found(
    place: Path, monkeypatch: pytest.MonkeyPatch, changed: str, value: str
) -> None:
    """Their names are alike: FastDeploy's have neither."""
    connector, host = connected(), Host(PLANES["gqa"], 1)
    assert all(connector.batch_set(*host.objects(["a"], 0)))
    connector.disconnect()
    monkeypatch.setattr(sys, "argv", [*sys.argv[:1], changed, value, *sys.argv[1:]])
    another = connected()
    assert another.batch_get(*host.objects(["a"], 0)) == [False, False]
    another.disconnect()


def test_without_a_daemon_nothing_moves_and_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TRANSFERD_ENDPOINT", "ipc:///{nonsense}")
    for made in (Connector(config()), Scheduler(config())):
        assert not made.connect()
        assert not made.is_connected()
        assert made.batch_exists(["a"]) == [False]
    assert [one.levelname for one in caplog.records] == ["ERROR", "ERROR"]


def test_a_daemon_that_stores_elsewhere_is_refused(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = Connector(config("mooncake"))
    assert not made.connect()
    assert "stores blocks in file, FastDeploy needs mooncake" in caplog.text


def test_the_factories_are_replaced_where_they_are_and_where_they_come_to_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Base:
        def extra(self) -> str:
            return "theirs"

    def module(name: str, **content: Any) -> ModuleType:
        made = ModuleType(name)
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    def theirs(config: Any) -> None:
        raise AssertionError(config)

    theirs.__module__ = plugin.V1_STORAGE
    factories = dict.fromkeys(plugin.V1_NAMES[:2], theirs)
    storage = module(plugin.V1_STORAGE, **factories, StorageScheduler=Base, StorageConnector=Base)
    user = module("fastdeploy.cache_manager.v1.cache_manager", create_storage_scheduler=theirs)
    module("fastdeploy.envs", ENABLE_V1_KVCACHE_MANAGER=1)
    monkeypatch.setenv(v1.ENGINE_VARIABLE, "x")
    heard: list[None] = []
    monkeypatch.setattr(plugin, "be_heard", lambda: heard.append(None))
    for _ in range(2):
        plugin.register()
    assert not heard, "FastDeploy adds and removes handlers while it is imported"
    connector = storage.create_storage_connector(config(), tp_rank=3)
    assert heard
    assert isinstance(connector, Connector)
    assert vars(Base)["extra"](connector) == connector.extra() == "theirs", "what a later version adds"  # type: ignore[attr-defined]
    assert storage.create_storage_connector(config(None)) is None
    assert user.create_storage_scheduler is storage.create_storage_scheduler
    assert user.create_storage_scheduler(config(None)) is None
    monkeypatch.setenv("TRANSFERD_ENDPOINT", "ipc:///{nonsense}")
    with pytest.raises(RuntimeError, match="no transferd daemon"):
        user.create_storage_scheduler(config())


def test_a_module_that_is_imported_later_is_switched_over_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "later_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "storage.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    told: list[int] = []
    before = list(sys.meta_path)
    for _ in range(2):
        plugin._once_imported("later_package.storage", lambda module: told.append(module.value))
    import later_package.storage  # type: ignore[import-not-found]

    assert (told, later_package.storage.value) == ([1], 1)
    assert sys.meta_path == before
    plugin._once_imported("later_package.storage", lambda module: told.append(module.value))
    assert told == [1, 1]


def test_config_errors_are_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFERD_ENDPOINT", "ipc:///{port}{x}")
    with pytest.raises(ConfigError):
        for_objects("file")
