"""Which memory another process can map: refused early, with what to change, where it cannot."""

from __future__ import annotations

import os

import pytest

from tests.support.cuda.gpu import FakeGpu
from transferd.errors import TierError
from transferd.tiers.cuda import engine, ipc
from transferd.tiers.owner import as_data, this_process


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True", "set expandable_segments:False"),
        ("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync", "set backend:native"),
        ("FLAGS_use_virtual_memory_auto_growth", "1", "set it to 0"),
        ("UNRELATED", "1", "switch off torch's expandable_segments"),
    ],
)
def test_memory_that_cannot_be_shared_is_refused_before_any_is_exported_with_the_setting_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    for name in {name for name, _, _ in engine._ALLOCATORS}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    owner = FakeGpu()
    with owner.current(owner.retain(0)):
        good, pooled = owner.allocate(1024), owner.allocate(1024)
    owner.unshareable.add(pooled)
    caches = {"key": [engine.DeviceArray(address, (4, 256), "uint8", 0, None) for address in (good, pooled)]}
    with pytest.raises(TierError, match="key of layer 1 is in memory that no other process can map") as refused:
        engine.export(caches, device=0, driver=owner)
    assert refused.value.reason == "not_shareable"
    assert said in str(refused.value)
    assert owner.count("export_memory") == 0


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
def test_what_keeps_memory_from_being_mapped_is_said_where_it_is_seen(
    monkeypatch: pytest.MonkeyPatch, owner: dict[str, int], said: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(f"/proc/{owner.get('pid', 'self')}").st_uid + ("pid" in owner))
    hint = ipc._hint(as_data(this_process()) | owner)
    assert said in hint
    assert bool(hint) == bool(said)
