"""A daemon whose storage is token-indexed: a process of its own, real sockets, every byte compared."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.daemon.kv_events.test_feed import announced
from tests.daemon.test_daemon import config
from tests.integration.caches import attach, attached, fill, snapshot, wipe
from tests.integration.subscriber import Subscriber
from transferd import Client, ReadStorageTask, Status, SwapOutTask, SyncClient, TransferError, WriteStorageTask
from transferd.adapters.fastdeploy import EngineCacheQueue
from transferd.blocks.keys import block_keys
from transferd.client.launch import running
from transferd.config import load
from transferd.daemon.process import STILL_RUNNING
from transferd.runtime.compat import timeout
from transferd.tasks import TokenIds
from transferd.wire.kv_events import block_hash

BLOCK = 8  # tokens, as in config()
NODE = "default_pod_mixed_0"
OBJECT = 3 * 2 * 2 * 16 * BLOCK * 2 + 128  # a block of one rank, as in config(), and its footer

# The SDK's package as a daemon finds it: the double, under the names that FastDeploy imports.
MODULES = {
    "sdk": "from tests.support.attention_store_sdk import Tokens\nfrom attentionstore_sdk import AttentionStoreSDK\n",
    "api/common/common_pb2": "MEDIA_HBM = 1\n",
    "utils/err": "from tests.support.attention_store_sdk import AttentionStoreSDKError\n",
    "client/client": "import types\nAttentionType = types.SimpleNamespace(MHA='MHA')\n",
}
PACKAGE = """
from tests.support.attention_store_sdk import AttentionStoreDouble
AttentionStoreSDK = AttentionStoreDouble().modules()["attentionstore_sdk.sdk"].AttentionStoreSDK
"""


def install_sdk(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in MODULES.items():
        file = directory / "attentionstore_sdk" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (directory / "attentionstore_sdk" / "__init__.py").write_text(PACKAGE)
    monkeypatch.setenv("PYTHONPATH", str(directory), prepend=":")


def tree(directory: Path, **section: Any) -> dict[str, dict[str, Any]]:
    sections = config()
    sections["storage"] = {"backend": "attention_store", "attention_store": section}
    sections["events"] = {"endpoint": f"ipc://{directory}/pub", "replay_endpoint": f"ipc://{directory}/replay"}
    return sections


def path_of(request: int, blocks: int) -> list[int]:
    return [7, request, *range(1000, 1000 + blocks * BLOCK - 2)]


def write(task_id: str, path: list[int], blocks: list[int], **more: Any) -> WriteStorageTask:
    keys = [f"{task_id}-{i}" for i in range(len(path) // BLOCK)]  # an engine's own, which are nobody else's
    return WriteStorageTask(task_id=task_id, keys=keys, gpu_block_ids=blocks, token_ids=TokenIds(path), **more)


def read(task_id: str, path: list[int], blocks: list[int], start: int = 0, **more: Any) -> ReadStorageTask:
    keys = [f"{task_id}-{i}" for i in range(len(path) // BLOCK - start)]
    where: dict[str, Any] = {"gpu_block_ids": blocks, "token_ids": path, "start_read_block_idx": start}
    return ReadStorageTask(task_id=task_id, keys=keys, **where, **more)


@pytest.mark.parametrize("driver", ["open", "sdk"])
async def test_blocks_are_found_again_by_their_tokens_whatever_their_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str
) -> None:
    install_sdk(tmp_path, monkeypatch)
    with running(tree(tmp_path, driver=driver), tmp_path) as daemon:
        async with attached(daemon.endpoint) as client:
            caches = await attach(client)
            source, target = [3, 9, 1, 20], [30, 2, 11, 25]
            fill(caches, source, seed=1)
            before = snapshot(caches, source)
            path = path_of(1, 4)
            written = await client.submit(write("w", path, source))
            assert (written.status, written.block_ids) == (Status.OK, source)
            assert await client.match_tokens(path) == 4
            assert await client.match_tokens([*path, 1, 2, 3], start=1) == 3
            assert await client.match_tokens(path_of(2, 4)) == 0
            wipe(caches, target)
            result = await client.submit(read("r", path, target))
            assert (result.status, result.block_ids, result.bytes) == (Status.OK, target, written.bytes)
            assert snapshot(caches, target) == before
            part = await client.submit(read("p", [*path[: 3 * BLOCK], *range(BLOCK)], [5, 6], start=2))
            assert (part.status, part.block_ids) == (Status.PARTIAL, [5])
            missing = await client.submit(read("m", path_of(2, 2), [7, 8]))
            assert missing.status is Status.MISS
            stats = await client.stats()
            assert stats["storage"]["backend"] == "attention_store"
            assert stats["storage"]["hits"] > 0


async def test_a_write_that_does_not_fit_says_which_blocks_are_stored(tmp_path: Path) -> None:
    sections = tree(tmp_path)
    sections["storage"]["attention_store"]["data"] = "memory"
    sections["storage"]["memory"] = {"capacity": 3 * 2 * OBJECT}
    with running(sections, tmp_path) as daemon:
        async with attached(daemon.endpoint) as client:
            path = path_of(1, 4)
            written = await client.submit(write("w", path, [3, 9, 1, 20]))
            assert await client.match_tokens(path) == 3
            assert (written.status, written.block_ids) == (Status.PARTIAL, [3, 9, 1])
            assert written.error is not None
            assert written.error.code == "storage_full"


async def test_paths_with_other_salts_keep_apart(tmp_path: Path) -> None:
    """Tenants, adapters, images: the same tokens, and other bytes."""
    subscriber = Subscriber(f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay")
    try:
        with running(tree(tmp_path), tmp_path) as daemon:
            async with attached(daemon.endpoint) as client:
                await _each_salt_has_its_own_bytes(client)
                stored = lambda: len(subscriber.index.get("STORAGE", ())) == 5 * 3  # noqa: E731
                await announced(subscriber, client, stored)
                assert len(subscriber.tokens) == 3, "a router that goes by tokens must not see salted blocks"
                long = await client.submit(read("long", path_of(1, 3), [20, 21, 22], salt="x" * 1025))
                assert (long.status, long.error and long.error.code) == (Status.REJECTED, "bad_value")
                for ask in (client.match_tokens, client.locate):
                    with pytest.raises(TransferError, match="1025"):
                        await ask(path_of(1, 3), salt="x" * 1025)
    finally:
        subscriber.close()


async def _each_salt_has_its_own_bytes(client: Client) -> None:
    caches, path, stored = await attach(client), path_of(1, 3), {}
    for i, salt in enumerate(["", "tenant a", "tenant b", "x" * 1024, "tenant a "]):
        assert await client.match_tokens(path, salt=salt) == 0
        assert await client.locate(path, salt=salt) == {}
        missed = await client.submit(read(f"m{i}", path, [20, 21, 22], salt=salt))
        assert (missed.status, missed.block_ids) == (Status.MISS, [])
        blocks = [i * 3, i * 3 + 1, i * 3 + 2]
        fill(caches, blocks, seed=i)
        stored[salt] = snapshot(caches, blocks)
        written = await client.submit(write(f"w{i}", path, blocks, salt=salt))
        assert (written.status, written.block_ids) == (Status.OK, blocks)
        assert await client.match_tokens(path, start=1, salt=salt) == 2
        assert (await client.locate(path, salt=salt))[NODE]["STORAGE"] == 3
    for i, (salt, expected) in enumerate(stored.items()):
        wipe(caches, [20, 21, 22])
        assert (await client.submit(read(f"r{i}", path, [20, 21, 22], salt=salt))).status is Status.OK
        assert snapshot(caches, [20, 21, 22]) == expected


async def test_a_salt_keeps_flushes_of_the_same_tokens_apart(tmp_path: Path) -> None:
    with running(tree(tmp_path, only_flush=True), tmp_path) as daemon:
        async with attached(daemon.endpoint) as client:
            path = path_of(1, 3)
            await client.submit(write("w", path, [0, 1, 2], salt="a"))
            await client.submit(write("v", path, [3, 4, 5], salt="b"))
            gone: dict[str, Any] = {"flush_cache_exists": False, "start_write_block_idx": 1}
            await client.submit(
                WriteStorageTask(task_id="e", keys=["k"], gpu_block_ids=[], token_ids=TokenIds(path), salt="a", **gone)
            )
            found = [await client.locate(path, salt=salt) for salt in ("a", "b", "")]
            assert found == [{NODE: {"GPU": 1, "any": 1}}, {NODE: {"GPU": 3, "any": 3}}, {}]


async def test_the_sdk_refuses_a_salt_that_it_would_ignore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_sdk(tmp_path, monkeypatch)
    with running(tree(tmp_path, driver="sdk"), tmp_path) as daemon:
        async with attached(daemon.endpoint) as client:
            path = path_of(1, 2)
            for task in (write("w", path, [0, 1], salt="a"), read("r", path, [0, 1], salt="a")):
                result = await client.submit(task)
                assert (result.status, result.error and result.error.code) == (Status.REJECTED, "no_salts")
            with pytest.raises(TransferError, match="driver") as refused:
                await client.match_tokens(path, salt="a")
            assert refused.value.reason == "no_salts"
    assert "tokens, namespace and model version alone" in daemon.log


async def test_the_open_index_knows_where_the_blocks_of_a_path_are(tmp_path: Path) -> None:
    with running(tree(tmp_path), tmp_path) as daemon:
        async with attached(daemon.endpoint) as client:
            path = path_of(1, 4)
            assert await client.locate(path) == {}
            await client.submit(write("w", path, [0, 1, 2, 3]))
            await client.submit(SwapOutTask(task_id="o", gpu_block_ids=[0, 1], cpu_block_ids=[5, 6]))
            await client.submit(read("r", path[: 3 * BLOCK], [10, 11, 12]))
            assert await client.locate(path) == {NODE: {"GPU": 3, "CPU": 2, "STORAGE": 4, "any": 4}}
            await client.set_generation("RL-STEP04")
            assert await client.locate(path) == {}
            assert await client.match_tokens(path) == 0
            stats = await client.stats()
            assert stats["storage"]["node"] == NODE
            assert stats["storage"]["index"] == {}
        with SyncClient(daemon.endpoint) as client:
            assert client.match_tokens(path) == 0
            assert client.locate(path) == {}


@pytest.mark.parametrize("driver", ["open", "sdk"])
async def test_requests_that_do_not_fit_token_indexed_storage_are_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str
) -> None:
    install_sdk(tmp_path, monkeypatch)
    with running(tree(tmp_path, driver=driver), tmp_path) as daemon:
        async with attached(daemon.endpoint) as client:
            short = await client.submit(write("w", path_of(1, 2)[:-1], [0]))
            assert short.status is Status.OK  # one full block
            none = await client.submit(WriteStorageTask(task_id="n", keys=["a"], gpu_block_ids=[0]))
            assert (none.status, none.error and none.error.code) == (Status.REJECTED, "token_ids_required")
            holes = ReadStorageTask(
                task_id="h", keys=["a"], gpu_block_ids=[0], token_ids=TokenIds(path_of(1, 1)), prefix=False
            )
            sparse = await client.submit(holes)
            assert (sparse.status, sparse.error and sparse.error.code) == (Status.REJECTED, "prefix_only")
            asked: list[tuple[Coroutine[Any, Any, object], str]] = [
                (client.match(["a"]), "token_ids_required"),
                (client.exists(["a"]), "token_ids_required"),
                (client.match_tokens(path_of(1, 2), start=3), "bad_value"),
            ]
            if driver == "sdk":
                asked += [
                    (client.locate(path_of(1, 2)), "no_token_index"),
                    (client.set_generation("RL-2"), "fixed_generation"),
                ]
            for ask, code in asked:
                with pytest.raises(TransferError) as refusal:
                    await ask
                assert refusal.value.reason == code


@pytest.mark.parametrize("driver", ["open", "sdk"])
async def test_flush_only_moves_no_bytes_and_tells_index_and_routers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str
) -> None:
    install_sdk(tmp_path, monkeypatch)
    monkeypatch.setenv("FD_AS_ONLY_FLUSH", "1")
    path = path_of(1, 4)
    hashes = [block_hash(key) for key in block_keys(path, BLOCK)]
    subscriber = Subscriber(f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay")
    try:
        with running(tree(tmp_path, driver=driver), tmp_path) as daemon:
            async with attached(daemon.endpoint) as client:
                finished = await client.submit(write("request-1", path, [0, 1, 2, 3]))
                assert (finished.status, finished.block_ids, finished.bytes) == (Status.OK, [0, 1, 2, 3], 0)
                await announced(subscriber, client, lambda: bool(subscriber.index.get("GPU")))
                assert subscriber.index == {"GPU": set(hashes)}
                assert "request-1" not in daemon.log  # a finished request says nothing about its blocks: they are there

                gone = WriteStorageTask(
                    task_id="evicted",
                    keys=["leaf"],
                    gpu_block_ids=[],
                    token_ids=TokenIds(path),
                    start_write_block_idx=3,
                    flush_cache_exists=False,
                )
                answer = await client.submit(gone)
                assert (answer.status, answer.block_ids, answer.bytes) == (Status.OK, [], 0)
                assert [rank.rank for rank in answer.ranks] == [0, 1]
                await announced(subscriber, client, lambda: len(subscriber.index["GPU"]) == 3)
                assert subscriber.index == {"GPU": set(hashes[:3])}
                if driver == "open":
                    assert await client.locate(path) == {NODE: {"GPU": 3, "any": 3}}
                    assert await client.match_tokens(path) == 0  # no bytes were kept
                assert "evicted" not in daemon.log
    finally:
        subscriber.close()


async def test_flushes_that_nobody_waits_for_hold_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_sdk(tmp_path, monkeypatch)
    hang = "import threading\nAttentionStoreSDK.flush_token_index = lambda *_: threading.Event().wait()\n"
    (tmp_path / "attentionstore_sdk" / "__init__.py").write_text(PACKAGE + hang)
    with running(tree(tmp_path, driver="sdk", only_flush=True), tmp_path) as daemon:
        async with attached(daemon.endpoint) as client:
            flushes = [
                await client.push(write(f"f{i}", path_of(i, 2), [], flush_cache_exists=False, timeout=0.5))
                for i in range(40)
            ]
            moved = await client.submit(SwapOutTask(task_id="o", gpu_block_ids=[0, 1], cpu_block_ids=[5, 6]))
            assert moved.status is Status.OK
            missing = await client.submit(read("m", path_of(2, 2), [0, 1]))
            assert missing.status is Status.MISS
            assert {(await flush).status for flush in flushes} == {Status.EXPIRED}
        assert daemon.stop() == STILL_RUNNING
        assert "transferd-as-0-index-0: flush" in daemon.log


async def test_two_nodes_that_share_a_store_find_each_others_blocks(tmp_path: Path) -> None:
    """Content keys mean the same everywhere: what one engine wrote another reads, knowing the tokens alone."""
    shared = tree(tmp_path) | {"events": {}}
    with running(shared, tmp_path, name="first") as daemon:
        async with attached(daemon.endpoint) as client:
            caches = await attach(client)
            fill(caches, [0, 1, 2], seed=5)
            before = snapshot(caches, [0, 1, 2])
            await client.submit(write("w", path_of(1, 3), [0, 1, 2]))
    with running(shared, tmp_path, name="second") as daemon:
        async with attached(daemon.endpoint) as client:
            caches = await attach(client)
            result = await client.submit(read("r", path_of(1, 3), [20, 21, 22]))
            assert result.status is Status.OK
            assert snapshot(caches, [20, 21, 22]) == before


async def test_a_node_that_follows_others_knows_where_their_blocks_are(tmp_path: Path) -> None:
    """Until they are gone, and again when they are back."""
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        directory.mkdir()
    followed = tree(second, pod_name="second")
    peers = {"second": followed["events"]}
    path = path_of(1, 3)

    async def known(client: Client, expected: dict[str, dict[str, int]]) -> None:
        async with timeout(60):
            while await client.locate(path) != expected:  # noqa: ASYNC110 - another node's news take their time
                await asyncio.sleep(0.005)

    with running(tree(first, pod_name="first", peers=peers), first) as follower:
        async with attached(follower.endpoint) as client:
            with running(followed, second) as daemon:
                async with attached(daemon.endpoint) as other:
                    await other.submit(write("w", path, [0, 1, 2]))
                    await known(client, {"second": {"STORAGE": 3, "any": 3}})
                    await other.submit(read("r", path[: 2 * BLOCK], [10, 11]))
                    await client.submit(write("mine", path, [0, 1, 2]))
                    await known(
                        client,
                        {"second": {"GPU": 2, "STORAGE": 3, "any": 3}, "first": {"STORAGE": 3, "any": 3}},
                    )
                    daemon.kill()
                    await known(client, {"first": {"STORAGE": 3, "any": 3}})
            with running(followed, second, name="again") as daemon:
                async with attached(daemon.endpoint) as other:
                    await other.submit(read("r", path[:BLOCK], [10]))
                    await known(
                        client,
                        {"second": {"GPU": 1, "STORAGE": 1, "any": 1}, "first": {"STORAGE": 3, "any": 3}},
                    )
            stats = await client.stats()
            assert stats["events"]["peers"]["second"]["unreadable"] == 0


async def test_a_node_that_joins_late_knows_what_no_kept_batch_contains(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        directory.mkdir()
    followed = tree(second, pod_name="second")
    followed["events"]["buffer"] = 2
    path = path_of(1, 3)
    with running(followed, second) as daemon:
        async with attached(daemon.endpoint) as other:
            await other.submit(write("w", path, [0, 1, 2]))
            for i in range(8):  # more batches than are kept
                await other.submit(read(f"r{i}", path[:BLOCK], [10 + i]))
            peers = {"second": {name: followed["events"][name] for name in ("endpoint", "replay_endpoint")}}
            with running(tree(first, pod_name="first", peers=peers), first) as follower:
                async with attached(follower.endpoint) as client:
                    async with timeout(60):
                        while await client.locate(path) != {"second": {"GPU": 1, "STORAGE": 3, "any": 3}}:  # noqa: ASYNC110
                            await asyncio.sleep(0.005)
                    assert (await client.stats())["events"]["peers"]["second"]["lost"] == 0


async def test_fastdeploys_queue_flushes_evicted_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As FastDeploy's eviction does it: no device blocks, the whole path, and nobody waiting."""
    monkeypatch.setenv("FD_AS_ONLY_FLUSH", "1")
    path = path_of(1, 4)
    with running(tree(tmp_path), tmp_path) as daemon:
        queue = EngineCacheQueue(daemon.endpoint, num_client=2, client_id=0)
        try:
            shared = {"keys": ["k"], "token_ids": path, "timeout": 60.0}
            finished = SimpleNamespace(
                **shared | {"keys": list("abcd")},
                task_id="finished",
                gpu_block_ids=[0, 1, 2, 3],
                start_write_block_idx=0,
                flush_cache_exists=None,
            )
            evicted = SimpleNamespace(
                **shared, task_id="evicted", gpu_block_ids=[], start_write_block_idx=3, flush_cache_exists=False
            )
            event = SimpleNamespace(name="GPU2STORAGE", value=5)
            for task in (finished, evicted):
                queue.put_transfer_task((event, task))
            answers = [await asyncio.to_thread(queue.get_transfer_done_signal, timeout=60) for _ in range(4)]
            assert [answer and answer[1:] for answer in answers] == [  # in this order, each once a rank
                *[("finished", list("abcd"), [0, 1, 2, 3])] * 2,
                *[("evicted", ["k"], [])] * 2,
            ]
            assert queue.client.locate(path) == {NODE: {"GPU": 3, "any": 3}}
        finally:
            queue.close()


