"""What an operator sees of every shape of a store, well and in trouble: `stats`, `top`, the page, metrics.

The reports are those of real stores, opened in this process; a scene then sets the figures that its fault would set.
"""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from tests.observability.test_metrics import NoTransport
from tests.support.browser import Browser, executable
from transferd.cli.stats_view import view
from transferd.cli.top.figures import Samples
from transferd.cli.top.screen import View, screen
from transferd.config import LevelSection, from_tree
from transferd.config.sections import MemoryStorageSection
from transferd.daemon.daemon import Daemon
from transferd.observability.concerns import CONCERNS, Watch, concerns, find
from transferd.observability.metrics import families
from transferd.observability.page import FILE
from transferd.observability.report import HoldReport, LevelReport, Report, read, tree
from transferd.runtime.clock import SYSTEM_CLOCK
from transferd.storage.levels.level import StoreLevel
from transferd.storage.levels.stack import LevelsStorage
from transferd.storage.memory import MemoryStorage
from transferd.storage.registry import create_storage

pytestmark = pytest.mark.one_loop

SHAPES = [*itertools.product((0, 1, 5), (1, 2), (1, 2, 3))]  # engines, disks, levels
ALIVE = {"tasks fail", "Tasks fail", "fail at once"}


async def shown(path: Path, engines: int, disks: int, levels: int) -> Report:
    """The report of a daemon over a real store of this shape; every engine is a copy of its own one."""
    file = {"path": [str(path / str(n)) for n in range(disks)], "capacity": "1MiB", "reserve": "0B"}
    described = {"cache": {"device_blocks": 4, "host_blocks": 4}, "storage": {"file": file}, "metrics": {"listen": ""}}
    config = from_tree(described)
    files = create_storage(config)
    assert files is not None
    storage, section = files, MemoryStorageSection()
    if levels > 1:
        own = [("memory", MemoryStorage(section)), ("file", files), ("bucket", MemoryStorage(section))][:levels]
        made = [StoreLevel(n, name, one, LevelSection(), SYSTEM_CLOCK.monotonic) for n, (name, one) in enumerate(own)]
        storage = LevelsStorage(made, SYSTEM_CLOCK)
    daemon = Daemon(config, transport=NoTransport(), storage=storage)
    await daemon.open()
    try:
        report = read(tree(daemon.report()))
    finally:
        await daemon.stop(lambda: 5.0)
    (one,) = report.engines.values()
    report.engines = {f"engine-{n}": msgspec.structs.replace(one, registered=True) for n in range(engines)}
    return report


def file_level(report: Report) -> LevelReport:
    return next(level for level in report.storage.levels if level.disks)


def full(report: Report) -> str:
    """Others have filled the disk."""
    level = file_level(report)
    level.disks[-1].room, level.disks[-1].free = 4096, 0
    return "disk_nearly_full"


def dead(report: Report) -> str:
    """The lowest level does not answer; if there is only one, the store is."""
    *above, lowest = report.storage.levels
    lowest.available = False
    lowest.pending_bytes = 41_700_000 if above else 0
    if not above:
        report.storage.breaker = "open"
    return "level_silent" if above else "storage_silent"


def given_up(report: Report) -> str:
    *above, lowest = report.storage.levels
    if not above:
        return ""
    lowest.lost, lowest.lost_for = 561, {"queue_full": 561, "gone": 3}
    return "copies_given_up"


def drained(report: Report) -> str:
    if len(report.storage.levels) < 2:
        return ""
    file_level(report).state, file_level(report).available = "drained", False
    return "level_drained"


def paused(report: Report) -> str:
    if not report.engines:
        return ""
    report.held = [HoldReport(what="pause", holder="pid 4633", engine="engine-0", for_s=16.7)]
    report.engines["engine-0"].paused = True
    return "held"


def refusing(report: Report) -> str:
    report.rejects = {"queue_full": 673}
    return "tasks_refused"


def read_only(report: Report) -> str:
    file_level(report).disks[0].read_only = True
    return "disk_read_only"


def unreloaded(report: Report) -> str:
    report.reload_refused = "log.level: expected one of debug, error, info, warning ('loud')"
    return "reload_refused"


def well(_: Report) -> str:
    return ""


SCENES = [well, full, dead, given_up, drained, paused, refusing, read_only, unreloaded]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser | None]:
    """With the page open, which shows what `draw` is given; None without Chromium."""
    if executable() is None:
        yield None
        return
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        browser.open(FILE.as_uri())
        browser.until("document.getElementById('tiles') !== null && (paused = true)")
        yield browser


