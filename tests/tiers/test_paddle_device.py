"""Tensors of a device, shared by FastDeploy's operators: published once, adopted once, let go of once, both ways."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.paddle_ops import PaddleOps
from transferd.adapters.paddle import adopted, flat, named, rows, tensors
from transferd.blocks.copyplan import plan_copy
from transferd.blocks.layout import build_layout
from transferd.client.offers import laid
from transferd.config import CacheSection
from transferd.errors import EngineGone, RequestError, TierError
from transferd.runtime.threads import ThreadPools
from transferd.tiers.base import DeviceHandle
from transferd.tiers.extents import overlap
from transferd.tiers.paddle import (
    KIND,
    FastDeployOperators,
    PaddleDeviceTier,
)
from transferd.tiers.pinned import HostPool
from transferd.tiers.shm import ShmDeviceTier
from transferd.tiers.staging import Staging
from transferd.wire.canary import taken_from
from transferd.workers.canary import check_canary

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
paddle: Any = None
SIZES: dict[str, Any] = {"layers": 2, "device_blocks": 6, "host_blocks": 6, "block_size": 4, "kv_heads": 2}
LAYOUT = build_layout(CacheSection(**SIZES, head_dim=8, mtp_layers=1, mtp_blocks=7, dtype="block_wise_fp8"))
MANY = len(LAYOUT.segments)


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


@pytest.fixture
def ops(tmp_path: Path) -> PaddleOps:
    return PaddleOps(paddle, tmp_path)


@pytest.fixture
def operators(ops: PaddleOps, tmp_path: Path) -> FastDeployOperators:
    return FastDeployOperators("gpu:0", paddle, module=ops, directory=tmp_path)


def tier(threads: ThreadPools, operators: FastDeployOperators | None, rank: int = 1) -> PaddleDeviceTier:
    return PaddleDeviceTier(LAYOUT, rank, 3, threads, operators=operators)


async def check_moves(moved: PaddleDeviceTier, planes: dict[str, list[Any]]) -> None:
    """Blocks go between host memory and what `planes` shows."""
    pool = HostPool(LAYOUT)
    memory = np.frombuffer(pool.memory.view, dtype=np.uint8)
    memory[:] = np.random.default_rng(3).integers(0, 256, memory.shape, dtype=np.uint8)
    before = memory.copy()
    await moved.copy_in(plan_copy(LAYOUT.host, [0, 1], moved.arena.geometry, [4, 2]), pool.memory)
    for part, offset in zip(LAYOUT.segments, LAYOUT.host.offsets, strict=True):
        rows = np.from_dlpack(planes[part.plane.name][part.layer].view("uint8"))
        for source, target in ((0, 4), (1, 2)):
            start = int(offset + source * LAYOUT.host.strides[0])
            assert rows[target].tobytes() == before[start : start + part.nbytes].tobytes()
        assert not rows[3].any()
        del rows
    memory[:] = 0
    await moved.copy_out(plan_copy(moved.arena.geometry, [4], LAYOUT.host, [5]), pool.memory)
    start = 5 * int(LAYOUT.host.strides[0])
    assert memory[start : start + LAYOUT.block_bytes].tobytes() == before[: LAYOUT.block_bytes].tobytes()
    del memory
    pool.close()


async def test_an_engine_adopts_the_daemons_memory_by_name(
    threads: ThreadPools, ops: PaddleOps, operators: FastDeployOperators
) -> None:
    daemon = tier(threads, operators)
    await daemon.open()
    assert not daemon.outlives_close, "clients must let go first"
    assert len(ops.published) == MANY
    assert "value_cache_scales_2_rank1.device3" in ops.published
    handle = daemon.handle()
    planes = adopted({"kind": handle.kind, "data": handle.data}, operators, float8=True)
    assert planes["key"][0].dtype == paddle.float8_e4m3fn
    assert planes["key_scale"][0].dtype == paddle.bfloat16
    assert planes["key"][0].shape == [6, 2, 4, 8]
    assert planes["value_scale"][2].shape == [7, 2, 4], "an MTP layer has its own count"
    await check_moves(daemon, planes)
    await daemon.close()
    assert not ops.published


async def test_the_daemon_adopts_an_engines_memory_and_releases_it(
    threads: ThreadPools, ops: PaddleOps, operators: FastDeployOperators
) -> None:
    engine, daemon = tier(threads, operators), tier(threads, operators)
    await engine.open()
    planes = adopted({"kind": KIND, "data": engine.handle().data}, operators)
    await daemon.attach(engine.handle())
    assert set(ops.mapped.values()) == {2}
    with pytest.raises(TierError, match="already open"):
        await daemon.attach(engine.handle())
    await check_moves(daemon, planes)
    await daemon.close()
    await daemon.close()
    assert set(ops.mapped.values()) == {1}, "unmapped once"
    assert len(ops.published) == MANY, "what the engine published is the engine's"
    await daemon.attach(engine.handle())
    await daemon.close()
    await engine.close()


async def test_ranks_that_were_offered_the_same_tensors_are_seen_to_overlap(
    threads: ThreadPools, operators: FastDeployOperators
) -> None:
    engines = [tier(threads, operators, rank) for rank in (1, 2)]
    daemons = [tier(threads, operators, rank) for rank in (1, 2, 3)]
    for engine in engines:
        await engine.open()
    for daemon, engine in zip(daemons, (engines[0], engines[0], engines[1]), strict=True):
        await daemon.attach(engine.handle())
    first, second, third = (daemon.extents() for daemon in daemons)
    assert overlap(first, second)
    assert not overlap(first, third)
    for one in (*daemons, *engines):
        await one.close()


async def test_a_canary_tells_the_engines_tensors_from_others(
    threads: ThreadPools, operators: FastDeployOperators
) -> None:
    engine, other, daemon = tier(threads, operators, 1), tier(threads, operators, 2), tier(threads, operators, 1)
    await engine.open()
    await other.open()
    planes = adopted({"kind": KIND, "data": engine.handle().data}, operators, float8=True)
    before = [row.read_block(block) for layers in rows(planes).values() for row in layers for block in range(6)]
    staging = Staging(LAYOUT, 1024**2, LAYOUT.block_bytes)
    context: Any = SimpleNamespace(layout=LAYOUT, device=daemon, staging=staging, threads=threads, rank=0)
    for offered, found in ((engine, True), (other, False)):
        await daemon.attach(offered.handle())
        with laid(rows(planes)) as said:
            _, canary = taken_from({"canary": said})
            assert canary is not None
            if found:
                await check_canary(context, canary)
            else:
                with pytest.raises(RequestError, match="block 1 of key of layer 0"):
                    await check_canary(context, canary)
        await daemon.close()
    after = [row.read_block(block) for layers in rows(planes).values() for row in layers for block in range(6)]
    assert before == after
    context.staging.close()
    await engine.close()
    await other.close()


async def test_names_that_no_system_call_takes_are_a_bad_request(
    threads: ThreadPools, operators: FastDeployOperators
) -> None:
    engine, daemon = tier(threads, operators), tier(threads, operators)
    await engine.open()
    data = engine.handle().data
    for wrong in ("a\0b", "..", "a/b", "", 7):
        with pytest.raises(RequestError) as caught:
            await daemon.attach(DeviceHandle(KIND, data | {"names": [wrong, *data["names"][1:]]}))
        assert caught.value.reason == "bad_value"
    await engine.close()


@pytest.mark.parametrize("creates", [True, False])
async def test_a_failure_half_way_leaves_nothing_published_or_mapped(
    threads: ThreadPools, ops: PaddleOps, operators: FastDeployOperators, creates: bool
) -> None:
    engine, other = tier(threads, operators), tier(threads, operators, rank=2)
    await engine.open()
    published = set(ops.published)
    name = "value_caches_1_rank2.device3" if creates else "value_caches_1_rank1.device3"
    ops.fail_at = name
    with pytest.raises(TierError, match=f"{name}: out of handles"):
        await (other.open() if creates else other.attach(engine.handle()))
    assert set(ops.published) == published
    assert set(ops.mapped.values()) <= {0}
    await (other.open() if creates else other.attach(engine.handle()))
    await other.close()
    await engine.close()


def changed(data: dict[str, Any], **change: Any) -> dict[str, Any]:
    return data | change


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"names": None}, RequestError, "no list of names"),
        ({"names": ["../x"] * MANY}, RequestError, "not a valid name"),
        ({"names": ["x"]}, RequestError, "one name for each array"),
        ({"names": ["x"] * MANY}, EngineGone, "x is not published"),
        ({"arrays": [{}] * MANY}, RequestError, "malformed"),
    ],
)
async def test_handles_that_cannot_be_adopted_are_refused(
    threads: ThreadPools, operators: FastDeployOperators, change: dict[str, Any], error: type[Exception], said: str
) -> None:
    engine, daemon = tier(threads, operators), tier(threads, operators)
    await engine.open()
    with pytest.raises(error, match=said):
        await daemon.attach(DeviceHandle(KIND, changed(engine.handle().data, **change)))
    with pytest.raises(TierError, match="not open"):
        _ = daemon.arena
    await engine.close()


async def test_memory_shorter_than_its_shape_is_refused(
    threads: ThreadPools, ops: PaddleOps, operators: FastDeployOperators
) -> None:
    engine, daemon = tier(threads, operators), tier(threads, operators)
    await engine.open()
    small = paddle.zeros([5, 64], dtype="uint8")
    ops.set_data_ipc(small, "key_caches_0_rank1.device3")
    with pytest.raises(TierError, match="shorter than its shape"):
        await daemon.attach(engine.handle())
    await engine.close()


async def test_without_operators_memory_of_a_device_is_not_shared_and_says_so(threads: ThreadPools) -> None:
    alone = tier(threads, None)
    with pytest.raises(TierError, match="FastDeploy's operators"):
        await alone.attach(DeviceHandle(KIND, {}))
    await alone.open()
    with pytest.raises(TierError, match="cannot be shared with another process without operators"):
        alone.handle()
    await alone.close()
    with pytest.raises(TierError, match="not installed"):
        FastDeployOperators("xpu:0", paddle)


async def test_an_xpus_operators_get_the_ipc_flag_and_names_are_removed_without_an_operator(
    threads: ThreadPools, tmp_path: Path
) -> None:
    class XpuOps:
        """XPU's share_external_data has one argument more, and there is no unset_data_ipc."""

        def __init__(self) -> None:
            self.real = PaddleOps(paddle, tmp_path)
            self.set_data_ipc = self.real.set_data_ipc

        def share_external_data(self, empty: Any, name: str, shape: list[int], use_ipc: bool) -> Any:
            assert use_ipc
            return self.real.share_external_data(empty, name, shape)

    xpu = FastDeployOperators("xpu:0", paddle, module=XpuOps(), directory=tmp_path)
    engine, daemon = tier(threads, xpu), tier(threads, xpu)
    await engine.open()
    await daemon.attach(engine.handle())
    await daemon.close()
    assert len(list(tmp_path.iterdir())) == MANY
    await engine.close()
    assert not list(tmp_path.iterdir())


async def test_tensors_in_fastdeploys_order_and_under_its_names(threads: ThreadPools) -> None:
    shared = ShmDeviceTier(LAYOUT, 0, 0, threads)
    await shared.open()
    from transferd.tiers.segment import attach_arrays

    planes = tensors(attach_arrays(shared.handle().data))
    in_order = flat(planes)
    assert len(in_order) == 4 * 3
    for layer in range(3):
        for place, plane in enumerate(("key", "value", "key_scale", "value_scale")):
            assert in_order[4 * layer + place].data_ptr() == planes[plane][layer].data_ptr()
    by_name = named(planes, 5, 2)
    assert by_name["value_caches_1_rank5.device2"].data_ptr() == planes["value"][1].data_ptr()
    assert len(by_name) == 12
    del in_order, by_name, planes
    await shared.close()
