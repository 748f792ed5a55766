"""Attached memory as paddle tensors: true types, the same bytes, both ways, also across processes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from transferd.adapters.paddle import tensors
from transferd.blocks.layout import build_layout
from transferd.config import CacheSection
from transferd.runtime.compat import wait_for
from transferd.runtime.threads import ThreadPools
from transferd.tiers.segment import attach_arrays
from transferd.tiers.shm import ShmDeviceTier

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
paddle: Any = None


@pytest.fixture(autouse=True)
def imported() -> None:
    """By the first test, not by each process that collects the tests: 1.2 s of CPU, and its memory."""
    global paddle
    paddle = pytest.importorskip("paddle", reason="the paddle extra is not installed")


@pytest.fixture
def threads() -> Iterator[ThreadPools]:
    threads = ThreadPools(1)
    yield threads
    threads.close()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("bfloat16", "bfloat16"), ("float16", "float16"), ("uint8", "uint8"), ("block_wise_fp8", "float8_e4m3fn")],
)
async def test_tensors_have_the_true_type_and_share_the_memory(threads: ThreadPools, dtype: str, expected: str) -> None:
    layout = build_layout(CacheSection(dtype=dtype, layers=2, device_blocks=4, block_size=4, head_dim=8))  # type: ignore[arg-type]
    tier = ShmDeviceTier(layout, 0, 0, threads)
    await tier.open()
    data = tier.handle().data
    caches = attach_arrays(data)
    planes = tensors(caches, float8=dtype == "block_wise_fp8")
    key = planes["key"][1]
    assert key.dtype == getattr(paddle, expected)
    assert key.shape == [4, 2, 4, 8]
    assert key.data_ptr() == caches["key"][1].ctypes.data
    caches["key"][1].view(np.uint8)[2] = 0x40
    assert bytes(caches["key"][1][2].tobytes()) == b"\x40" * caches["key"][1][2].nbytes
    if expected == "bfloat16":
        key[3] = 1.5
        assert set(caches["key"][1][3].ravel().tolist()) == {0x3FC0}, "1.5 in bfloat16"
    if dtype == "block_wise_fp8":
        assert planes["key_scale"][0].dtype == paddle.bfloat16
    await tier.close()


READER = """
import json, sys
from transferd.tiers.segment import attach_arrays
caches = attach_arrays(json.loads(sys.argv[1]))
print(set(caches["value"][0][1].ravel().tolist()))
"""


async def test_another_process_sees_what_a_tensor_wrote(threads: ThreadPools) -> None:
    layout = build_layout(CacheSection(layers=1, device_blocks=4, block_size=4, head_dim=8))
    tier = ShmDeviceTier(layout, 0, 0, threads)
    await tier.open()
    data = tier.handle().data
    caches = attach_arrays(data)
    tensors(caches)["value"][0][1] = 1.5
    reader = await asyncio.create_subprocess_exec(
        sys.executable, "-c", READER, json.dumps(data), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await wait_for(reader.communicate(), 60)
    assert out.decode().strip() == "{16320}"
    await tier.close()
