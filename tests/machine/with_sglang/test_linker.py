"""TransferdLinker under SGLang's own tree and pools, made by the fixtures that its wheel has: every byte compared."""

from __future__ import annotations

import os
import signal
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, MatchPrefixParams
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.mixins import UnifiedRadixCacheFixtures

from tests.support.waits import wait_until
from transferd.adapters import conformance
from transferd.adapters.conformance import CHECKS, Bench, Trial
from transferd.adapters.sglang.linker import _Batch
from transferd.errors import ConfigError

pytestmark = pytest.mark.usefixtures("place", "one_rank")

PAGES = 6
FULL = (ComponentType.FULL,)
WINDOWS = (ComponentType.FULL, ComponentType.SWA)
CONFIGS = [
    pytest.param(CacheConfig(page_size=1, components=FULL), id="full-1"),
    pytest.param(CacheConfig(page_size=16, components=FULL), id="full-16"),
    pytest.param(CacheConfig(page_size=4, components=WINDOWS, sliding_window_size=8), id="windows"),
    pytest.param(CacheConfig(page_size=16, components=WINDOWS, sliding_window_size=16, kv_size=512), id="windows-16"),
]


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fixtures, "get_device", lambda: "cpu")

    def paged(*, kvcache: Any, **more: Any) -> Any:
        """What a server has; the fixture's own one gives slots that begin no page."""
        if kvcache.page_size == 1:
            return TokenToKVPoolAllocator(kvcache=kvcache, **more)
        return PagedTokenToKVPoolAllocator(kvcache=kvcache, page_size=kvcache.page_size, **more)

    monkeypatch.setattr(fixtures, "TokenToKVPoolAllocator", paged)
    with get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1):
        yield


@dataclass
class Worker(UnifiedRadixCacheFixtures):  # type: ignore[misc] # SGLang is not installed where mypy runs
    """SGLang's tree over pools of this configuration, which are full of random bytes, and the linker.

    shared: whether another process can map the pools.
    """

    cfg: CacheConfig
    shared: bool = False
    seed: int = 0
    linked: bool = True

    def __post_init__(self) -> None:
        self.cache, self.allocator, self.requests = fixtures.build_fixture(self.cfg)
        for number, tensor in enumerate(self.tensors()):
            if self.shared:
                tensor.untyped_storage()._share_fd_cpu_()
            draw = torch.Generator().manual_seed(1000 * self.seed + number)
            flat = tensor.view(torch.uint8)
            flat.copy_(torch.randint(0, 256, flat.shape, generator=draw, dtype=torch.uint8))
        if self.linked:
            self.link()

    def link(self, **extra: Any) -> None:
        self.cache.init_cache_linker(
            create_unified_cache_linker(
                ServerArgs(model_path="dummy", page_size=self.cfg.page_size),
                self.cache.cache_init_params,
                backend="dynamic",
                config={
                    "linker": "TransferdLinker",
                    "linker_module_path": "transferd.adapters.sglang",
                    "linker_extra_config": {"weights": "tiny"} | extra,
                },
                components=set(self.cache.components),
            )
        )

    @property
    def linker(self) -> Any:
        return self.cache.linker.cache_linker

    def tensors(self, name: str = "") -> list[Any]:
        """K of every layer and V of every layer; of one of the pools, or of all."""
        kv = self.allocator.get_kvcache()
        pools = {"full": getattr(kv, "full_kv_pool", kv)}
        if self.cfg.has_swa:
            pools["windows"] = kv.swa_kv_pool
        return [one for key, pool in pools.items() if name in ("", key) for one in (*pool.k_buffer, *pool.v_buffer)]

    def content(self, slots: Any) -> list[bytes]:
        """The bytes of these slots in every layer of every pool; of the windows, of the last slots."""
        found = [tensor[slots] for tensor in self.tensors("full")]
        if self.cfg.has_swa:
            last = self.allocator.full_to_swa_index_mapping[slots[-self.window :]]
            found += [tensor[last] for tensor in self.tensors("windows")]
        return [one.contiguous().view(torch.uint8).numpy().tobytes() for one in found]

    @property
    def window(self) -> int:
        page, window = int(self.cfg.page_size), int(self.cfg.sliding_window_size or 0)
        return -(-window // page) * page

    def store(self, tokens: Sequence[int]) -> None:
        """Have the tree take in tokens as computed, and offload them."""
        self._insert(self.cache, self.allocator, self.requests, list(tokens))

    def offloaded(self) -> list[bool]:
        """Wait until SGLang has taken the results of all offloads."""
        taken: list[bool] = []
        take = self.linker.pop_completed_offload
        self.linker.pop_completed_offload = lambda: (taken.append(take()), taken[-1])[1]

        def done() -> bool:
            self.cache.check_hicache_events()
            return not self.cache.linker.pending_offloads

        wait_until(done, "SGLang waits for an offload", within=60)
        return taken

    def slots(self, tokens: Sequence[int]) -> Any:
        """Where the device has these tokens."""
        match = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))
        return self.cache.path_device_indices(match.last_device_node)

    def match(self, tokens: Sequence[int]) -> Any:
        """A request for these tokens; `request.found` is how many of them are stored."""
        request = self._make_req(self.requests)
        request.rid = str(request.rid)
        key = RadixKey(array("q", tokens))
        found = self.cache.match_prefix(MatchPrefixParams(key=key, req=request))
        self._apply_match_to_req(request, found)
        request.found = found.host_hit_length
        return request

    def begin_load(self, request: Any) -> tuple[Any, int]:
        """The slots that the request's load goes to, and the number of the batch."""
        asked = InitLoadBackParams(
            best_match_node=request.best_match_node, host_hit_length=request.host_hit_length, req=request
        )
        count, _ = self.cache.init_load_back(asked)
        assert count == request.found
        return self.cache.linker.private_load_indices[request.rid], self.cache.ready_to_load_host_cache()

    def tokens(self, start: int = 0) -> list[int]:
        made: list[int] = self._make_seq(start, PAGES)
        return made


