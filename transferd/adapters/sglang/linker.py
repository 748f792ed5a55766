"""TransferdLinker: SGLang's device pools straight to a transferd daemon (`--enable-unified-cache-external-linker`).

There is no host tier. SGLang's tree looks up the tail of a prompt that the device does not have, has it loaded into
slots of the request's own, and offloads what it has computed. On a GPU the daemon maps the pools; on a CPU it maps
those in shared memory, and pages of others are copied. Pools that take their page numbers from the same component of
the tree (KV and the indexer; the windows and the states) have one block for a page.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
    DevicePoolEntry,
    DevicePoolGroup,
    resolve_hybrid_device_pool_group,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker
from sglang.srt.runtime_context import get_model, get_parallel, get_serving
from sglang.srt.utils import get_device_module

from transferd.adapters.common.gpu import GpuMemory, torch_stream
from transferd.adapters.sglang.pools import AttachedPool, PageGrid
from transferd.adapters.sglang.rank import RankPools
from transferd.adapters.sglang.settings import SGLANG, LinkerSettings, checked
from transferd.errors import TransferError

OFFLOADS = 4  # at once; SGLang takes their results in order


class TransferdLinker(UnifiedCacheLinker):  # type: ignore[misc] # SGLang is not installed where mypy runs
    """SGLang calls it on the scheduler's thread. See docs/sglang.md for its keys. Raises ConfigError, TierError."""

    def __init__(
        self,
        server_args: Any,  # noqa: ARG002
        params: Any,
        *,
        components: Any,
        extra_config: Mapping[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        self.forward_stream = forward_stream
        self._rank = RankPools(config := _config(params), checked(extra_config or {}, LinkerSettings))
        group = _pool_group(params, components)
        self.pools = group.entry_map  # SGLang reads it
        self._stores = not group.rank_replicated or not config.tp_rank
        self._sources = {
            str(name): DevicePages(group, [one for one in group.entries if one.indices_from_pool == name])
            for name in dict.fromkeys(group.sources.values())
        }
        for name, pages in self._sources.items():
            self._rank.add(name, pages)
        self._rank.wait_ready()
        self.layer_done_counter = LayerWiseLoadCounter(group.num_layers)
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._queued: dict[str, list[PoolTransfer]] = {}
        self._loads: set[Future[None]] = set()
        self._offloads: deque[Future[bool]] = deque()
        self._loading = ThreadPoolExecutor(1, "transferd-load")
        self._moving = ThreadPoolExecutor(len(self._sources), "transferd-load-pool")
        self._storing = ThreadPoolExecutor(OFFLOADS, "transferd-offload")

    # --- loads --------------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:  # noqa: ARG002
        """The lengths of prefixes, in pages, that all pools can restore."""
        asked = {str(one.name): one for one in transfers}
        main = asked.pop(str(PoolName.KV), None)
        if main is None or not main.keys or not asked.keys() >= self._sources.keys() - {str(PoolName.KV)}:
            return []
        return self._rank.restorable(main.keys, list(asked.values()))[0]

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Queue a request's load. The answer depends on nothing that differs among ranks."""
        names = {str(one.name) for one in transfers if one.keys}
        if not names or not names <= self._sources.keys():
            return False
        if rid in self._queued:
            raise RuntimeError(f"a load for the request {rid} is queued already")
        self._queued[rid] = [one for one in transfers if one.keys]
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        return self._queued.pop(rid, None) is not None

    def start_layer_wise_loading(self) -> int:
        """Load what is queued, in other threads. Returns the number of this batch, -1 if nothing is queued."""
        if not self._queued:
            return -1
        queued, self._queued = self._queued, {}
        index: int = self.layer_done_counter.update_producer()
        free = get_device_module().Event()  # earlier work on this stream may still use the slots
        free.record()
        loading = self._loading.submit(self._load, index, list(itertools.chain(*queued.values())), free)
        self._loads.add(loading)
        loading.add_done_callback(self._loads.discard)
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until nothing of this batch writes to the device; whether all layers are there."""
        return bool(self.layer_done_counter.finish(counter_index))

    def _load(self, index: int, transfers: Sequence[PoolTransfer], free: Any) -> None:
        pools: dict[str, list[PoolTransfer]] = {}
        for one in transfers:
            pools.setdefault(str(one.name), []).append(one)
        batch = _Batch(self.layer_done_counter, index, {name: self._sources[name].ends for name in pools})
        try:
            free.synchronize()
            moves = {name: self._moving.submit(self._loaded, batch, name, some) for name, some in pools.items()}
            wait(moves.values())
            loaded = {name: one.result() for name, one in moves.items()}
            missing = {name: one.count(False) for name, one in loaded.items() if not all(one)}
            batch.end(TransferError(f"pages were not loaded: {missing}") if missing else None)
        except Exception as error:  # noqa: BLE001 - SGLang waits for every layer without a limit
            SGLANG.log.exception("transferd: an error of the adapter, not of the daemon")
            batch.end(error)

    def _loaded(self, batch: _Batch, name: str, transfers: Sequence[PoolTransfer]) -> list[bool]:
        def load(pool: AttachedPool, keys: Sequence[str], indices: Any) -> list[bool]:
            return pool.load(keys, indices, lambda pieces: batch.there(name, pieces))

        keys = [key for one in transfers for key in one.keys]
        slots = torch.cat([one.device_indices.cpu() for one in transfers])
        return self._rank.moved(name, keys, slots, load)[0]

    # --- offloads -----------------------------------------------------------------------------------

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:  # noqa: ARG002
        """Store pages in another thread. Their slots are the tree's, until it has taken the result."""
        some = [one for one in transfers if one.keys]
        if not some:
            return False
        stored: Future[bool] = Future()
        if self._stores:
            stored = self._storing.submit(self._stored, some, self.record_offload_ready())
        else:
            stored.set_result(True)  # rank 0 does
        self._offloads.append(stored)
        return True

    def _stored(self, transfers: Sequence[PoolTransfer], events: Sequence[Any]) -> bool:
        try:
            for event in events:
                event.synchronize()
            moved = [
                self._rank.moved(str(one.name), one.keys, one.device_indices.cpu(), AttachedPool.store)[0]
                for one in transfers
            ]
        except Exception:  # noqa: BLE001 - the scheduler must not end of it
            SGLANG.log.exception("transferd: an error of the adapter, not of the daemon")
            return False
        return all(map(all, moved))

    def num_completed_offloads(self) -> int:
        return sum(1 for _ in itertools.takewhile(Future.done, self._offloads))

    def pop_completed_offload(self) -> bool:
        return self._offloads.popleft().result()

    # --- the rest -----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Wait until nothing is moved any more, and forget what was. SGLang has emptied its pools."""
        self._queued.clear()
        for loading in list(self._loads):
            loading.result()
        for storing in self._offloads:
            storing.result()
        self._offloads.clear()
        self.layer_done_counter.reset()
        for pages in self._sources.values():
            pages.clear()

    def close(self) -> None:
        """Leave the daemon, once nothing is moved any more."""
        self.reset()
        self._loading.shutdown()
        self._moving.shutdown()
        self._storing.shutdown()
        self._rank.close()


def _pool_group(params: Any, components: Any) -> Any:
    """SGLang's DevicePoolGroup. It makes none of plain pools and of windows, so we do. Raises ValueError for others.

    A subclass of a plain pool may have more memory than we know of, so SGLang has to know it.
    """
    kv = params.token_to_kv_pool_allocator.get_kvcache()
    windows = type(kv) is SWAKVPool
    pools = {PoolName.KV: kv.full_kv_pool, PoolName.SWA: kv.swa_kv_pool} if windows else {PoolName.KV: kv}
    plain = all(type(one) in (MHATokenToKVPool, MLATokenToKVPool) and not _scaled(one) for one in pools.values())
    if not plain or params.mtp_draft_device_pools or params.sidecar_draft_device_pools:
        how = {"page_size": params.page_size, "params": params, "components": components}
        return resolve_hybrid_device_pool_group(kvcache=kv, **how)
    entries = []
    for name, pool in pools.items():
        keys, values = (pool.kv_buffer, ()) if type(pool) is MLATokenToKVPool else (pool.k_buffer, pool.v_buffer)
        layers = {
            layer - kv.start_layer: local
            for layer, (local, is_window) in (kv.layers_mapping.items() if windows else ())
            if is_window == (name == PoolName.SWA)
        } or {layer: layer for layer in range(len(keys))}
        entries.append(
            DevicePoolEntry(
                name=name,
                indices_from_pool=name,
                device_pool=pool,
                components=[[*keys, *values]],
                layer_mapping={
                    layer: (local, len(keys) + local) if values else local for layer, local in layers.items()
                },
                page_size=params.page_size,
                rows_are_pages=False,
            )
        )
    count = 1 + max(layer for one in entries for layer in one.layer_mapping)
    replicated = type(kv) is MLATokenToKVPool
    return DevicePoolGroup(entries, count, params.page_size, rank_replicated=replicated)


def _scaled(pool: Any) -> bool:
    """Whether a pool keeps scales beside its keys and values."""
    return any(getattr(pool, name, None) is not None for name in ("k_scale_buffer", "native_k_scale_buffer"))


class _Lies(NamedTuple):
    """A piece of each page: for GpuMemory (`common.gpu.Blocks`)."""

    pieces: tuple[int, ...]
    nbytes: int
    stride: int


class DevicePages:
    """The pages that one component of SGLang's tree numbers, in all device pools that go by these numbers.

    To `pools.AttachedPool` it is one host pool. The pieces of a page are in the order in which layers need them.
    ends: for each layer, how many leading pieces hold it and all before it.
    """

    layout = "device"

    def __init__(self, group: Any, entries: Sequence[Any]) -> None:
        self._entries = entries
        self.rank_replicated = bool(group.rank_replicated)
        self.page_size = entries[0].page_size
        self.size = self.page_size * min(_pages(one, self.page_size) for one in entries)
        order: dict[tuple[int, int], None] = {}  # an entry, and a piece of its pages; layers may share one
        self.ends: list[int] = []
        for layer in range(group.num_layers):
            order |= dict.fromkeys((i, piece) for i, one in enumerate(entries) for piece in _pieces_of(one, layer))
            self.ends.append(len(order))
        order |= dict.fromkeys((i, piece) for i, one in enumerate(entries) for piece in range(len(one.kv_buffer)))
        self._order = list(order)
        kinds = [f"{one.name}, {type(one.device_pool).__name__}" for one in entries]
        shapes = {f"{tensor.dtype}{list(tensor.shape[1:])}" for tensor in self._tensors()}
        self.storage_format_tag = f"{'; '.join(kinds)}: {', '.join(sorted(shapes))}"

    def clear(self) -> None:
        """Called when SGLang has emptied the pools; the adapter watches it."""

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """Where one page lies."""
        each = [one.get_page_buffer_meta(torch.as_tensor(indices)) for one in self._entries]
        return [each[i][0][piece] for i, piece in self._order], [each[i][1][piece] for i, piece in self._order]

    def _tensors(self) -> Iterator[Any]:
        return (self._entries[i].kv_buffer[piece] for i, piece in self._order)

    @property
    def on_gpu(self) -> bool:
        return bool(next(self._tensors()).is_cuda)

    def device_memory(self, pages: PageGrid) -> GpuMemory:
        """What the daemon maps. Raises TierError."""
        lies = [_Lies((0,), size, stride) for size, stride in zip(pages.sizes, pages.strides, strict=True)]
        return GpuMemory(
            0,
            list(self._tensors()),
            lies,
            program=SGLANG,
            instead="TransferdHiCache",
            gather=lambda gpu: [gpu],
            stream=torch_stream,
        )


def _pages(entry: Any, tokens: int) -> int:
    """How many pages a device pool has. A row of its tensors is a page or a token."""
    (_, _, size), tensor = entry.buffer_meta[0][0], entry.components[0][0]
    rows: int = size // (tensor.nbytes // tensor.shape[0])
    assert rows in (1, tokens)
    count: int = min(one.shape[0] for one in entry.kv_buffer)
    return count // rows


def _pieces_of(entry: Any, layer: int) -> list[int]:
    """Which pieces of a page hold this layer: of each component of the pool, those of its tensors for the layer."""
    mapped = entry.layer_mapping.get(layer, ())
    begins = itertools.accumulate(map(len, entry.components[:-1]), initial=0)
    return [begin + one for begin in begins for one in ([mapped] if isinstance(mapped, int) else mapped)]


class _Batch:
    """Which layers of a batch of loads are there. The last one is only once nothing writes any more.

    ends: see DevicePages, by pool.
    """

    def __init__(self, counter: Any, index: int, ends: Mapping[str, Sequence[int]]) -> None:
        self._counter, self._index, self._ends = counter, index, ends
        self._there = dict.fromkeys(ends, 0)
        self._lock = threading.Lock()
        self._complete = 0  # layers

    def there(self, name: str, pieces: int) -> None:
        """A pool has so many leading pieces of all pages."""
        with self._lock:
            self._there[name] = pieces
            layers = (bisect.bisect_right(ends, self._there[one]) for one, ends in self._ends.items())
            self._up_to(min(*layers, self._counter.num_layers - 1))

    def end(self, error: BaseException | None) -> None:
        """Nothing writes any more."""
        with self._lock:
            if error is None:
                self._up_to(self._counter.num_layers)
            else:
                self._counter.fail(self._index, error)

    def _up_to(self, layers: int) -> None:
        for layer in range(self._complete, layers):
            self._counter.complete(self._index, layer)
        self._complete = max(self._complete, layers)


def _config(params: Any) -> HiCacheStorageConfig:
    """What SGLang gives a storage of HiCache: the rank's place."""
    parallel = get_parallel()
    by_data = is_dp_attention_enabled()
    return HiCacheStorageConfig(
        tp_rank=parallel.attn_tp_rank if by_data else parallel.tp_rank,
        tp_size=parallel.attn_tp_size if by_data else parallel.tp_size,
        dp_rank=parallel.attn_dp_rank if by_data else 0,
        pp_rank=params.pp_rank,
        pp_size=params.pp_size,
        attn_cp_rank=params.attn_cp_rank,
        attn_cp_size=params.attn_cp_size,
        is_mla_model=False,  # whether ranks have the same bytes, SGLang's pools say
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name=get_serving().served_model_name or get_model().model_path,
        extra_config={},
    )
