"""A FastDeploy engine with its real PrefixCacheManager and signals, and workers that write and check every byte.

What is FastDeploy's: the PrefixCacheManager and how it launches and waits, the IPC signals, requests' way through the
tree, the control functions of its EngineService. What stands in: the attention backend's cache shape and the list of
visible devices (neither exists without a GPU), and the model: a worker that fills each block with bytes that follow
from its tokens, its rank, layer and plane, and that checks them wherever FastDeploy says a block is cached.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import os
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from fastdeploy import envs
from fastdeploy.cache_manager import prefix_cache_manager as fastdeploy_manager
from fastdeploy.engine import common_engine
from fastdeploy.inter_communicator import IPCSignal
from fastdeploy.utils import get_hash_str

from transferd import SyncClient
from transferd.blocks.layout import build_layout
from transferd.cli.pool.master import free_port
from transferd.client.launch import DaemonProcess
from transferd.config.loading import from_tree
from transferd.errors import TransferError
from transferd.runtime.threads import ThreadPools
from transferd.tiers.segment import attach_arrays
from transferd.tiers.shm import ShmDeviceTier

BLOCK_SIZE = 4
HEADS, DIM, LAYERS = 2, 8, 3
TIMEOUT_S = 120.0  # a busy machine takes most of a minute to start a daemon
_ids = itertools.count()
# Release 2.5 passes --create_cache_tensor in every mixed engine, later ones (#7471) only with a storage backend.
CREATES_FOR_HOST = '" --create_cache_tensor" if not self.enable_splitwise' in inspect.getsource(fastdeploy_manager)

if fastdeploy_manager.get_all_visible_devices is None:  # on a platform without devices
    fastdeploy_manager.get_all_visible_devices = lambda: "CUDA_VISIBLE_DEVICES=0"


def address_at(port: int) -> Any:
    """Where FastDeploy's queues of this port are: since release 2.6 at a socket in /dev/shm, before at the port."""
    return f"/dev/shm/fd_task_queue_{port}.sock" if envs.FD_ENGINE_TASK_QUEUE_WITH_SHM else ("127.0.0.1", port)


@dataclass
class Shape:
    """What a test varies."""

    tp: int = 1
    gpu_blocks: int = 24
    cpu_blocks: int = 24
    backend: str | None = None
    role: str = "mixed"
    dp: int = 0
    groups: int = 1
    model: str = "some-model"
    routing: Any = None
    dtype: str = "bfloat16"
    latent: int = 0  # elements of a token's latent (MLA): there are no values then
    speculative: str = "{}"
    late: bool = False  # workers or messager create when the engine already waits for them
    devices: list[int] = field(default_factory=list)

    @property
    def creates(self) -> bool:
        """FastDeploy's rule for who creates the device cache: its transfer processes, or workers and messager."""
        return self.role == "mixed" and (self.backend is not None or CREATES_FOR_HOST)


class Worker:
    """One rank: device blocks as arrays, filled and checked by content."""

    def __init__(self, rank: int, caches: dict[str, list[npt.NDArray[Any]]]) -> None:
        self.rank = rank
        self.caches = caches

    def fill(self, block: int, content: str) -> None:
        for plane, layer, array in self._arrays():
            array[block] = self._bytes(array[block], content, plane, layer)

    def check(self, block: int, content: str) -> None:
        for plane, layer, array in self._arrays():
            wanted = self._bytes(array[block], content, plane, layer)
            assert np.array_equal(array[block], wanted), f"rank {self.rank} block {block}: {plane} of layer {layer}"

    def holds(self, block: int, content: str) -> bool:
        """Whether a block has this content already, which somebody else is about to copy into it."""
        return all(
            np.array_equal(array[block], self._bytes(array[block], content, plane, layer))
            for plane, layer, array in self._arrays()
        )

    def _arrays(self) -> Iterator[tuple[str, int, npt.NDArray[Any]]]:
        for plane, layers in self.caches.items():
            for layer, array in enumerate(layers):
                yield plane, layer, array

    def _bytes(self, like: npt.NDArray[Any], content: str, plane: str, layer: int) -> npt.NDArray[Any]:
        seed = zlib.crc32(f"{content}/{self.rank}/{plane}/{layer}".encode())
        made = np.random.default_rng(seed).integers(0, 256, like.nbytes, dtype=np.uint8)
        return made.view(like.dtype).reshape(like.shape)


