"""The machinery behind the figures: rows, tables, and that what is measured really happened."""

from __future__ import annotations

import asyncio
import json
import math
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import fastdeploy_pattern, first_token, table
from benchmarks.growth import axis, dispatch
from benchmarks.growth.picture import picture
from transferd.cli.bench import control, copy
from transferd.cli.bench.control import Echo
from transferd.cli.bench.harness import RUNS, machine, report, row
from transferd.cli.replay.kvdata import KvData
from transferd.errors import InvariantError
from transferd.tasks import Status, TaskResult


def test_a_row_is_a_median_with_its_spread_beside_a_limit() -> None:
    tree = row("x", [3.0, 1.0, 2.0, 2.0, 9.0], "us", 4.0, "us echo").tree()
    assert tree == {
        "name": "x", "value": 2.0, "unit": "us", "limit": 4.0, "limit_name": "us echo", "ratio": 0.5, "spread": 4.0
    }  # fmt: skip


def test_a_report_names_the_machine() -> None:
    tree = report("b", machine(), [row("x", [1.0], "us", 1.0, "itself")])
    assert set(tree) == {"bench", "machine", "rows"}
    assert {"cpu", "cores", "kernel", "python"} <= set(tree["machine"])
    assert json.loads(json.dumps(tree)) == tree


def test_growth_measures_all_sizes_in_turn_and_against_the_smallest() -> None:
    order: list[int] = []

    def measure(size: int) -> float:
        order.append(size)
        return float(size) if len(order) > 2 else 1000.0  # cold

    things = axis.Axis("things", "{} things", "us", (1, 10))
    rows = axis.grow(things, measure)
    assert order == [1, 10] * (RUNS + 1)
    assert [(r.name, r.value, r.ratio) for r in rows] == [("1 things", 1.0, 1.0), ("10 things", 10.0, 10.0)]
    assert [r.spread for r in rows] == [0.0, 0.0], "the cold run does not count"


def test_growth_runs_every_task_it_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "LEAST_TASKS", 300)
    assert dispatch.per_task_us(100) > 0


