"""Sizes worth having: what a pair of sizes is counted as, and where the knee of a curve is."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree as ET

import pytest

from transferd.cli.replay.chart import chart
from transferd.cli.replay.sizing import (
    BlockSizes,
    LevelSizes,
    Rates,
    SizePoint,
    default_storage_sizes,
    knee,
    knees,
    size_point,
)
from transferd.cli.replay.trace import TraceRequest
from transferd.config import from_tree
from transferd.errors import ConfigError
from transferd.tasks import TRACE_BLOCK_TOKENS


def point(storage: int, hits: float, host: int = 0) -> SizePoint:
    rates = {"device": 0.0, "host": 0.0, "storage": hits, "none": 1.0 - hits}
    return SizePoint(host, storage, 0, rates, 0, 0, 0, 0, 0.0, None)


def config(**cache: int) -> dict[str, dict[str, Any]]:
    small: dict[str, Any] = {
        "layers": 2,
        "kv_heads": 1,
        "head_dim": 16,
        "block_size": 64,
        "device_blocks": 64,
        "host_blocks": 16,
    }
    server = {"endpoint": "ipc:///nowhere"}
    return {"server": server, "cache": small | {"ranks": 2} | cache, "storage": {"backend": "memory"}}


def test_a_trace_block_has_the_bytes_of_its_tokens_on_all_ranks() -> None:
    footprint = BlockSizes.of(from_tree(config()))
    token = 2 * 2 * 1 * 16 * 2  # layers, key and value, heads, head_dim, two bytes
    assert footprint.host == token * TRACE_BLOCK_TOKENS * 2  # ranks
    assert footprint.levels[0].stored > footprint.host, "an object has a footer, too"
    assert footprint.device_blocks == 64 * 64 // TRACE_BLOCK_TOKENS
    assert footprint.host_pool == 16 * 64 * token * 2
    with pytest.raises(ConfigError, match=r"cache.device_blocks: the device holds 448 tokens"):
        BlockSizes.of(from_tree(config(device_blocks=7)))


def test_loads_cost_time_and_saved_computation_gains_it() -> None:
    footprint = BlockSizes(host=1000, levels=(LevelSizes("file", 1100),), device_blocks=2, host_pool=0)
    requests = [TraceRequest(hash_ids=ids) for ids in ((1, 2), (3, 4), (1, 2))]
    rates = Rates(host=1e3, storage=(1.1e3,), prefill=float(TRACE_BLOCK_TOKENS))
    stored = size_point(requests, footprint, rates, 0, (4 * 1100,))
    assert stored.hit_rate == {"device": 0.0, "host": 0.0, "storage": 2 / 6, "none": 4 / 6}
    assert (stored.storage_loaded, stored.storage_used, stored.load_s, stored.saved_s) == (2200, 4400, 2.0, 0.0)
    hosted = size_point(requests, footprint, rates, 2 * 1000, (1099,))
    assert hosted.hit_rate["host"] == 2 / 6
    assert (hosted.host_loaded, hosted.storage_used) == (2000, 0)
    assert default_storage_sizes(requests, footprint) == [(0,), (1100,), (2200,), (4400,)]


def test_the_knee_is_where_the_curve_bends_most() -> None:
    assert knee([point(0, 0.1), point(1, 0.5), point(2, 0.55), point(4, 0.6)]) == point(1, 0.5)
    assert knee([point(0, 0.1), point(1, 0.2), point(2, 0.3)]) is None, "a straight line"
    assert knee([point(0, 0.1), point(1, 0.1)]) is None
    assert knee([point(0, 0.4), point(1, 0.4), point(2, 0.4)]) is None
    both = [point(0, 0.0), point(1, 0.9), point(9, 1.0), *(point(s, 0.5, host=7) for s in (0, 1, 9))]
    assert knees(both) == [point(1, 0.9)]


def test_the_chart_escapes_its_title_and_marks_each_knee() -> None:
    points = [point(0, 0.0), point(1, 0.9), point(9, 1.0)]
    drawn = chart(points, "a <b> & c")
    root = ET.fromstring(drawn)
    assert root[0].text == "a <b> & c"
    assert [line.get("class") for line in root if line.get("class") == "knee"] == ["knee"]
    assert chart([point(5, 0.0)], "one size, no hit")


def test_second_use_writes_less_and_finds_what_came_twice() -> None:
    once = [TraceRequest(hash_ids=(10 * i, 10 * i + 1), timestamp=i * 1000.0) for i in range(1, 20)]
    again = TraceRequest(hash_ids=(1, 2), timestamp=0.0)
    requests = [again, *once[:3], again, *once[3:6], again, *once[6:]]
    everything = BlockSizes(host=1000, levels=(LevelSizes("file", 1100),), device_blocks=2, host_pool=0)
    choosy = BlockSizes(host=1000, levels=(LevelSizes("file", 1100),), device_blocks=2, host_pool=0, window_s=1e6)
    rates = Rates(host=1e3, storage=(1e3,))
    free = size_point(requests, everything, rates, 0, (100 * 1100,))
    spare = size_point(requests, choosy, rates, 0, (100 * 1100,))
    assert free.storage_written == (2 + 2 * 19) * 1100
    assert spare.storage_written == 2 * 1100, "only what two requests asked for"
    assert spare.storage_loaded == free.storage_loaded // 2 == 2 * 1100


def test_hits_of_a_share_alone_are_predicted() -> None:
    requests = [TraceRequest(hash_ids=(i, i + 100)) for i in (1, 2, 3, 4, 1, 2, 3, 4)]
    footprint = BlockSizes(host=1000, levels=(LevelSizes("file", 1100),), device_blocks=2, host_pool=0, share=0.25)
    found = size_point(requests, footprint, Rates(host=1e3, storage=(1e3,)), 0, (8 * 1100,))
    assert found.hits == 0.5
    assert found.storage_share_hits == 0.0, "a quarter holds one conversation of the four"