class Engine:
    """One data-parallel group. Use `engine(...)`, which ends it."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.port, self.cache_port = free_port(), free_port()
        self.signals = _signals(shape.tp, self.port)
        self.workers: list[Worker] = []
        self._tiers: list[ShmDeviceTier] = []
        self._making: threading.Thread | None = None
        self.clients: list[SyncClient] = []
        self.processes: list[Any] = []
        self.address = address_at(self.cache_port)
        self.queue = common_engine.EngineCacheQueue(
            address=self.address,
            authkey=b"cache_queue_service",
            is_server=True,
            num_client=shape.tp,
            client_id=-1,
            local_data_parallel_size=shape.groups,
        )
        self.config = _config(shape, self.cache_port)
        self.manager = fastdeploy_manager.PrefixCacheManager(self.config, shape.tp, shape.role, shape.dp)
        self.devices = shape.devices or list(range(shape.tp))
        self._stand_in()
        self.manager.gpu_cache_lock = SimpleNamespace(acquire=lambda: None, release=lambda: None)

    def _stand_in(self) -> None:
        """In place of what needs a GPU: the shape that an attention backend gives, and the cache messager."""
        blocks, latent = self.shape.gpu_blocks, self.shape.latent
        keys = [blocks, 1, BLOCK_SIZE, latent] if latent else [blocks, HEADS, BLOCK_SIZE, DIM]
        self.manager._get_kv_cache_shape = lambda _: (keys, [] if latent else keys)
        if self.shape.role != "mixed":
            self.manager.launch_cache_messager = lambda *_: [_Idle()]

    def start(self) -> None:
        """As FastDeploy's `start_cache_service`, with workers that do their part meanwhile."""
        makers = threading.Thread(target=self._make_memory)
        if not self.shape.creates:
            makers.start()
        try:
            self.processes = self.manager.launch_cache_manager(
                cache_config=self.config.cache_config,
                tensor_parallel_size=self.shape.tp,
                device_ids=[str(device) for device in self.devices],
                pod_ip="127.0.0.1",
                engine_worker_queue_port=self.port,
                ipc_suffix=self.port,
                create_cache_tensor=False,
            )
        finally:
            if not self.shape.creates:
                makers.join()
        if self.shape.creates:
            self.attach()

    # --- workers ------------------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        return str(self.queue.group.endpoint)

    def client(self) -> SyncClient:
        group, token = self.queue.group, self.queue.client.token
        name = group._engine if token else ""
        made = SyncClient(self.endpoint, await_ready=False, engine=name, token=token)
        made.connect()
        self.clients.append(made)
        return made

    def attach(self, *, again: bool = False) -> None:
        """The workers map what the daemon created, when they see cache_ready_signal. again: after a restart."""
        if again:
            for client in self.clients:
                client.close()
            self.clients.clear()
        assert self.signals["cache_ready_signal"].value.tolist() == [1] * self.shape.tp
        client = self.client()
        self.workers = [Worker(rank, client.attach(rank)) for rank in range(self.shape.tp)]

    def unmap(self) -> None:
        """The workers let go of what the daemon created, and say so."""
        self.workers = []
        self.signals["cache_ready_signal"].value[:] = 0

    def make_anew(self) -> None:
        """The workers create their cache again, in the time that a wakeup gives them, unless they are at it."""
        if self._making is not None and self._making.is_alive():
            return
        self.workers = []
        for tier in self._tiers:
            asyncio.run(tier.close())
        self._tiers = []
        self._making = threading.Thread(target=self._make_memory)
        self._making.start()

    def inflight(self) -> list[int]:
        return [int(value) for value in self.manager.cache_task_inflight_signal.value]

    def _make_memory(self) -> None:
        """The workers, or the cache messager, create; then they say so."""
        if self.shape.late:
            group = self.queue.group
            wait_for(lambda: group.endpoint is not None or group.failed)
        wanted = {
            "device": "shm", "ranks": self.shape.tp, "layers": LAYERS, "kv_heads": HEADS, "head_dim": DIM,
            "block_size": BLOCK_SIZE, "device_blocks": self.shape.gpu_blocks, "host_blocks": 0,
        }  # fmt: skip
        layout = build_layout(from_tree({"cache": wanted}).geometry)
        for rank in range(self.shape.tp):
            tier = ShmDeviceTier(layout, rank, rank, ThreadPools(1))
            asyncio.run(tier.open())
            self._tiers.append(tier)
        self.workers = [Worker(tier.rank, attach_arrays(tier.handle().data)) for tier in self._tiers]
        for rank in range(self.shape.tp):
            self.signals["cache_ready_signal"].value[rank] = 1
        self.offer()

    def offer(self) -> None:
        """Memory without a published name, as shm has none, is offered by its maker; the daemon may be starting."""
        group = self.queue.group
        wait_for(lambda: group.endpoint is not None or group.failed)
        wait_for(lambda: group.failed or group.closing.is_set() or self._offered())

    def _offered(self) -> bool:
        try:
            client = next((one for one in self.clients if one.connected), None) or self.client()
            for tier in self._tiers:
                client.offer(tier.rank, tier.handle())
        except TransferError:  # the group's own error is what a test looks at
            return False
        return True

    # --- requests -----------------------------------------------------------------------------------

    def run(self, tokens: Sequence[int], output: Sequence[int] = ()) -> dict[str, Any]:
        """One request from its match to its end, every byte checked; how many tokens were found where."""
        request = self.begin(tokens)
        metrics: dict[str, Any] = request.metrics
        self.finish(request, output)
        return metrics

    def begin(self, tokens: Sequence[int], *, computed: bool = True) -> Any:
        """computed: the blocks that were not found are computed; else somebody else is about to send them."""
        request = SimpleNamespace(
            request_id=f"req-{next(_ids)}", prompt_token_ids=list(tokens), output_token_ids=[], block_tables=[],
            multimodal_inputs=None, num_total_tokens=len(tokens), num_cached_blocks=0, user="", metrics=None,
        )  # fmt: skip
        manager = self.manager
        needed = -(-len(tokens) // BLOCK_SIZE)
        assert manager.can_allocate_gpu_blocks(needed), "no room"
        found, matched, request.metrics = manager.request_match_blocks(request, BLOCK_SIZE)
        assert len(found) * BLOCK_SIZE == matched
        contents = chain(tokens)
        for block, content in zip(found, contents, strict=False):
            for worker in self.workers:
                worker.check(block, content)
        request.block_tables = found + manager.allocate_gpu_blocks(needed - len(found))
        missing = list(zip(request.block_tables, contents, strict=False))[len(found) :]
        for block, content in missing if computed else ():
            for worker in self.workers:
                worker.fill(block, content)
        if computed:
            manager.update_cache_blocks(request, BLOCK_SIZE, len(tokens))
        return request

    def finish(self, request: Any, output: Sequence[int] = ()) -> None:
        request.output_token_ids = list(output)
        self.manager.write_cache_to_storage(request)
        self.manager.release_block_ids(request)
        self.manager.recycle_gpu_blocks(request.block_tables[request.num_cached_blocks :], request.request_id)
        request.block_tables = []

    def settle(self) -> None:
        """Wait until no eviction is under way, then check FastDeploy's books."""
        future = self.manager.gpu_free_task_future
        if future is not None:
            future.result(TIMEOUT_S)
        wait_for(self.queue.empty)
        wait_for(self.queue._taken.is_set)
        self.check_books()

    def check_books(self) -> None:
        """Every block is free or in the tree, once; no node is in transit; a leaf that nobody holds can be evicted."""
        manager = self.manager
        states = {node.cache_status.name for node in manager.node_map.values()}
        assert states <= {"GPU", "CPU"}, states
        held = [n.block_id for n in manager.node_map.values() if n.has_in_gpu]
        assert sorted(held + manager.gpu_free_block_list) == list(range(self.shape.gpu_blocks))
        swapped = [n.block_id for n in manager.node_map.values() if not n.has_in_gpu]
        assert sorted(swapped + manager.cpu_free_block_list) == list(range(self.shape.cpu_blocks))
        for node in manager.node_map.values():
            assert node.shared_count == 0
            if node.is_gpu_leaf_node:
                assert node in manager.gpu_lru_leaf_set
            if node.is_cpu_leaf_node:
                assert node in manager.cpu_lru_leaf_set
        assert not manager.task_swapping_event
        assert not manager.task_prefetch_event
        assert not manager.task_write_back_event

    @property
    def daemon(self) -> DaemonProcess:
        """The daemon that this engine has started last."""
        companion = self.queue.group._companion
        assert companion is not None
        process = companion.process
        assert isinstance(process, DaemonProcess)
        return process

    def report(self) -> dict[str, Any]:
        """What the daemon reports of this engine."""
        group = self.queue.group
        engines: dict[str, dict[str, Any]] = group.client.stats()["engines"]
        return engines[group._engine]

    def kill_daemon(self) -> None:
        self.daemon.process.kill()
        self.daemon.process.wait(TIMEOUT_S)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.manager.cache_task_queue = Ended()
        status = getattr(self.manager, "prefix_tree_status_signal", None)
        if status is not None:
            status.value = Ended()
        self.queue.cleanup()
        for tier in self._tiers:
            asyncio.run(tier.close())
        for one in self.signals.values():
            one.clear()
        for name in ("shm_cache_task_flag_broadcast", "cache_task_is_paused_signal", "cache_task_inflight_signal"):
            if hasattr(self.manager, name):  # its launch makes them
                getattr(self.manager, name).clear()


def chain(tokens: Sequence[int]) -> list[str]:
    """What stands in each full block: a hash of its tokens and all before them, as FastDeploy makes its keys."""
    hashes: list[str] = []
    for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
        hashes.append(get_hash_str(list(tokens[start : start + BLOCK_SIZE]), hashes[-1:]))
    return hashes


@contextlib.contextmanager
def engine(**shape: Any) -> Iterator[Engine]:
    made = Engine(Shape(**shape))
    try:
        made.start()
        yield made
    finally:
        made.close()


def wait_for(condition: Any) -> None:
    done = threading.Event()
    for _ in range(int(TIMEOUT_S / 0.01)):
        if condition():
            return
        done.wait(0.01)
    raise AssertionError(f"not within {TIMEOUT_S} s")


class Ended:
    """Stops FastDeploy's endless threads at their next look, for good. They are daemons; in an engine the process ends.

    They do not raise: pytest would see it whenever it comes, which may be after the last test.
    """

    def get_transfer_done_signal(self) -> None:
        threading.Event().wait()

    def __getitem__(self, _: int) -> int:
        threading.Event().wait()
        raise AssertionError("unreachable")


class _Idle:
    """A cache messager that does nothing; it has a pid to be ended by, which nothing here uses."""

    pid = os.getpid()

    def poll(self) -> None:
        return None


def _signals(tp: int, suffix: int) -> dict[str, Any]:
    """Those that FastDeploy's engine makes before it launches anything."""
    sizes = dict.fromkeys(("cache_ready_signal", "swap_space_ready_signal", "cache_transfer_inited_signal"), tp)
    sizes["worker_healthy_live_signal"] = tp
    sizes |= dict.fromkeys(("prefix_tree_status", "kv_cache_status", "model_weights_status"), 1)
    return {
        name: IPCSignal(name=name, array=np.zeros([size], dtype=np.int32), dtype=np.int32, suffix=suffix, create=True)
        for name, size in sizes.items()
    }


def _config(shape: Shape, cache_port: int) -> Any:
    cache = SimpleNamespace(
        total_block_num=shape.gpu_blocks, prefill_kvcache_block_num=shape.gpu_blocks, num_cpu_blocks=shape.cpu_blocks,
        enable_prefix_caching=True, enable_output_caching=False, cache_dtype=shape.dtype, block_size=BLOCK_SIZE,
        model_cfg=SimpleNamespace(num_hidden_layers=LAYERS), cache_transfer_protocol="ipc",
        bytes_per_token_per_layer=64, local_cache_queue_port=cache_port, local_rdma_comm_ports=None,
        kvcache_storage_backend=shape.backend, write_policy="write_through",
    )  # fmt: skip
    model = SimpleNamespace(model=shape.model, dtype="bfloat16", max_model_len=shape.gpu_blocks * BLOCK_SIZE)
    return SimpleNamespace(
        cache_config=cache,
        model_config=model,
        speculative_config=SimpleNamespace(to_json_string=lambda: shape.speculative),
        parallel_config=SimpleNamespace(tensor_parallel_size=shape.tp),
        quant_config=None,
        routing_replay_config=shape.routing,
    )
