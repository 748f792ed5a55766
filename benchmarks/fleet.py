"""docs/fleet.svg: the hits of a fleet over its nodes, by router, with one pool of all and without.

    python -m benchmarks.fleet TRACE [--requests 4000]    writes results/fleet.json and the picture
    python -m benchmarks.fleet --draw                     the picture alone

The same traffic for all: the model of docs/sizing.md, 8,192 device blocks of 64 tokens and 768 GB of memory a node, of
which 512 GB are lent to the pool if there is one.
"""

from __future__ import annotations

import argparse
import json
import resource
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transferd.cli.replay.chart import COLORS, STYLE
from transferd.cli.replay.fleet import EVENTS, Fleet, FleetCosts, fleet_point
from transferd.cli.replay.simulate import with_levels
from transferd.cli.replay.sizing import BlockSizes, Rates, in_processes
from transferd.cli.replay.trace import read_trace
from transferd.config import from_tree

RESULTS = Path(__file__).parent / "results" / "fleet.json"
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "fleet.svg"
CACHE = {"ranks": 8, "layers": 80, "kv_heads": 1, "head_dim": 128, "block_size": 64, "device_blocks": 8192}
CACHE |= {"host_blocks": 0}
NODES = (1, 4, 16, 64, 256)
LINES = (("prefix", True), ("random", True), ("prefix", False), ("random", False))  # router, pool
PREFILL, HOST, MEMORY, POOL = 10_000.0, 20e9, 20e9, 10e9  # assumed, as docs/sizing.md says
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 400, 64, 40, 64, 56


def predict(path: Path, limit: int) -> dict[str, Any]:
    """Every line at every number of nodes."""
    requests, rows = read_trace(path, limit), []
    for pool in (True, False):
        levels = ("memory=256GB", "512GB") if pool else ("memory=768GB", "0")
        tree = with_levels({"cache": dict(CACHE), "storage": {"backend": "none"}}, *levels)
        rates = Rates(HOST, (MEMORY, POOL)[: 1 + pool], PREFILL)
        jobs = [(Fleet(nodes, router),) for nodes in NODES for router, pooled in LINES if pooled is pool]
        jobs += [(Fleet(16, "prefix", event),) for event in EVENTS if pool]
        given = (requests, BlockSizes.of(from_tree(tree)), rates, FleetCosts())
        points = in_processes(fleet_point, jobs, given, quiet=True)
        rows += [asdict(point) | {"pool": pool} for point in points]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"bench": "fleet", "requests": len(requests), "cpu_s": round(used.ru_utime + used.ru_stime), "points": rows}


def picture(tree: dict[str, Any]) -> str:
    """The results as one self-contained SVG document."""
    title = f"Blocks without prefill, {tree['requests']:,} requests on more and more nodes"
    top = 10 * (1 + int(max(1 - point["hit_rate"]["computed"] for point in tree["points"]) * 10))

    def y(percent: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - percent / top)

    def x(nodes: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * NODES.index(nodes) / (len(NODES) - 1)

    def body() -> Iterator[str]:
        for percent in range(0, top + 1, 10):
            yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(percent):.1f}" y2="{y(percent):.1f}"/>'
            yield f'<text x="{LEFT - 8}" y="{y(percent) + 4:.1f}" text-anchor="end">{percent} %</text>'
        for nodes in NODES:
            yield f'<text x="{x(nodes):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{nodes}</text>'
        yield f'<text x="{WIDTH / 2:.1f}" y="{HEIGHT - 14}" text-anchor="middle">nodes</text>'
        for number, (router, pool) in enumerate(LINES):
            color = COLORS[number]
            hits = {
                point["fleet"]["nodes"]: 100 * (1 - point["hit_rate"]["computed"])
                for point in tree["points"]
                if (point["fleet"]["router"], point["pool"], point["fleet"]["event"]) == (router, pool, "")
            }
            line = " ".join(f"{x(nodes):.1f},{y(share):.1f}" for nodes, share in sorted(hits.items()))
            yield f'<polyline class="curve" stroke="{color}" points="{line}"/>'
            label = f"{router}, {'one pool' if pool else 'no pool'}"
            yield f'<text x="{LEFT + 150 * number}" y="48" style="fill:{color}">{label}</text>'

    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n"
        f'<text x="{LEFT}" y="26" font-size="16" font-weight="600">{title}</text>\n' + "\n".join(body()) + "\n</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--draw", action="store_true")
    wanted = parser.parse_args()
    if not wanted.draw:
        tree = predict(wanted.trace, wanted.requests)
        RESULTS.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    PICTURE.write_text(picture(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
