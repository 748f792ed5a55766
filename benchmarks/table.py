"""Write the tables of docs/*.md from benchmarks/results/*.json, between their markers.

    python -m benchmarks.table [DIRECTORY …]

A directory is one that `make gpu-check ARGS="--results DIRECTORY"` has written. Its rows are added to those in
benchmarks/results first. Exits with 1, and names them, if a figure of a GPU is lower by more than a tenth than in the
last commit, or a verdict is: then what became slower is mended, or a commit says why it stays.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CUDA_FILES = ("gpu-check.json", "copy-cuda.json")  # of make gpu-check


def table(tree: dict[str, Any]) -> str:
    """One result file as Markdown."""
    if tree.get("bench") == "peers":
        return peers(tree)
    if "things" in tree:
        return crowds(tree)
    if tree.get("bench") == "fleet":
        return fleet(tree)
    if "machines" in tree:
        return cuda(tree)
    return verdicts(tree) if "checks" in tree else measured(tree)


def measured(tree: dict[str, Any]) -> str:
    """The rows of a benchmark."""
    where = tree["machine"]
    gpu = f"{where['gpu']}, " if "gpu" in where else ""
    lines = [
        f"{gpu}{where['cpu']}, {where['cores']} cores, Linux {where['kernel']}, Python {where['python']}, "
        f"load {where['load_1min_before']:.1f} before the run.",
        "",
        "| what | value | limit, same run | ratio | spread |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['name']} | {r['value']:,.2f} {r['unit']} | {r['limit']:,.2f} {r['limit_name']} "
        f"| {r['ratio']:.2f} | {r['spread']:.0%} |"
        for r in tree["rows"]
    ]
    return "\n".join(lines)


def crowds(tree: dict[str, Any]) -> str:
    """What calls cost beside many things: a table for each of them, a column for each size."""
    where = tree["machine"]
    lines = [
        f"{where['cpu']}, {where['cores']} cores, Linux {where['kernel']}, Python {where['python']}, "
        f"load {where['load_1min_before']:.1f} before the run. Microseconds of CPU: the event loop's, and those of all "
        "threads where they are more.",
    ]
    for thing, one in tree["things"].items():
        columns = one["columns"]
        lines += ["", *_head(["what", *(f"{size:,} {thing}" for size in one["sizes"])])]
        for name, key, unit in (("CPU of each", "each_us", "us"), ("memory of each", "each_bytes", "bytes")):
            lines.append(f"| {name} | {' | '.join(f'{column[key]:,.0f} {unit}' for column in columns)} |")
        for name in columns[0]["calls"]:
            lines.append(f"| {name} | {' | '.join(_both(*column['calls'][name]) for column in columns)} |")
        steps = [f"{column['longest_ms']:.0f} ms" for column in columns]
        lines.append(f"| longest step of the loop | {' | '.join(steps)} |")
    return "\n".join(lines)


def _both(loop_us: float, all_us: float) -> str:
    return f"{loop_us:,.0f}" if all_us < 1.05 * loop_us else f"{loop_us:,.0f} of {all_us:,.0f}"


def fleet(tree: dict[str, Any]) -> str:
    """What `benchmarks.fleet` has predicted."""
    names = (
        "nodes",
        "router",
        "pool",
        "event",
        "without prefill",
        "p50",
        "p90",
        "p99",
        "busy",
        "between nodes",
        "peak",
    )
    lines = [" | ".join(["", *names, ""]).strip(), "|---" * len(names) + "|"]
    for point in tree["points"]:
        kind, seconds = point["fleet"], [f"{one:,.2f} s" for one in point["ttft_s"].values()]
        cells = [str(kind["nodes"]), kind["router"], "yes" if point["pool"] else "no", kind["event"] or "none"]
        cells += [f"{1 - point['hit_rate']['computed']:.1%}", *seconds, f"{point['busy']['mean']:.0%}"]
        cells += [f"{point['network_bytes'] / 1e12:.2f} TB", f"{8 * point['network_peak'] / 1e9:.1f} Gbit/s"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def peers(tree: dict[str, Any]) -> str:
    """What `make bench-peers` found, with the ratios first. A peer without figures says why.

    Each group's table is followed by one of the rounds: medians of peers whose speed varies say less than how often one
    was ahead of the other.
    """
    where = tree["machine"]
    lines = [
        f"{where['cpu']}, {where['cores']} cores, Linux {where['kernel']}, Python {where['python']}, "
        f"load {where['load_1min_before']:.1f} before the run and {where['load_1min_after']:.1f} after it; "
        f"{tree['rounds']} rounds{_size(tree)}.",
    ]
    for group, found in itertools.groupby(tree["rows"], key=lambda row: row["group"]):
        rows = list(found)
        columns = TASK_COLUMNS if any("task" in row for row in rows) else BLOCK_COLUMNS
        lines += ["", f"**{group[0].upper()}{group[1:]}**", "", *_head(columns)]
        for row in rows:
            cells = [f"— {row['why_not']}"] if "why_not" in row else _cells(row)
            lines.append(f"| {' | '.join([_name(row), *cells])} |" + " |" * (len(columns) - 1 - len(cells)))
        lines += _round_by_round(rows)
    return "\n".join(lines)


def _size(tree: dict[str, Any]) -> str:
    """Of a round, if it is the same in every group."""
    return f" of {tree['blocks']} blocks of {tree['block_bytes'] / 2**20:.3g} MiB" if "blocks" in tree else ""


BLOCK_COLUMNS = (
    "what",
    "store × limit",
    "load × limit",
    "CPU s/GB, store",
    "load",
    "GB/s, store",
    "load",
    "checksum",
    "version",
)
TASK_COLUMNS = ("what", "time × limit", "us per task, p50", "CPU us", "version")


def _cells(row: dict[str, Any]) -> list[str]:
    both = [row[what] for what in ("store", "load", "task") if what in row]
    cells = [f"{one['ratio']:.2f} (spread {one['spread']:.0%})" for one in both]
    if "task" in row:
        return [*cells, f"{row['task']['us']:,.0f}", f"{row['task']['CPU us']:,.0f}", row["version"]]
    cells += [f"{one['CPU s/GB']:.2f}" for one in both] + [f"{one['GB/s']:.2f}" for one in both]
    return [*cells, "yes" if row["checksum"] else "no", row["version"]]


def _name(row: dict[str, Any]) -> str:
    return f"**{row['name']}**" if row["name"].startswith("transferd") else row["name"]


def _head(columns: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def _round_by_round(rows: Sequence[dict[str, Any]]) -> list[str]:
    """How fast transferd was beside each peer in the same rounds. Nothing for tasks, or without peers of both kinds."""
    rows = [row for row in rows[1:] if "store" in row]
    ours = [row for row in rows if row["name"].startswith("transferd")]
    others = [row for row in rows if row not in ours]
    if not ours or not others:
        return []
    lines = ["", *_head(["round by round", *(f"× {other['name']}" for other in others)])]
    for row, what in itertools.product(ours, ("store", "load")):
        cells = []
        for other in others:
            beside = [mine / its for mine, its in zip(row[what]["ratios"], other[what]["ratios"], strict=True)]
            ahead = sum(ratio > 1 for ratio in beside)
            cells.append(f"{statistics.median(beside):.2f} (ahead in {ahead} of {len(beside)})")
        lines.append(f"| {_name(row)}, {what} | {' | '.join(cells)} |")
    return lines


def _by_gpu(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The last row of each name, by GPU's name and driver."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        here = found.setdefault((row["gpu"], row["driver"]), {})
        here.pop(row["name"], None)
        here[row["name"]] = row
    return {where: list(last.values()) for where, last in found.items()}


def _devices(rows: Sequence[dict[str, Any]]) -> str:
    return ", ".join(dict.fromkeys(row["uuid"][:8] for row in rows))


def verdicts(tree: dict[str, Any]) -> str:
    """What `make gpu-check` wrote as Markdown: a table for each kind of GPU and driver."""
    lines: list[str] = []
    for (gpu, driver), rows in _by_gpu(tree["checks"]).items():
        lines += ["", f"**{gpu}, driver {driver}** (UUID {_devices(rows)})", ""]
        for uuid in dict.fromkeys(row["uuid"] for row in rows):
            if facts := tree["environments"].get(uuid):  # unknown if its first worker died early
                lines += [f"{uuid[:8]}: {', '.join(f'{name} {value}' for name, value in facts.items())}.", ""]
        lines += ["| row | verdict | what it found |", "|---|---|---|"]
        for row in rows:
            note = " ".join(row["note"].split()).replace("|", "/")
            lines.append(f"| {row['check']} | {row['verdict']} | {note} |")
    return "\n".join(lines[1:])


def cuda(tree: dict[str, Any]) -> str:
    """What the rows of `make gpu-check` that measure copies wrote, for each kind of GPU and driver."""
    lines: list[str] = []
    for (gpu, driver), rows in _by_gpu(tree["rows"]).items():
        where = tree["machines"][rows[-1]["uuid"]]
        lines += [
            "",
            f"**{gpu}, driver {driver}** (UUID {_devices(rows)})",
            "",
            measured({"machine": where, "rows": rows}),
        ]
    return "\n".join(lines[1:])


def _fill(text: str, pattern: str, content: str) -> tuple[str, int]:
    """The text with the content between each pair of markers, and how many pairs there are."""
    return re.subn(pattern, lambda markers: f"{markers[1]}{content}\n{markers[2]}", text, flags=re.DOTALL)


FALLEN = 0.9  # of the committed figure of the same row, GPU and driver: less is a way that became slower
VERDICTS = {"fast": 1.0, "right": 1.0, "slow": 0.5, "wrong": 0.0}
FIGURES = ("GBs", "share")  # the ends of names of figures that should not fall


def figures(tree: dict[str, Any]) -> dict[tuple[str, ...], float]:
    """What should not fall in a file of `make gpu-check`: the last of each, by row, GPU, driver and name."""
    found: dict[tuple[str, ...], float] = {}
    for row in tree.get("rows", []):
        found[row["name"], row["gpu"], row["driver"], f"of {row['limit_name']}"] = row["ratio"]
    for row in tree.get("checks", []):
        if row["verdict"] in VERDICTS:
            where = row["name"], row["gpu"], row["driver"]
            found[(*where, "verdict")] = VERDICTS[row["verdict"]]
            found |= {(*where, *path): value for path, value in _numbers(row["figures"])}
    return found


def _numbers(tree: Any, *path: str) -> Iterator[tuple[tuple[str, ...], float]]:
    """The figures of a row's that should not fall, by their places in it."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from _numbers(value, *path, name)
    elif path and path[-1].endswith(FIGURES) and isinstance(tree, int | float):
        yield path, float(tree)


