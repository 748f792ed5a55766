"""A fleet on paper: where each request goes, what it waits, loads and computes, and what a node takes with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fleet import PICTURE, RESULTS, picture
from tests.integration.test_replay_predicted import transferd
from transferd.cli.asking import Format
from transferd.cli.replay.fleet import Fleet, FleetCosts, FleetPoint, FleetPool, FleetRun, fleet_point, times
from transferd.cli.replay.predicted import virtually
from transferd.cli.replay.simulate import Wanted, run
from transferd.cli.replay.sizing import BlockSizes, LevelSizes, Rates, size_point
from transferd.cli.replay.trace import TraceRequest, generated_workload
from transferd.config.size import Reserve
from transferd.errors import RequestError
from transferd.tasks import TRACE_BLOCK_TOKENS

STORED = 1000
MEMORY = LevelSizes("memory", STORED, 100 * STORED, known=True)
POOL = LevelSizes("mooncake", STORED, promote=0, lent=200 * STORED)
DISK = LevelSizes("file", STORED, 100 * STORED, reserve=Reserve.parse("0%"), promote=0, known=True)
SIZES = BlockSizes(host=STORED, levels=(MEMORY, POOL), device_blocks=24, host_pool=0)
RATES = Rates(host=1e6, storage=(1e6, 1e5), prefill=float(TRACE_BLOCK_TOKENS))  # 1 s, 1 ms, 10 ms a block
CHAIN = tuple(range(8))


def predicted(requests: list[TraceRequest], fleet: Fleet, sizes: BlockSizes = SIZES) -> FleetPoint:
    return fleet_point(requests, sizes, replace(RATES, storage=RATES.storage[: len(sizes.levels)]), FleetCosts(), fleet)


def asked(*at: float, chain: tuple[int, ...] = CHAIN) -> list[TraceRequest]:
    return [TraceRequest(hash_ids=chain, timestamp=1000 * one) for one in at]


def test_one_node_has_the_hits_that_its_sizes_were_predicted_to_have() -> None:
    requests = generated_workload(5, 40)
    sizes = replace(SIZES, levels=(replace(MEMORY, capacity=30 * STORED), DISK), host_pool=6 * STORED)
    fleet = predicted(requests, Fleet(1, "prefix"), sizes)
    alone = size_point(requests, sizes, RATES, 6 * STORED, (30 * STORED, 100 * STORED))
    assert fleet.hit_rate["computed"] == pytest.approx(alone.hit_rate["none"])
    assert [fleet.hit_rate[level.name] for level in alone.levels] == [level.hit_rate for level in alone.levels]
    assert fleet.disk_bytes == alone.levels[1].written > 0
    assert fleet.hit_rate["file"] > 0


def test_a_first_token_waits_for_the_node_its_loads_and_its_prefill() -> None:
    point = predicted(asked(0, 2, 100), Fleet(2, "load"))
    # 8 s to compute; the other node, which is free, loads 8 blocks from the first one's memory; then from the device
    assert [point.ttft_s[name] for name in ("p50", "p90", "p99")] == [pytest.approx(0.08), 8.0, 8.0]
    assert point.network_bytes == len(CHAIN) * STORED
    assert point.hit_rate["mooncake"] == pytest.approx(1 / 3)
    queued = predicted(asked(0, 2), Fleet(1, "load"))
    assert queued.ttft_s["p50"] == 8.0, "the second one begins when the first one has been computed"
    assert queued.busy["max"] > 1


def test_a_router_by_prefix_finds_the_node_that_has_it_unless_it_has_too_much_to_do() -> None:
    sizes = replace(SIZES, levels=(MEMORY,))
    apart = asked(0, 50, 100, 150)
    assert predicted(apart, Fleet(4, "prefix"), sizes).hits == 0.75
    assert predicted(apart, Fleet(4, "random"), sizes).hits < 0.75
    others = [one for i in range(12) for one in asked(50 + 10 * i, chain=tuple(range(100 * i + 100, 100 * i + 108)))]
    on_no_device = predicted([*asked(0), *others, *asked(900)], Fleet(2, "prefix"), replace(sizes, device_blocks=8))
    assert on_no_device.hit_rate["memory"] == 1 / 14
    crowd = [one for i in range(31) for one in asked(i / 100, chain=(0, 1, *range(6 * i + 2, 6 * i + 8)))]
    busy = predicted(crowd, Fleet(4, "prefix"), sizes)
    assert busy.hits == pytest.approx(2 * (31 - 4) / (31 * 8)), "each node has computed the common blocks once"


@pytest.mark.parametrize(
    ("event", "lost", "hits"), [("", 0, 0.5), ("dead", 8, 0.25), ("upgrade", 16, 0.0), ("drain", 0, 0.5)]
)
def test_what_a_node_takes_with_it(event: str, lost: int, hits: float) -> None:
    """Each node writes a chain, and both are asked for again after the event. Memory is lost, and what was lent."""
    other = tuple(range(10, 18))
    point = predicted(
        [*asked(0), *asked(1, chain=other), *asked(900), *asked(901, chain=other)], Fleet(2, "load", event)
    )
    assert (point.lost_bytes, point.hits) == (lost * STORED, hits)


def test_a_disk_has_its_objects_after_a_restart() -> None:
    disks = predicted(asked(0, 900), Fleet(1, "prefix", "upgrade"), replace(SIZES, levels=(MEMORY, DISK)))
    assert disks.hits == 0.5


def test_every_object_of_a_pool_lies_in_the_memory_of_a_node() -> None:
    sizes = replace(SIZES, levels=(replace(MEMORY, capacity=10 * STORED), replace(POOL, lent=20 * STORED)))
    for event in ("upgrade", "drain"):
        prediction = FleetRun(generated_workload(3, 40), sizes, RATES, Fleet(3, "random", event))
        virtually(prediction.play())
        pool = prediction.pool
        assert isinstance(pool, FleetPool)
        held = pool.statistics()["objects"]
        assert len(pool._holders) == held > 40, "it is nearly full"
        assert sum(pool._room.values()) == 3 * 20 - held
        assert set(pool._holders.values()) <= {0, 1, 2}


def test_a_bucket_is_on_no_node() -> None:
    bucket = replace(SIZES, levels=(MEMORY, LevelSizes("object", STORED, promote=1, lent=0)))
    point = predicted(asked(0, 900), Fleet(2, "prefix", "dead"), bucket)
    assert (point.hits, point.lost_bytes) == (0.5, 0)
    assert point.network_bytes > 0
    assert "master's calls" not in point.walls


def test_more_users_have_habits_of_their_own_and_the_same_system_prompts() -> None:
    requests = [TraceRequest(hash_ids=(0, number), timestamp=number) for number in range(1, 301)]
    three = times(requests, 3)
    assert len(three) == 900
    assert {ids.hash_ids[0] for ids in three} == {0}
    assert len({ids.hash_ids[1] for ids in three}) == 900
    assert [one.timestamp for one in three] == sorted(one.timestamp for one in three)
    assert times(requests, 1) == requests


def test_walls_are_what_the_costs_say() -> None:
    requests = [TraceRequest(hash_ids=tuple(range(8 * n, 8 * n + 8)), timestamp=1000.0 * n) for n in range(11)]
    costs = FleetCosts(index_bytes=100, lookup_s=0.01, event_s=0.05, master_bytes=10, master_s=0.001)
    sizes = replace(SIZES, keys=4.0, ranks=2)
    walls = fleet_point(requests, sizes, RATES, costs, Fleet(1, "load")).walls
    assert walls["index memory"] == {"amount": 88 * 8 * 100, "share": 88 * 8 * 100 / (300 * STORED)}
    assert walls["look-ups"] == {"amount": 80 / 10 * 8, "share": pytest.approx(0.64)}
    assert walls["events"] == {"amount": pytest.approx(88 * 4 / 10), "share": pytest.approx(88 * 4 / 10 * 0.05)}
    assert walls["master's memory"]["amount"] == 88 * 8 * 10
    assert walls["master's calls"]["amount"] >= 88 * 8 * 2 / 10, "each was asked for and stored"


TINY = """
[cache]
layers = 4
kv_heads = 2
head_dim = 64
block_size = 64
device_blocks = 512
"""


def test_the_command_predicts_fleets(tmp_path: Path) -> None:
    trace, config = tmp_path / "trace.jsonl", tmp_path / "tiny.toml"
    lines = [{"hash_ids": one.hash_ids, "timestamp": one.timestamp * 100} for one in generated_workload(3, 40)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    config.write_text(TINY)
    wanted = ["replay", trace, "--simulate", "--config", config, "--nodes", "1,3", "--router", "load"]
    sizes = ["--levels", "memory=16MiB", "--pool", "64MiB", "--events", "dead"]
    rates = ["--prefill-rate", 10000, "--load-rates", "20GB,20GB,10GB"]
    done = transferd(*wanted, *sizes, *rates, "--format", "json")
    assert done.returncode == 0, done.stderr
    tree = json.loads(done.stdout)
    assert [(one["fleet"]["nodes"], one["fleet"]["event"]) for one in tree["points"]] == [(1, ""), (3, ""), (3, "dead")]
    assert tree["points"][1]["hit_rate"]["mooncake"] > 0


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"prefill_rate": None}, "--nodes needs --prefill-rate"),
        ({"load_rates": None}, "--nodes needs --load-rates host,memory,mooncake of your nodes"),
        ({"levels": "tape=1TB"}, "--levels tape=1TB: expected levels of a node, such as memory=256GB,file=4TB"),
        ({"levels": "memory"}, "--levels memory: expected levels of a node, such as memory=256GB,file=4TB"),
        ({"costs": "tea=1"}, "no such cost: tea; there are event_s, index_bytes"),
        ({"nodes": "0,4"}, "--nodes 0,4: expected numbers of nodes, such as 1,4,16"),
        ({"router": "fate"}, "--router fate: there is no fate, only prefix, load, random"),
    ],
)
def test_a_bad_option_of_a_fleet_is_one_line(wanted: dict[str, Any], said: str) -> None:
    good: dict[str, Any] = {
        "prefill_rate": 1e4,
        "load_rates": "20GB,20GB,10GB",
        "nodes": "4",
        "levels": "memory=1GB",
        "pool": "1GB",
    }
    with pytest.raises(RequestError) as raised:
        run(asked(0), Wanted(**(good | wanted)), config=None, ranks=None, chart_file=None, format_=Format.JSON)
    assert said in str(raised.value)


def test_the_picture_in_the_docs_is_that_of_the_results() -> None:
    assert PICTURE.read_text(encoding="utf-8") == picture(json.loads(RESULTS.read_text(encoding="utf-8")))
