"""SGLang's own backend for Mooncake, unchanged, over a transferd daemon: `mooncake.store` is transferd's here."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.mem_cache.hicache_storage import PoolTransfer

from tests.machine.with_sglang import pools
from tests.machine.with_sglang.pools import KEYS, LOADED, STORED
from transferd.adapters.mooncake_store import as_mooncake
from transferd.adapters.mooncake_store.settings import VARIABLE

MOONCAKE = {
    "local_hostname": "localhost",
    "metadata_server": "http://nobody/metadata",
    "master_server_address": "nobody:50051",
    "global_segment_size": "4gb",
    "protocol": "tcp",
    "device_name": "",
}


@pytest.fixture(autouse=True)
def in_its_place(monkeypatch: pytest.MonkeyPatch, place: Path) -> Iterator[None]:
    """As PYTHONPATH puts it in place of the library."""
    del place
    loaded = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "mooncake"}
    monkeypatch.syspath_prepend(as_mooncake.__path__[0])
    monkeypatch.setenv(VARIABLE, '{"buffer": "1MiB"}')
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "mooncake"]:
        del sys.modules[name]
    sys.modules.update(loaded)


def backend(pool: Any, *, is_mla: bool, **more: Any) -> Any:
    from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore

    said = dataclasses.replace(pools.config(is_mla=is_mla), extra_config=MOONCAKE)
    made = MooncakeStore(said, pool)
    made.register_mem_pool_host(pool)
    for name, one in more.items():
        made.register_mem_host_pool_v2(one, name)
    assert type(made.store).__module__ == "transferd.adapters.mooncake_store.store"
    return made


@pytest.mark.parametrize(
    ("make", "layout", "is_mla"),
    [
        (pools.mha, "page_first", False),
        (pools.mha, "page_first_direct", False),
        (pools.mla, "page_first", True),
        (pools.mla, "layer_first", True),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_a_server_gets_the_bytes_that_an_earlier_one_stored(make: Any, layout: str, is_mla: bool) -> None:
    first, second = make(layout, allocator="default"), make(layout, allocator="default")
    pools.fill(first, STORED, seed=5)
    one = backend(first, is_mla=is_mla)
    assert one.batch_exists(KEYS) == 0
    assert one.batch_set_v1(KEYS, pools.indices(STORED)) == [True] * len(KEYS)
    assert one.batch_exists([*KEYS, "f" * 64]) == len(KEYS)
    one.store.close()  # its daemon ends with it
    other = backend(second, is_mla=is_mla)
    pools.check_loads(other, second, first)
    other.clear()
    assert other.batch_exists(KEYS) == 0
    other.store.close()


def test_deepseek_v4s_pools_beside_a_main_pool_without_memory() -> None:
    made = pools.deepseek_v4("page_first", allocator="default")
    beside = {name: pool for name, pool in made.items() if name != "kv"}
    one = backend(made["kv"], is_mla=True, **made)
    every = [PoolTransfer(name=name, keys=KEYS, host_indices=pools.indices(STORED)) for name in beside]
    before = {name: pools.filled(pool, STORED, seed) for seed, (name, pool) in enumerate(beside.items())}
    assert one.batch_set_v2(every) == {name: [True] * 20 for name in beside}
    assert one.batch_exists_v2([*KEYS, "d" * 64], every).kv_hit_pages == 20
    asked = [PoolTransfer(name=name, keys=KEYS, host_indices=pools.indices(LOADED)) for name in beside]
    assert one.batch_get_v2(asked) == {name: [True] * 20 for name in beside}
    for name, pool in beside.items():
        assert [bytes(piece) for piece in pools.pieces(pool, LOADED)] == before[name]
    one.store.close()