def page_of(report: Report, browser: Browser) -> list[str]:
    history: dict[str, list[float]] = {
        name: [] for name in ("ago_s", "tasks_per_s", "bytes_per_s", "p99_s", "hit_share")
    }
    live: dict[str, Any] = {"report": tree(report), "not_ready": "", "tasks": [], "listed": None, "history": history}
    text = browser.ask(f"(draw({json.dumps(live, default=str)}), document.body.innerText)")
    assert not browser.ask("document.getElementById('start').hidden"), "no client is connected to any of these"
    return str(text).splitlines()


def lines_of(report: Report, browser: Browser | None) -> Iterator[tuple[str, list[str]]]:
    out = io.StringIO()
    Console(file=out, width=80, highlight=False).print(view(report))
    yield "stats", out.getvalue().splitlines()
    yield "top", [line.plain for line in screen(Samples().add(report, []), View(), 80, 24)]
    yield "list", concerns(report) or ["all is well"]
    if browser is not None:
        yield "page", page_of(report, browser)


@pytest.mark.parametrize(("engines", "disks", "levels"), SHAPES)
async def test_a_fault_is_seen_everywhere_and_no_fault_is_none(
    tmp_path: Path, engines: int, disks: int, levels: int, browser: Browser | None
) -> None:
    good = await shown(tmp_path, engines, disks, levels)
    assert [len(level.disks) for level in good.storage.levels] == [disks, *[0] * 2][:1] if levels == 1 else True
    assert len(good.storage.levels) == levels
    for scene in SCENES:
        look(scene, good, browser)


def look(scene: Callable[[Report], str], good: Report, browser: Browser | None) -> None:
    report = read(tree(good))
    wrong = scene(report)
    watch = Watch()
    watch.look(find(report), 100.0)
    watch.look([], 101.0) if not wrong else watch.look(find(report), 101.0)
    report.concerns = watch.concerns(101.0)
    assert [one.name for one in report.concerns] == [wrong][: bool(wrong)], scene.__name__
    several = len(report.storage.levels) > 1
    for where, lines in lines_of(report, browser):
        text, plain = "\n".join(lines), " ".join(" ".join(lines).split())
        assert max(map(len, lines)) <= 80 or where in ("list", "page"), (scene.__name__, where)
        assert where != "top" or len(lines) == 24
        assert not re.search(r"\bNaN\b|\bundefined\b|\bnull\b", text), (scene.__name__, where)
        assert "0 B of 0 B" not in text, where
        if not wrong:
            assert "all is well" in text, (scene.__name__, where)
            assert "!" not in text, (scene.__name__, where)
            continue
        assert "all is well" not in text, (scene.__name__, where)
        (one,) = report.concerns
        assert one.text[:40] in plain, (scene.__name__, where)
        if scene is dead and several:
            assert not [words for words in ALIVE if words in text], "a lower level fails no task"
            assert one.severity == "warning"
    samples = {sample.name: sample for family in families(report) for sample in family.samples}
    assert "transferd_storage_level_bytes" in samples
    assert set(samples["transferd_storage_disk_free_bytes"].labels) == {"level", "path"}
    if wrong:
        (one,) = report.concerns
        assert one.action == CONCERNS[wrong].remedy
        about = {"full": "disk", "dead": "level" if several else "", "drained": "level", "paused": "engine engine-0"}
        assert one.about.startswith(about.get(scene.__name__, ""))


async def test_the_screen_of_two_disks_below_memory(tmp_path: Path) -> None:
    report = await shown(tmp_path, 1, 2, 2)
    report.concerns = []
    lines = [line.plain.rstrip() for line in screen(Samples().add(report, []), View(), 80, 24)]
    at = lines.index("waits     no round waits for a rank")
    assert lines[at + 1 : at + 7] == [
        "storage   ░░░░░░░░░░ memory: 0 objects, 0 B of 1.0 GiB, 0 %",
        "          ░░░░░░░░░░ file: 0 objects, 0 B of 2.0 MiB, 0 %",
        *(f"          {tmp_path!s}/{n}: 0 B of 1.0 MiB, 0 %"[:79] + "…"[: len(str(tmp_path)) > 46] for n in (0, 1)),
        "hits - in 1 min, - in all (0 of 0)",
        "evictions 0, corrupt 0, errors 0",
    ]
