"""Which memory another process can map: refused early, with what to change, where it cannot."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from tests.support.cuda.gpu import FakeGpu
from transferd.errors import TierError
from transferd.tiers.cuda import engine, ipc
from transferd.tiers.owner import as_data, this_process
from transferd.tiers.page_handles import cuda_pages

KNOWN = (
    "switch off torch's expandable_segments and cudaMallocAsync, vLLM's sleep mode, SGLang's memory saver, Paddle's "
    "FLAGS_use_virtual_memory_auto_growth and FLAGS_use_cuda_malloc_async_allocator, and NCCL's symmetric memory; "
    "or let the daemon make the cache (cache.ownership)"
)
EXPANDABLE, NATIVE = "unset it, or set expandable_segments:False", "set backend:native"
ALLOCATORS = {
    "torch, expandable segments": (
        "PYTORCH_CUDA_ALLOC_CONF",
        "max_split_size_mb:64,expandable_segments:True",
        EXPANDABLE,
    ),
    "torch 2.9, the same": ("PYTORCH_ALLOC_CONF", "expandable_segments: True", EXPANDABLE),
    "torch, cudaMallocAsync": ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", NATIVE),
    "torch 2.9, cudaMallocAsync": ("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync", NATIVE),
    "Paddle, cudaMallocAsync": ("FLAGS_use_cuda_malloc_async_allocator", "1", "set it to 0"),
    "Paddle, virtual memory": ("FLAGS_use_virtual_memory_auto_growth", "true", "set it to 0"),
    "SGLang, memory saver": (
        "LD_PRELOAD",
        "/x/torch_memory_saver_hook_mode_preload.abi3.so",
        "start SGLang without --enable-memory-saver",
    ),
}


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """None of the settings, whatever this process was started with."""
    for name in {name for name, _, _ in engine._SETTINGS}:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def refusal(*, pages: bool) -> str:
    """What an engine is told whose second tensor is in memory that cannot be shared. Nothing may be exported."""
    owner = FakeGpu()
    with owner.current(owner.retain(0)):
        good, pooled = owner.allocate(1024), owner.allocate(1024)
    owner.unshareable.add(pooled)
    caches = {"key": [engine.DeviceArray(address, (4, 256), "uint8", 0, None) for address in (good, pooled)]}

    def offer() -> None:
        if pages:
            cuda_pages([good, pooled], [(0, 256, 0), (0, 256, 1)], device=0, driver=owner)
        else:
            engine.export(caches, device=0, driver=owner)

    with pytest.raises(TierError) as refused:
        offer()
    assert refused.value.reason == "not_shareable"
    assert owner.count("export_memory") == 0
    said = str(refused.value)
    place = "memory 1" if pages else "key of layer 1"
    before, _, remedy = said.partition("(not from cudaMalloc): ")
    assert before == f"{place} is in memory that no other process can map "
    return remedy


@pytest.mark.parametrize("pages", [False, True], ids=["arrays", "pages"])
@pytest.mark.parametrize("name", ALLOCATORS)
def test_memory_that_cannot_be_shared_is_refused_before_any_is_exported_with_the_setting_named(
    bare: pytest.MonkeyPatch, name: str, pages: bool
) -> None:
    variable, value, remedy = ALLOCATORS[name]
    bare.setenv(variable, value)
    assert refusal(pages=pages) == f"{variable}={value} causes this: {remedy}"


@pytest.mark.parametrize("awake", [True, False])
def test_vllms_sleep_mode_is_named_where_it_is_on(bare: pytest.MonkeyPatch, awake: bool) -> None:
    module = SimpleNamespace(CuMemAllocator=SimpleNamespace(instance=None if awake else object()))
    bare.setitem(sys.modules, "vllm.device_allocator.cumem", module)
    remedy = "vLLM's sleep mode causes this: start vLLM without --enable-sleep-mode"
    assert refusal(pages=True) == (KNOWN if awake else remedy)


@pytest.mark.parametrize("value", ["expandable_segments:False", "max_split_size_mb:128", ""])
def test_a_setting_that_is_not_to_blame_is_not_named(bare: pytest.MonkeyPatch, value: str) -> None:
    bare.setenv("PYTORCH_CUDA_ALLOC_CONF", value)
    assert refusal(pages=False) == KNOWN


def test_two_tensors_of_one_allocation_are_one_region() -> None:
    owner = FakeGpu()
    with owner.current(owner.retain(0)):
        start = owner.allocate(4096)
    arrays = [engine.DeviceArray(start + offset, (4, 256), "uint8", 0, None) for offset in (0, 2048)]
    data = engine.export({"key": [arrays[0]], "value": [arrays[1]]}, device=0, driver=owner)
    assert len(data["regions"]) == 1
    assert [array["offset"] for array in data["arrays"]] == [0, 2048]


@pytest.mark.parametrize(
    ("owner", "said"),
    [
        ({"namespace": -1, "pid": os.getpid()}, "each in its PID namespace: CUDA takes them for one"),
        ({"namespace": -1, "pid": 1}, "share it (--pid=host"),
        ({"pid": 1}, "CUDA requires the same user"),
        ({}, ""),
    ],
)
def test_the_obstacle_to_mapping_memory_is_reported(
    monkeypatch: pytest.MonkeyPatch, owner: dict[str, int], said: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(f"/proc/{owner.get('pid', 'self')}").st_uid + ("pid" in owner))
    hint = ipc._hint(as_data(this_process()) | owner)
    assert said in hint
    assert bool(hint) == bool(said)
