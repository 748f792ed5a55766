"""A rank's GPU by its UUID, whatever its index is in this process."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.support.cuda.gpu import FakeGpu
from transferd.errors import TierError
from transferd.tiers.cuda.driver import NO_DRIVER, Driver, find_device
from transferd.tiers.cuda.pinning import CudaPinning

UUID = "0" * 31 + "5"  # of the fake's sixth GPU
SPELLINGS = [UUID, "GPU-00000000-0000-0000-0000-000000000005", "MIG-00000000-0000-0000-0000-000000000005"]


@pytest.mark.parametrize("uuid", SPELLINGS)
def test_a_gpu_is_found_by_its_uuid(uuid: str) -> None:
    assert find_device(FakeGpu(devices=8), uuid).index == 5


def test_a_gpu_that_this_process_does_not_see_is_one_line() -> None:
    with pytest.raises(TierError, match=f"GPU {UUID} is not among the 4 .*CUDA_VISIBLE_DEVICES") as refused:
        find_device(FakeGpu(devices=4), UUID)
    assert refused.value.reason == NO_DRIVER


def test_host_memory_is_pinned_in_the_context_of_that_gpu_and_no_other() -> None:
    gpu = FakeGpu(devices=8)
    pinning = CudaPinning(UUID, gpu)
    memory = bytearray(8192)
    address = np.frombuffer(memory, dtype=np.uint8).ctypes.data // 4096 * 4096 + 4096
    assert pinning.pin(address, 4096) == ""
    assert gpu.leaks()[-1] == "context of device 5, 1 times"
    pinning.unpin(address, 4096)
    assert gpu.leaks() == []


def test_the_docs_name_each_call_that_another_vendors_driver_would_give() -> None:
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    entry = text[text.index("* **Another vendor's GPU**") :]
    listed = re.findall(r"`(\w+)`", entry[entry.index("\n  devices") : entry.index("Three traps")])
    calls = [name for name in vars(Driver) if not name.startswith("_")]
    assert sorted(listed) == sorted(calls)
    assert f"{len(calls)} calls" in entry
