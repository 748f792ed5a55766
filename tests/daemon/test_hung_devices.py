"""A device that is lost while idle ends its rank; one that does not answer makes the daemon say so, and no more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from tests.support.cuda.shim import compiler
from tests.support.cuda.tier import FakeCudaTier
from transferd.config import from_tree
from transferd.daemon.daemon import Daemon
from transferd.tiers.cuda.tuning import mps_runs
from transferd.workers import rank

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C compiler to run kernels on the CPU with")


@pytest.fixture
async def daemon(tmp_path: object) -> AsyncIterator[Daemon]:
    made = Daemon(
        from_tree(
            {
                "server": {"endpoint": f"ipc://{tmp_path}/s"},
                "cache": {
                    "device": "tests.support.cuda.tier:FakeCudaTier",
                    "ranks": 2,
                    "layers": 1,
                    "kv_heads": 1,
                    "head_dim": 8,
                    "block_size": 4,
                    "device_blocks": 4,
                    "host_blocks": 4,
                },
                "host": {"staging": "64KiB"},
                "storage": {"backend": "none"},
                "metrics": {"listen": ""},
            }
        )
    )
    await made.open()
    yield made
    await made.stop(lambda: 5.0)


def device(daemon: Daemon, number: int) -> FakeCudaTier:
    found = daemon.default.workers[number].context.device
    assert isinstance(found, FakeCudaTier)
    return found


async def test_a_device_that_is_lost_while_idle_ends_its_rank_and_readiness(daemon: Daemon) -> None:
    assert daemon.not_ready == ""
    tell = device(daemon, 1).on_lost
    assert tell is not None
    tell("fallen off the bus")
    await asyncio.sleep(0)
    assert "a rank has died" in daemon.not_ready
    assert daemon.default.barrier.dead
    tell("and again")


async def test_an_operator_sees_what_the_device_is_and_how_copies_go(daemon: Daemon) -> None:
    tiers = [row["tier"] for row in msgspec.msgpack.decode(msgspec.msgpack.encode(daemon.stats()))["ranks"]]
    assert [tier["name"] for tier in tiers] == ["Fake GPU"] * 2
    assert [(tier["unregistered"], tier["batches"], tier["mps"]) for tier in tiers] == [(0, True, mps_runs())] * 2
    assert tiers[0]["copies"] == {way: {"gather": 0, "rows": 0, "pairs": 0, "straight": 0} for way in ("out", "in")}
    assert tiers[0]["waits_for"] == {}


async def test_a_device_that_does_not_answer_is_named_and_forgiven_when_it_does(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = device(daemon, 1).resources.inward
    monkeypatch.setattr(pipeline, "_waiting_since", -1.0)
    assert daemon.not_ready.startswith("the device of rank 1 has not answered for ")
    monkeypatch.setattr(pipeline, "_waiting_since", None)
    assert daemon.not_ready == ""
    assert rank.HUNG_S < 30, "before any watchdog"
