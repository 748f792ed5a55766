"""docs/timeline.svg: where the time of four tasks goes, step by step, as the flight recorder of a daemon tells it.

    python -m benchmarks.timeline [--directory DIR] [--save]

The tasks: a read of one small block on one rank and on eight, and a store and a load of 256 blocks of 2 MiB in files
that the page cache has, the store full. Each is the one with the median duration of many. A bar begins where the
recorder, or the client, saw the step begin. Without --save it prints the picture.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from transferd import Client, ReadStorageTask, Status, WriteStorageTask
from transferd.blocks.formats import FOOTER_BYTES
from transferd.client.launch import running
from transferd.tasks import Task

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "timeline.svg"
SMALL, LARGE = 401, 11  # tasks of which the median is drawn
BLOCKS, BLOCK_BYTES = 256, 2 * 1024**2
UNDER_WAY = 2  # chunks of a task: one begins when the second one before it has ended

WIDTH, LEFT, RIGHT, ROW, HEAD = 960, 92, 22, 22, 62
COLORS = ("#2563eb", "#0d9488", "#d97706", "#9333ea", "#dc2626", "#64748b")
STYLE = """
  svg { color: #1f2937; background: #ffffff; font: 12px system-ui, sans-serif }
  text { fill: currentColor }
  .grid { stroke: currentColor; stroke-opacity: 0.15 }
  .bar text { fill: #ffffff; font-size: 11px }
  @media (prefers-color-scheme: dark) { svg { color: #e5e7eb; background: #111827 } }
"""


@dataclass(frozen=True, slots=True)
class Bar:
    """A step. begin, end: seconds since the push."""

    what: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One task. rows: (name, bars that do not overlap)."""

    title: str
    seconds: float
    rows: Sequence[tuple[str, Sequence[Bar]]]


def timeline(title: str, story: dict[str, Any], pushed: float, answered: float) -> Timeline:
    """story: of `Client.explain`. pushed, answered: time since the epoch, on the client."""
    [life] = story["lives"]
    offset = life["began"] - pushed
    moments = {event["what"]: event["t"] + offset for event in life["events"]}
    total = answered - pushed
    rows: list[tuple[str, Sequence[Bar]]] = [
        ("client", [Bar("push, to admission", 0.0, moments["admitted"]), Bar("answer", moments["done"], total)]),
        ("dispatcher", _steps([("admit", moments["admitted"]), ("start", moments["started"])], moments["done"])),
    ]
    for rank in life["ranks"]:
        events = [(event["what"], event["t"] + offset) for event in rank["events"]]
        bars = _chunks(events)
        for lane in range(UNDER_WAY if len(bars) > UNDER_WAY else 1):
            name = f"rank {rank['rank']}" if not lane else ""
            rows.append((name, bars[lane::UNDER_WAY] if len(bars) > UNDER_WAY else bars))
    return Timeline(title, total, rows)


def _steps(events: Sequence[tuple[str, float]], end: float) -> list[Bar]:
    ends = [*(begin for _, begin in events[1:]), end]
    return [Bar(what, begin, after) for (what, begin), after in zip(events, ends, strict=True)]


def _chunks(events: Sequence[tuple[str, float]]) -> list[Bar]:
    """The bars of a rank: a chunk from its beginning until it is stored, or until there is room for one more."""
    arrived = next(at for what, at in events if what == "arrived")
    begins = [(what, at) for what, at in events if what in ("put", "load in place")]
    stored = [at for what, at in events if what == "stored"]
    ends = stored or [at for _, at in begins[UNDER_WAY:]]
    ends += [arrived] * (len(begins) - len(ends))
    bars = [Bar(what, at, end) for (what, at), end in zip(begins, ends, strict=True)]
    return bars if len(bars) > 1 else _steps([event for event in events if event[0] != "arrived"], arrived)


async def median_of(
    client: Client, title: str, tasks: Iterator[Task], count: int, between: Callable[[], None]
) -> Timeline:
    """Run so many tasks, and draw the one that took the median time. The first few are warm-up."""
    runs = []
    for number, task in enumerate(itertools.islice(tasks, count + count // 10 + 1)):
        between()
        pushed, before = time.time(), time.perf_counter()
        result = await client.submit(task)
        seconds = time.perf_counter() - before
        if result.status is not Status.OK:
            raise RuntimeError(f"a task ended badly: {result}")
        if number > count // 10:
            runs.append((seconds, pushed, await client.explain(task.task_id)))
    seconds, pushed, story = sorted(runs, key=lambda run: run[0])[count // 2]
    return timeline(title, story, pushed, pushed + seconds)


async def small(ranks: int) -> Timeline:
    cache = {"ranks": ranks, "layers": 2, "kv_heads": ranks, "head_dim": 16, "block_size": 16}
    tree = {"cache": cache | {"device_blocks": 4, "host_blocks": 0}, "storage": {"backend": "memory"}}
    async with _client(tree, Path(tempfile.gettempdir()), ranks) as client:
        await client.submit(WriteStorageTask(task_id="w", keys=["key"], gpu_block_ids=[0]))
        tasks = (ReadStorageTask(task_id=f"r{i}", keys=["key"], gpu_block_ids=[1]) for i in itertools.count())
        name = f"Read of one small block, {ranks} rank{'s' if ranks > 1 else ''}"
        return await median_of(client, name, tasks, SMALL, lambda: None)


async def large(directory: Path) -> list[Timeline]:
    cache = {"ranks": 1, "layers": 16, "kv_heads": 4, "head_dim": 128, "block_size": 64, "device_blocks": BLOCKS}
    room = (BLOCKS + BLOCKS // 16) * (BLOCK_BYTES + FOOTER_BYTES)
    tree = {
        "cache": cache | {"host_blocks": 0},
        "storage": {"backend": "file", "file": {"path": str(directory / "store"), "capacity": room}},
    }
    blocks = list(range(BLOCKS))
    async with _client(tree, directory, 1) as client:
        caches = await client.attach(0)

        def engine() -> None:
            for layers in caches.values():
                for layer in layers:
                    layer[:] += 1

        def keys(number: int) -> list[str]:
            return [f"{number}-{block}" for block in blocks]

        stores = (WriteStorageTask(task_id=f"w{i}", keys=keys(i), gpu_block_ids=blocks) for i in itertools.count())
        store = await median_of(client, "Store of 256 blocks of 2 MiB, full store", stores, LARGE, engine)
        stored = keys(LARGE + LARGE // 10)  # those of the last store
        loads = (ReadStorageTask(task_id=f"r{i}", keys=stored, gpu_block_ids=blocks) for i in itertools.count())
        return [store, await median_of(client, "Load of 256 blocks of 2 MiB", loads, LARGE, lambda: None)]


@contextlib.asynccontextmanager
async def _client(tree: dict[str, Any], directory: Path, ranks: int) -> AsyncIterator[Client]:
    with (
        tempfile.TemporaryDirectory(prefix="transferd-timeline-", dir=directory) as place,
        running(tree, Path(place)) as daemon,
    ):
        async with Client(daemon.endpoint) as client:
            for rank in range(ranks):
                await client.attach(rank)
            yield client


def picture(timelines: Sequence[Timeline]) -> str:
    """One self-contained SVG document, a panel for each task."""
    panels, top = [], 0
    names = list(dict.fromkeys(bar.what for one in timelines for _, bars in one.rows for bar in bars))
    colors = dict(zip(names, itertools.cycle(COLORS), strict=False))
    for one in timelines:
        panels.append(f'<g transform="translate(0 {top})">\n' + "\n".join(_panel(one, colors)) + "\n</g>")
        top += HEAD + ROW * len(one.rows) + 18
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" role="img">\n'
        f"<title>Where the time of four tasks goes</title>\n<style>{STYLE}</style>\n" + "\n".join(panels) + "\n</svg>\n"
    )


def _panel(one: Timeline, colors: dict[str, str]) -> Iterator[str]:
    unit, scale = ("us", 1e6) if one.seconds < 0.01 else ("ms", 1e3)
    bottom = HEAD + ROW * len(one.rows)

    def x(seconds: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * seconds / one.seconds

    yield f'<text x="{LEFT}" y="22" font-weight="600">{escape(one.title)}: {one.seconds * scale:.0f} {unit}</text>'
    step = next(step for step in (1, 2, 5, 10, 20, 25, 50, 100, 200, 500) if one.seconds * scale / step <= 10)
    for tick in range(0, int(one.seconds * scale) + 1, step):
        at = x(tick / scale)
        yield f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{HEAD - 8}" y2="{bottom}"/>'
        yield f'<text x="{at:.1f}" y="{HEAD - 14}" text-anchor="middle">{tick}</text>'
    for number, (name, bars) in enumerate(one.rows):
        y = HEAD + ROW * number
        yield f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>'
        for bar in bars:
            width = max(1.0, x(bar.end) - x(bar.begin))
            told = f"{bar.what}: {(bar.end - bar.begin) * scale:.0f} {unit}"
            yield f'<g class="bar"><title>{escape(told)}</title>'
            yield (
                f'<rect x="{x(bar.begin):.1f}" y="{y + 2}" width="{width:.1f}" height="{ROW - 4}" rx="3" '
                f'fill="{colors[bar.what]}"/>'
            )
            if width > 6.5 * len(told):
                yield f'<text x="{x(bar.begin) + 6:.1f}" y="{y + 15}">{escape(told)}</text>'
            yield "</g>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the disk in question")
    parser.add_argument("--save", action="store_true", help="write docs/timeline.svg")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="transferd-timeline-", dir=arguments.directory) as place:
        drawn = picture([asyncio.run(small(1)), asyncio.run(small(8)), *asyncio.run(large(Path(place)))])
    if arguments.save:
        PICTURE.write_text(drawn, encoding="utf-8")
    else:
        print(drawn)


if __name__ == "__main__":
    main()