def test_check_config_says_what_token_indexed_storage_comes_to(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    peer = '[storage.attention_store.peers."node 2"]\nendpoint = "tcp://10.0.0.2:5557"\n'
    file.write_text(f'[cache]\n[storage]\nbackend = "attention_store"\n{peer}')
    command = [sys.executable, "-m", "transferd", "check-config", "--config", str(file)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    again = tmp_path / "again.toml"
    again.write_text(shown.stdout)
    assert load(again, env={}) == load(file, env={})
    for value, line in (
        ("storage.attention_store.driver=sdk", "storage.attention_store.driver: needs the Python package"),
        (
            "storage.attention_store.data=redis",
            "storage.attention_store.data: expected one of memory, file,",
        ),
        ("storage.attention_store.peers.x={}", "storage.attention_store.peers[...]: object missing required field"),
    ):
        refused = subprocess.run([*command, "--set", value], capture_output=True, text=True, check=False, timeout=60)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr.startswith(line)


async def test_a_cleared_cache_is_attached_to_token_storage_again_under_another_generation(tmp_path: Path) -> None:
    with running(tree(tmp_path, driver="open"), tmp_path) as daemon:
        async with attached(daemon.endpoint) as client:
            caches = await attach(client)
            fill(caches, [3, 9], seed=1)
            path = path_of(1, 2)
            assert (await client.submit(write("w", path, [3, 9]))).status == Status.OK
            await client.clear_cache()
            assert await client.match_tokens(path) == 0
            await client.restore_cache("G2")
            await client.wait_ready(60)
            assert await client.match_tokens(path) == 0, "what the old generation stored is out of reach"
            caches = await attach(client)
            fill(caches, [5, 6], seed=2)
            before = snapshot(caches, [5, 6])
            assert (await client.submit(write("w2", path, [5, 6]))).status == Status.OK
            wipe(caches, [5, 6])
            assert (await client.submit(read("r", path, [5, 6]))).status == Status.OK
            assert snapshot(caches, [5, 6]) == before


async def test_a_store_that_cannot_change_its_generation_is_not_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_sdk(tmp_path, monkeypatch)
    with running(tree(tmp_path, driver="sdk"), tmp_path) as daemon:
        async with attached(daemon.endpoint) as client:
            with pytest.raises(TransferError, match="restart the daemon with another AS_MODEL_VERSION") as caught:
                await client.clear_cache()
            assert caught.value.reason == "fixed_generation"
            caches = await attach(client)
            fill(caches, [3], seed=1)
            assert (await client.submit(write("w", path_of(1, 1), [3]))).status == Status.OK, "nothing has changed"