@pytest.mark.parametrize("shared", [False, True], ids=["copied", "mapped"])
@pytest.mark.parametrize("cfg", CONFIGS)
def test_another_worker_gets_the_bytes_layer_by_layer_and_no_other_slot_is_touched(
    cfg: CacheConfig, shared: bool
) -> None:
    first = Worker(cfg, shared)
    tokens = first.tokens()
    first.store(tokens)
    assert all(first.offloaded())
    wanted = first.content(first.slots(tokens))
    second = Worker(cfg, shared, seed=1)
    before = [tensor.clone() for tensor in second.tensors()]
    assert second.match([7, *tokens]).found == 0
    request = second.match([*tokens, 7])
    assert request.found == len(tokens)
    slots, batch = second.begin_load(request)
    counter = second.linker.layer_done_counter
    counter.set_consumer(batch)
    layers = len(second.tensors("full")) // 2
    for layer in range(cfg.num_layers if cfg.has_swa else layers):
        counter.wait_until(layer)  # as a pool does before attention reads the layer
        if not cfg.has_swa:
            there = second.content(slots)
            assert [there[layer], there[layers + layer]] == [wanted[layer], wanted[layers + layer]]
    assert second.cache.linker.finish_loads() == []
    assert second.content(slots) == wanted
    moved = {"full": slots}
    if cfg.has_swa:
        moved["windows"] = second.allocator.full_to_swa_index_mapping[slots[-second.window :]]
    after = iter(before)
    for name, where in moved.items():
        for tensor in second.tensors(name):
            old, kept = next(after), torch.ones(len(tensor), dtype=torch.bool)
            kept[where] = False
            assert torch.equal(tensor[kept].view(torch.uint8), old[kept].view(torch.uint8))
    second.cache.linker.close()
    first.cache.linker.close()