def fallen(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What is lower in the new file, by more than a tenth, than the last figure of that name in the old one."""
    before, now = figures(old), figures(new)
    lower = [where for where, value in now.items() if where in before and value < FALLEN * before[where]]
    return [
        f"{name} ({gpu}, driver {driver}): {' '.join(what)} {now[where]:.2f}, and {before[where]:.2f} before"
        for where, (name, gpu, driver, *what) in zip(lower, lower, strict=True)
    ]


def committed(name: str) -> dict[str, Any]:
    """A file of benchmarks/results as the last commit has it; nothing without one, or outside of a repository."""
    command = ["git", "-C", str(ROOT), "show", f"HEAD:./benchmarks/results/{name}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}


def collect(given: Sequence[Path]) -> None:
    """Add the files of a run of `make gpu-check` (its --results) to those in benchmarks/results."""
    for source in given:
        target = ROOT / "benchmarks" / "results" / source.name
        tree = json.loads(source.read_text(encoding="utf-8"))
        old = json.loads(target.read_text(encoding="utf-8")) if target.exists() else {}
        for name, value in tree.items():
            if isinstance(value, list):
                tree[name] = [*old.get(name, []), *(row for row in value if row not in old.get(name, []))]
            elif isinstance(value, dict):
                tree[name] = old.get(name, {}) | value
        target.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] = ()) -> None:
    for directory in map(Path, arguments):
        files = [directory / name for name in CUDA_FILES if (directory / name).exists()]
        if not files:
            raise SystemExit(f"{directory} has none of {', '.join(CUDA_FILES)}")
        collect(files)
    slower: list[str] = []
    pages = {page: page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")}
    for result in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        tree = json.loads(result.read_text(encoding="utf-8"))
        pattern = rf"(<!-- {re.escape(result.stem)} -->\n).*?(<!-- end -->)"
        if result.name in CUDA_FILES:
            slower += fallen(committed(result.name), tree)
        places = 0
        for page, text in pages.items():
            pages[page], found = _fill(text, pattern, table(tree))
            places += found
        if not places:
            raise SystemExit(f"no page of docs/ has a place for {result.name}")
    for page, text in pages.items():
        page.write_text(text, encoding="utf-8")
    if slower:
        raise SystemExit("slower than what is committed, by more than a tenth:\n" + "\n".join(slower))


if __name__ == "__main__":
    main(sys.argv[1:])