def test_the_picture_of_growth_has_a_panel_for_each_axis_and_tells_every_figure() -> None:
    one = axis.Axis("things < 100", "{} things", "us", (1, 10, 1000))
    two = axis.Axis("blocks", "{} blocks", "us/block", (4,))
    rows = [row("", [2.0], "us", 2.0, ""), row("", [4.0, 8.0, 6.0], "us", 2.0, ""), row("", [0.5], "us", 2.0, "")]
    drawn = ET.fromstring(picture([one.tree(rows), two.tree(rows[:1])]))
    panels = drawn.findall("{*}g")
    told = [[title.text for title in panel.iter("{http://www.w3.org/2000/svg}title")] for panel in panels]
    assert told == [
        ["1: 1.00 (spread 0%)", "10: 3.00 (spread 67%)", "1,000: 0.25 (spread 0%)"],
        ["4: 1.00 (spread 0%)"],
    ]
    heights = [float(dot.attrib["cy"]) for dot in panels[0].iter("{http://www.w3.org/2000/svg}circle")]
    assert heights[1] < heights[0] < heights[2], "dearer is higher"
    assert "us by things < 100" in [text.text for text in panels[0].iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_pattern_that_transferd_replaces_does_answer(ranks: int) -> None:
    with fastdeploy_pattern._pattern(ranks) as (queue, processes):
        for number in range(5):
            assert fastdeploy_pattern._round_trip_us(queue, f"task {number}") > 0
        assert len(processes) == ranks + 1
        assert all(process.is_alive() for process in processes)
    assert [process.exitcode for process in processes[1:]] == [0] * ranks


def test_the_control_benchmark_gives_every_row_a_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TASKS", 10), ("PIPELINED", 100), ("IN_FLIGHT", 16), ("IDLE_S", 0.2), ("CANCELLED", 100)):
        monkeypatch.setattr(control, name, value)
    echoes = 0
    round_trip_us = Echo.round_trip_us

    def counted(self: Echo, messages: int) -> float:
        nonlocal echoes
        echoes += 1
        return round_trip_us(self, messages)

    monkeypatch.setattr(Echo, "round_trip_us", counted)
    rows = list(control.run())
    assert echoes == 1 + 2 * 4 * RUNS, "a warm-up, then one beside each run of each latency row"
    for ranks in (1, 8):
        names = [r.name for r in rows if r.name.endswith(f"TP{ranks}")]
        assert len(names) == 11
        assert any("swap of one block" in name for name in names)
    assert all(r.value > 0 and r.limit > 0 and math.isfinite(r.ratio) for r in rows if "idle" not in r.name)
    assert sum(r.limit_name == "us raw echo" for r in rows) == 8


def test_a_benchmark_does_not_measure_tasks_that_fail() -> None:
    async def submit(_task: Any) -> TaskResult:
        return TaskResult(task_id="t", status=Status.FAILED)

    with pytest.raises(RuntimeError, match="ended badly"):
        asyncio.run(control.p50_us(submit, control.TaskMaker().swap, 1))


def test_wrong_bytes_end_the_copy_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = KvData.fill

    def wrong(self: KvData, block: int, content: int) -> None:
        fill(self, block, content + (content == 63))

    small = {"layers": 1, "kv_heads": 1, "head_dim": 16, "block_size": 16}
    monkeypatch.setattr(copy, "LAYOUTS", {"small": small})
    monkeypatch.setattr(copy, "END_TO_END", ("small",))
    assert len(list(copy.run())) == 4
    monkeypatch.setattr(KvData, "fill", wrong)
    with pytest.raises(InvariantError, match="wrong bytes"):
        list(copy.run())


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.setattr(table, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)

    def write(text: str, **results: Any) -> str:
        docs = tmp_path / "docs" / "performance.md"
        docs.write_text(text)
        for name, rows in results.items():
            where = {"cpu": "C", "cores": 2, "kernel": "6", "python": "3.11", "load_1min_before": 0.5}
            tree = {"bench": name, "machine": where, "rows": rows}
            (tmp_path / "benchmarks" / "results" / f"{name}.json").write_text(json.dumps(tree))
        table.main()
        return docs.read_text()

    return write


def test_tables_are_written_between_their_markers_and_again_the_same(page: Callable[..., str]) -> None:
    rows = [row("swap", [1234.5], "us", 500.0, "us echo").tree()]
    text = page("before\n<!-- control -->\nold\n<!-- end -->\nafter\n", control=rows)
    assert "| swap | 1,234.50 us | 500.00 us echo | 2.47 | 0% |" in text
    assert text.startswith("before\n<!-- control -->\nC, 2 cores")
    assert text.endswith("<!-- end -->\nafter\n")
    assert "old" not in text
    assert page(text, control=rows) == text


def test_a_result_without_a_place_in_the_docs_is_an_error(page: Callable[..., str]) -> None:
    with pytest.raises(SystemExit, match=r"a place for copy\.json"):
        page("nothing here", copy=[])


def test_what_gpu_check_found_is_a_table_with_its_environment() -> None:
    row = {"name": "a_b", "check": "a b", "verdict": "slow", "seconds": 1.0, "note": "x | y\n  z", "figures": {}}
    first, second = ({"gpu": "A GPU", "driver": "580.65", "uuid": digit * 32} for digit in "67")
    tree = {
        "environments": {"6" * 32: {"cuda": 13000, "mps": False}},
        "checks": [row | first | {"verdict": "wrong"}, row | second, row | first | {"driver": "590.1"}],
    }
    assert table.table(tree).splitlines() == [
        "**A GPU, driver 580.65** (UUID 77777777)",
        "",
        "| row | verdict | what it found |",
        "|---|---|---|",
        "| a b | slow | x / y z |",
        "",
        "**A GPU, driver 590.1** (UUID 66666666)",
        "",
        "66666666: cuda 13000, mps False.",
        "",
        "| row | verdict | what it found |",
        "|---|---|---|",
        "| a b | slow | x / y z |",
    ]


def test_the_docs_quote_exactly_what_is_in_the_results() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (table.ROOT / "docs").glob("*.md"))
    results = sorted((table.ROOT / "benchmarks" / "results").glob("*.json"))
    assert results
    for result in results:
        assert table.table(json.loads(result.read_text(encoding="utf-8"))) in text, (
            f"run benchmarks/table.py: {result.name}"
        )
    growth = json.loads((table.ROOT / "benchmarks" / "results" / "growth.json").read_text(encoding="utf-8"))
    assert (table.ROOT / "docs" / "growth.svg").read_text(encoding="utf-8") == picture(growth["axes"])


def test_the_picture_of_first_tokens_shows_what_was_measured() -> None:
    drawn = first_token.picture(first_token.results())
    assert first_token.PICTURE.read_text(encoding="utf-8") == drawn
    texts = [one.text for one in ET.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert len(texts) == 1 + 2 * len(first_token.BARS)
    assert texts[texts.index("no storage") + 1] == "1,171"