def test_only_what_every_pool_has_is_found() -> None:
    worker = Worker(CacheConfig(page_size=4, components=WINDOWS, sliding_window_size=8))
    head, whole = worker.tokens()[:8], worker.tokens()
    worker.store(head)
    worker.store(whole)
    assert all(worker.offloaded())
    other = Worker(worker.cfg, seed=1)
    asked: list[Any] = []
    lookup = other.linker.lookup
    other.linker.lookup = lambda rid, transfers: (asked.append(transfers), lookup(rid, transfers))[1]
    assert other.match([*whole, 7]).found == len(whole)
    assert lookup("windows are not asked for", [one for one in asked[0] if one.name == PoolName.KV]) == []
    assert other.match([*head, 7]).found == len(head)
    assert other.match([*whole[:12], 7, 7, 7, 7]).found == 12
    assert other.linker._rank.pools.keys() == {"kv", "swa"}
    other.cache.linker.close()
    worker.cache.linker.close()


def test_a_load_that_fails_fails_its_requests_alone_and_the_tree_gets_nothing_of_it(place: Path) -> None:
    cfg = CacheConfig(page_size=16, components=FULL)
    worker = Worker(cfg)
    worker.store(worker.tokens())
    assert all(worker.offloaded())
    other = Worker(cfg, seed=1)
    request = other.match([*other.tokens(), 7])
    assert request.found == len(other.tokens())
    blocks = place / "cache" / "transferd" / "sglang" / "blocks"
    files = [one for one in blocks.rglob("*") if one.is_file() and one.stat().st_size > 4096]
    assert len(files) >= PAGES
    files[2].unlink()
    other.begin_load(request)
    request.skip_radix_cache_insert = False
    assert other.cache.finish_external_linker_loads([request]) == [request]
    assert request.skip_radix_cache_insert
    assert len(other.slots(other.tokens())) == 0
    other.cache.linker.close()
    worker.cache.linker.close()


def test_without_a_daemon_nothing_is_found_and_offloads_end_and_the_next_one_is_used() -> None:
    worker = Worker(CacheConfig(page_size=16, components=FULL))
    worker.store(worker.tokens())
    assert all(worker.offloaded())
    link = worker.linker._rank.pools["kv"].link
    os.kill(link._companion.started.process.pid, signal.SIGKILL)
    wait_until(lambda: not link.ready, "the daemon is not missed", within=60)
    worker.store(worker.tokens(1000))
    assert worker.offloaded() in ([False], [True])  # of the next daemon
    wait_until(lambda: link.ready, "no next daemon", within=60)
    other = Worker(worker.cfg, seed=1)
    assert other.match([*worker.tokens(), 7]).found == len(worker.tokens())
    other.cache.linker.close()
    worker.cache.linker.close()


def test_a_queued_load_is_cancelled_and_a_flush_waits_for_what_runs() -> None:
    worker = Worker(CacheConfig(page_size=16, components=FULL))
    worker.store(worker.tokens())
    worker.cache.reset()  # with an offload under way
    assert worker.linker.num_completed_offloads() == 0
    other = Worker(worker.cfg, seed=1)
    request = other.match([*worker.tokens(), 7])
    assert request.found == len(worker.tokens())
    other.cache.init_load_back(
        InitLoadBackParams(
            best_match_node=request.best_match_node, host_hit_length=request.host_hit_length, req=request
        )
    )
    other.cache.linker.release_request(request.rid)
    assert other.cache.ready_to_load_host_cache() == -1
    other.cache.linker.close()
    worker.cache.linker.close()


def test_new_weights_find_nothing_and_store_nothing_of_the_old_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    version = [("", 0)]
    monkeypatch.setattr("transferd.adapters.sglang.weights.of_sglang", lambda: version[0])
    worker = Worker(CacheConfig(page_size=16, components=FULL))
    tokens = worker.tokens()
    worker.store(tokens)
    assert all(worker.offloaded())
    version[0] = "step-2", 0
    worker.store(worker.tokens(1000))
    assert worker.offloaded() == [False], "SGLang has not emptied its pool"
    worker.cache.reset()
    worker.allocator.clear()
    assert worker.match([*tokens, 7]).found == 0
    worker.store(worker.tokens(2000))
    assert worker.offloaded() == [True]
    worker.cache.linker.close()


