"""Storage as FastDeploy uses it: hand-over, flush-only, both key schemas, Paddle's device, a device too small."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastdeploy import envs

from tests.machine.with_fastdeploy.engine import BLOCK_SIZE, chain, engine, wait_for
from tests.machine.with_fastdeploy.test_tiers import prompts
from transferd.cli.pool.local import Master
from transferd.cli.pool.master import master_executable
from transferd.errors import ConfigError

SEED = 11


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_prefill_hands_over_through_storage_and_decode_has_every_byte(
    place: Path, monkeypatch: pytest.MonkeyPatch, tp: int
) -> None:
    """#7839: P writes all blocks, the incomplete last one as `:partial:N`; D reads them all or gives the request up."""
    monkeypatch.setenv("FILE_BACKEND_STORAGE_DIR", str(place / "pool"))
    tokens = list(range(7 * BLOCK_SIZE + 3))
    contents = [*chain(tokens), "the incomplete last block"]
    if not hasattr(engine_manager(), "write_all_cache_to_storage"):
        pytest.skip("this FastDeploy hands nothing over through storage (#7839)")
    # A file pool serves one daemon at a time, so decode starts when prefill has ended.
    with engine(tp=tp, role="prefill", backend="file", gpu_blocks=16, cpu_blocks=0) as prefill:
        request = SimpleNamespace(
            request_id="r", prompt_token_ids=tokens, output_token_ids=[], multimodal_inputs=None, user="",
            block_tables=prefill.manager.allocate_gpu_blocks(len(contents)),
        )  # fmt: skip
        for block, content in zip(request.block_tables, contents, strict=True):
            for worker in prefill.workers:
                worker.fill(block, content)
        assert prefill.manager.write_all_cache_to_storage(request, include_output=False) is True
    with engine(tp=tp, role="decode", backend="file", gpu_blocks=16, cpu_blocks=0) as decode:
        decode.manager.allocate_gpu_blocks(3)
        request.block_tables = decode.manager.allocate_gpu_blocks(len(contents))
        assert decode.manager.read_cache_from_storage_for_pd(request) == request.block_tables
        for block, content in zip(request.block_tables, contents, strict=True):
            for worker in decode.workers:
                worker.check(block, content)
        request.prompt_token_ids = [7, *tokens]
        assert decode.manager.read_cache_from_storage_for_pd(request) == [], "nobody wrote that one"


@pytest.fixture
def pool(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Master]:
    """A Mooncake master, told to the engine by FastDeploy's own variables."""
    if master_executable() is None:
        pytest.skip("Mooncake's master is not installed")
    master = Master(place / "master.log")
    master.start()
    monkeypatch.setenv("MOONCAKE_MASTER_SERVER_ADDR", master.address)
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", str(64 * 1024**2))
    yield master
    master.stop()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("schema", ["transferd", "fastdeploy"])
def test_a_mooncake_pool_serves_what_one_engine_wrote_to_another(
    place: Path, pool: Master, monkeypatch: pytest.MonkeyPatch, tp: int, schema: str
) -> None:
    monkeypatch.setenv("TRANSFERD_STORAGE__KEY_SCHEMA", schema)
    shape = {"tp": tp, "gpu_blocks": 16, "cpu_blocks": 0, "backend": "mooncake"}
    asked = prompts(2)
    with engine(**shape) as writer, engine(**shape) as reader:
        for tokens in asked:
            writer.run(tokens)
        for tokens in asked:
            assert reader.run(tokens)["storage_match_token_num"] == 40
        daemons = {one.queue.group.endpoint for one in (writer, reader)}
        assert len(pool.segments()) == 2 * tp, f"each rank lends its part, whether on one daemon or two: {daemons}"
        writer.settle()
        reader.settle()


def engine_manager() -> Any:
    from fastdeploy.cache_manager.prefix_cache_manager import PrefixCacheManager

    return PrefixCacheManager


