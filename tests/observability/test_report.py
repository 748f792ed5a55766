"""The report's structs: they hold what a daemon reports, docs/report.md lists them, and other versions can be read."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scripts import watched
from scripts.describe_report import metrics
from transferd.config import from_tree
from transferd.daemon.daemon import Daemon
from transferd.observability import report as module
from transferd.observability.metrics import rows
from transferd.observability.report import Report, StoreFigures, read, tree

ROOT = Path(__file__).parents[2]
SECTIONS = {
    name: kind
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, module.ReportSection) and kind is not module.ReportSection
}
CACHE = {"ranks": 2, "device_blocks": 8, "host_blocks": 8}
DAEMONS: dict[str, dict[str, Any]] = {
    "file": {"cache": CACHE, "storage": {"backend": "file"}},
    "memory": {"cache": CACHE, "storage": {"backend": "memory"}},
    "none": {"cache": CACHE, "storage": {"backend": "none"}},
    "open index": {
        "cache": CACHE,
        "storage": {"backend": "attention_store", "attention_store": {"driver": "open", "data": "memory"}},
    },
    "events and traces": {
        "cache": CACHE,
        "storage": {"backend": "memory"},
        "events": {"endpoint": "tcp://127.0.0.1:*"},
        "traces": {"endpoint": "http://127.0.0.1:9/v1/traces"},
    },
    "no cache": {"storage": {"backend": "memory"}},
}


@pytest.fixture(params=DAEMONS, ids=str)
def daemon(request: pytest.FixtureRequest, tmp_path: Path) -> Daemon:
    described = json.loads(json.dumps(DAEMONS[request.param]))
    if described["storage"]["backend"] == "file":
        described["storage"]["file"] = {"path": str(tmp_path / "blocks")}
    listens = {"server": {"endpoint": f"ipc://{tmp_path}/t.sock"}, "metrics": {"listen": ""}}
    return Daemon(from_tree(listens | described))


def paths(value: Any, path: str = "") -> Iterator[str]:
    """Every key of plain data, as docs/report.md writes it."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            named = re.fullmatch(r"(ranks\[\]\.lanes|lanes|engines\.NAME\.lanes|engines|events\.peers)\.", path)
            here = f"{path}{'NAME' if named else key}"
            yield from () if named else (here,)
            yield from paths(inner, here + ".")
    elif isinstance(value, list):
        for inner in value:
            yield from paths(inner, path.removesuffix(".") + "[].")


def documented() -> dict[str, str]:
    """{key: type} of docs/report.md."""
    rows = re.findall(r"^\| `(.+?)` \| (.+?) \| .+ \|$", (ROOT / "docs" / "report.md").read_text(), re.MULTILINE)
    return dict(rows)


def test_the_page_in_docs_is_what_the_structs_say() -> None:
    script = ROOT / "scripts" / "describe_report.py"
    done = subprocess.run([sys.executable, script, "--check"], check=False, timeout=60)
    assert done.returncode == 0, "run: python scripts/describe_report.py"


def test_what_is_counted_is_counted_by_engine_and_by_level() -> None:
    found = metrics(Report)
    for name in ("tasks", "errors", "queued", "running", "straggling", "hits", "misses", "rejects"):
        assert found[f"engines.{name}"].name == found[name].name.replace("transferd_", "transferd_engine_")
        assert "engine" in found[f"engines.{name}"].labels
    for name, _ in rows(StoreFigures):
        if name != "scrub":
            assert found[f"storage.levels.{name}"].labels[0] == "level", name
    by_engine = {"bytes", "evicted", "share", "pinned"}
    assert all(found[f"storage.levels.holdings.{name}"].labels[:2] == ["level", "engine"] for name in by_engine)
    assert all(one.labels[:2] == ["level", "path"] for name, one in found.items() if ".disks." in name)
    others = {*watched.OTHERS["task_seconds"].labels, *watched.OTHERS["stage_seconds"].labels}
    assert others >= {"engine", "kind", "stage"}


def test_a_metric_has_the_same_labels_wherever_it_is_counted() -> None:
    """Else one series is a part of another one, and who adds them up counts twice."""
    labels: dict[str, set[tuple[str, ...]]] = {}
    for one in metrics(Report).values():
        labels.setdefault(one.name, set()).add(tuple(one.labels))
    assert {name: found for name, found in labels.items() if len(found) > 1} == {}


async def test_every_key_that_a_daemon_reports_has_its_row(daemon: Daemon) -> None:
    rows = documented()
    found = list(paths(json.loads(json.dumps(daemon.stats()))))
    free = [key for key, kind in rows.items() if kind.startswith("map of")]  # their keys are codes, names or facts
    assert len(found) > 100
    unknown = [key for key in found if key not in rows and not any(key.startswith(f"{one}.") for one in free)]
    assert "ranks[].lanes.NAME.done" in rows
    assert not unknown, "add a field and its comment"


async def test_a_report_read_back_is_the_same(daemon: Daemon) -> None:
    report = daemon.report()
    again = read(json.loads(json.dumps(tree(report))))
    assert tree(again) == tree(report)


def test_every_section_is_filled_completely() -> None:
    """Fields have defaults for the sake of older daemons; a daemon must not forget one."""
    made = set[str]()
    for path in (ROOT / "transferd").rglob("*.py"):
        if path.name == "report.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and (name := ast.unparse(node.func).removeprefix("rows.")) in SECTIONS:
                given = {keyword.arg for keyword in node.keywords}
                if (
                    not given or None in given or "figures" in path.name
                ):  # empty, from `statistics()`, or sums of others
                    continue
                made.add(name)
                needed = {
                    one.name for one in msgspec.structs.fields(SECTIONS[name]) if one.default is not msgspec.UNSET
                }
                assert needed <= given, f"{path.name}:{node.lineno} forgets {needed - given}"
    assert {"EngineReport", "ServerReport", "MemoryReport"} <= made


async def test_extra_figures_of_a_custom_backend_stay_in_its_section(daemon: Daemon) -> None:
    if daemon.storage is None or daemon.tokens is not None:
        pytest.skip("it has no backend of this kind")
    found = daemon.storage.statistics() | {"warmth": 7, "layers": {"a": 1}}
    daemon.storage.statistics = lambda: found  # type: ignore[method-assign]
    storage = daemon.stats()["storage"]
    assert (storage["warmth"], storage["layers"]) == (7, {"a": 1})
    assert "other" not in storage
    assert found["warmth"] == 7, "its own dict was not changed"


def test_reports_of_older_and_newer_daemons_can_be_read() -> None:
    older = {"version": "0.3.0", "boot_id": "b", "ranks": [{"rank": 0, "device": 0, "lanes": {"read": {"done": 3}}}]}
    report = read(older | {"engines": {"e": {"fingerprint": {"digest": "abc"}, "ready": True}}})
    assert (report.ranks[0].lanes["read"].done, report.engines["e"].fingerprint.digest) == (3, "abc")
    newer = tree(Report(version="9")) | {"moons": 4, "storage": {"backend": "tape", "reels": 2}}
    assert (read(newer).version, read(newer).storage.backend) == ("9", "tape")