def test_layers_are_there_once_every_pool_has_them_and_the_last_one_at_the_end() -> None:
    there: list[int] = []
    failed: list[BaseException] = []
    counter = SimpleNamespace(
        num_layers=4, complete=lambda _, layer: there.append(layer), fail=lambda _, error: failed.append(error)
    )
    batch = _Batch(counter, 0, {"kv": [2, 2, 4, 4], "swa": [0, 2, 2, 4]})
    batch.there("kv", 4)
    assert there == [0]
    batch.there("swa", 1)
    assert there == [0]
    batch.there("swa", 4)
    assert there == [0, 1, 2], "the last one, while the daemon may still write"
    batch.end(None)
    assert (there, failed) == ([0, 1, 2, 3], [])
    error = OSError()
    _Batch(counter, 0, {"kv": [2, 2, 4, 4]}).end(error)
    assert failed == [error]


class TriedLinker:
    """The linker as `transferd.adapters.conformance` asks for it: each page is loaded alone, as it may be missing."""

    blocks = 24

    def __init__(self, trial: Trial) -> None:
        cfg = CacheConfig(page_size=16, components=FULL, kv_size=16 * self.blocks, num_layers=2)
        self._worker = Worker(cfg, shared=not trial.private, linked=False)
        self._tensors = self._worker.tensors()
        self.block_bytes = sum(one[:16].nbytes for one in self._tensors)
        said = ServerArgs(model_path="dummy", served_model_name=trial.model, page_size=16)
        set_global_server_args_for_scheduler(said)
        self._worker.link(load_timeout=trial.timeout, **trial.settings())
        self._linker = self._worker.linker

    def _parts(self, block: int) -> list[Any]:
        return [one[block * 16 : block * 16 + 16].view(torch.uint8).flatten() for one in self._tensors]

    def fill(self, block: int, content: bytes) -> None:
        parts = self._parts(block)
        for part, some in zip(parts, torch.frombuffer(bytearray(content), dtype=torch.uint8).chunk(4), strict=True):
            part.copy_(some)

    def read(self, block: int) -> bytes:
        return b"".join(bytes(part.numpy()) for part in self._parts(block))

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return [self._linker.lookup("look", [PoolTransfer(name=PoolName.KV, keys=[key])]) == [1] for key in keys]

    def _page(self, key: str, block: int) -> list[PoolTransfer]:
        slots = torch.arange(block * 16, block * 16 + 16)
        return [PoolTransfer(name=PoolName.KV, keys=[key], device_indices=slots)]

    def store(self, keys: Sequence[str], blocks: Sequence[int]) -> list[bool]:
        assert all(self._linker.offload(self._page(*one)) for one in zip(keys, blocks, strict=True))
        wait_until(lambda: self._linker.num_completed_offloads() == len(keys), "an offload does not end", within=120)
        return [self._linker.pop_completed_offload() for _ in keys]

    def load(self, keys: Sequence[str], blocks: Sequence[int]) -> list[bool]:
        return [self._loaded(*one) for one in zip(keys, blocks, strict=True)]

    def _loaded(self, key: str, block: int) -> bool:
        assert self._linker.load("load", self._page(key, block))
        return bool(self._linker.finish_layer_wise_loading(self._linker.start_layer_wise_loading()))

    def close(self) -> None:
        self._linker.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_linker_is_fit(check: Callable[[Bench], None]) -> None:
    assert conformance.run(TriedLinker, check) == ""


@pytest.mark.parametrize("given", [{"endpont": "x"}, {"load_timeout": 0}, {"interface_v1": 1}])
def test_a_wrong_setting_stops_sglang_with_one_line(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="unified-cache-external-linker-config"):
        Worker(CacheConfig(page_size=16, components=FULL)).link(**given)