def test_prefill_through_attention_store_is_refused_at_start(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FD_PD_TRANSFER_VIA_STORAGE", "1")
    with (
        pytest.raises(ConfigError, match="AttentionStore holds whole blocks"),
        engine(role="prefill", backend="attention_store"),
    ):
        pass


@pytest.mark.parametrize("tp", [1, 2])
def test_an_eviction_withdraws_the_rest_of_the_path(place: Path, monkeypatch: pytest.MonkeyPatch, tp: int) -> None:
    """FD_AS_ONLY_FLUSH: the index knows what is on this node; a finish tells it, an eviction takes it back."""
    if not hasattr(envs, "FD_AS_ONLY_FLUSH"):
        pytest.skip("this FastDeploy has no flush-only mode (#7609)")
    monkeypatch.setenv("FD_AS_ONLY_FLUSH", "1")
    monkeypatch.setenv("TRANSFERD_STORAGE__ATTENTION_STORE__DATA", "none")
    with engine(tp=tp, backend="attention_store", gpu_blocks=24, cpu_blocks=0) as made:
        asked = prompts(3)
        for tokens in asked:
            made.run(tokens)  # the third needs room: the first's blocks go, leaf first
        made.settle()
        client = made.client()
        for tokens in asked:
            here = 0
            node = made.manager.radix_tree_root
            for key in chain(tokens):
                node = node.children.get(key)
                if node is None:
                    break
                here += 1
            told = client.locate(tokens)
            assert {counts["GPU"] for counts in told.values()} == ({here} if here else set())
        (log,) = (file for file in place.rglob("*.log") if file.stem.isdecimal())  # of the daemon, by its process
        assert "warning" not in log.read_text(), "a finish says nothing of flush_cache_exists, and that is normal"
        assert not getattr(made.manager, "storage_write_back_result", None), (
            "answers that nobody waits for are not kept"
        )


SDK = """
import os, sys
from pathlib import Path
from tests.support.attention_store_sdk import AttentionStoreDouble
double = AttentionStoreDouble(cuda=False)
double.before = lambda call: Path(os.environ["SDK_CALLS"]).open("a").write(f"{os.getpid()} {call}\\n")
sys.modules.update({name: module for name, module in double.modules().items() if name != __name__})
"""


@pytest.mark.parametrize("tp", [1, 2])
def test_attention_store_is_the_service_where_its_sdk_is_installed(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tp: int
) -> None:
    """#7609: finishes and evictions reach AttentionStore, and one line says that it is used."""
    if not hasattr(envs, "FD_AS_ONLY_FLUSH"):
        pytest.skip("this FastDeploy has no flush-only mode (#7609)")
    package = place / "site" / "attentionstore_sdk"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(SDK)
    calls = place / "calls"
    monkeypatch.setenv("SDK_CALLS", str(calls))
    monkeypatch.setenv("FD_AS_ONLY_FLUSH", "1")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), os.environ["PYTHONPATH"]]))
    with (
        caplog.at_level("INFO", logger="transferd.adapters.fastdeploy"),
        engine(tp=tp, backend="attention_store", gpu_blocks=24, cpu_blocks=0) as made,
    ):
        for tokens in prompts(3):
            made.run(tokens)  # the third needs room: the first's blocks go
        made.settle()
        wait_for(lambda: calls.read_text().count("flush_token_index") >= 4)
        assert {line.split()[0] for line in calls.read_text().splitlines()} == {str(made.daemon.process.pid)}
    assert [one for one in caplog.messages if one.endswith("AttentionStore's service, through attentionstore_sdk")]


@pytest.mark.parametrize("schema", ["transferd", "fastdeploy"])
def test_both_key_schemas(place: Path, monkeypatch: pytest.MonkeyPatch, schema: str) -> None:
    monkeypatch.setenv("TRANSFERD_STORAGE__KEY_SCHEMA", schema)
    with engine(tp=2, backend="file", gpu_blocks=16, cpu_blocks=0) as made:
        for tokens in prompts(3):
            made.run(tokens)
        assert made.run(prompts(1)[0])["storage_match_token_num"] == 40
        made.settle()


@pytest.mark.parametrize("tp", [1, 2])
def test_blocks_in_paddles_tensors(place: Path, monkeypatch: pytest.MonkeyPatch, tp: int) -> None:
    monkeypatch.setenv("TRANSFERD_CACHE__DEVICE", "paddle")
    with engine(tp=tp, backend="file", gpu_blocks=24, cpu_blocks=48) as made:
        found = {"cpu_match_token_num": 0, "storage_match_token_num": 0}
        for tokens in prompts(4) + prompts(4):
            metrics = made.run(tokens)
            found = {name: count + metrics[name] for name, count in found.items()}
        assert found["cpu_match_token_num"] > 0
        made.settle()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_more_prompts_than_the_device_holds(place: Path, tp: int) -> None:
    """Shared prefixes, swaps both ways and storage at once, over a device that holds three prompts."""
    chance = random.Random(SEED)
    with engine(tp=tp, backend="file", gpu_blocks=40, cpu_blocks=24) as made:
        hit = dict.fromkeys(("gpu_match_token_num", "cpu_match_token_num", "storage_match_token_num"), 0)
        for _ in range(60):
            family, length = chance.randrange(6), chance.randrange(9, 50)
            tokens = [family * 1000 + i if i < 24 else chance.randrange(4) for i in range(length)]
            metrics = made.run(tokens)
            hit = {name: count + metrics[name] for name, count in hit.items()}
        assert min(hit.values()) > 0, f"{hit} (seed {SEED})"
        made.settle()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("stores", [True, False])
def test_host_blocks_are_stored_when_they_are_evicted(
    place: Path, monkeypatch: pytest.MonkeyPatch, tp: int, stores: bool
) -> None:
    """What storage has let go of is stored again, from the host pool; without the setting it is lost."""
    if stores:
        monkeypatch.setenv("TRANSFERD_STORE_EVICTED", "1")
    with engine(tp=tp, backend="file", gpu_blocks=24, cpu_blocks=24) as made:
        asked = prompts(8)
        for tokens in asked[:3]:
            made.run(tokens)  # the third needs room: the first goes to the host pool
        made.settle()
        client = made.client()
        held = [node for node in made.manager.node_map.values() if not node.has_in_gpu]
        assert held
        client.purge()
        for tokens in asked[3:]:  # and these need its room there
            made.run(tokens)
        made.settle()
        keys = [key for tokens in asked[:3] for key in chain(tokens)]
        stored = [node.hash_value for node in held if client.match([node.hash_value])]
        assert bool(stored) is stores
        assert set(stored) <= set(keys)
        assert (made.run(asked[0])["storage_match_token_num"] > 0) is stores, "its bytes are compared by the workers"
        made.settle()
