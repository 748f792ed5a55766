"""Whether two engines of a daemon read each other's blocks, and if not, why: in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transferd.blocks.fingerprint import differences
from transferd.cli.doctor.checks import Finding, ok
from transferd.errors import ConfigError

MOST_PAIRS = 16
MOST_TOLD = 12  # differences of a pair


def compare(report: Mapping[str, Any], names: Sequence[str]) -> Iterator[Finding]:
    """Compare engines of a daemon. report: its stats(). names: engines to compare with the first of them.

    Without names, every engine is compared with the first one of its model. Raises ConfigError for an unknown name.
    """
    engines: Mapping[str, Any] = report.get("engines", {})
    if unknown := [name for name in names if name not in engines]:
        raise ConfigError("--engine", f"is not one of {', '.join(engines) or 'none'}", unknown[0])
    pairs = [(names[0], name) for name in names[1:]] if names else _pairs(engines)
    for one, other in pairs[:MOST_PAIRS]:
        yield _pair(one, engines[one], other, engines[other])


def _pairs(engines: Mapping[str, Any]) -> list[tuple[str, str]]:
    first: dict[str, str] = {}
    pairs = []
    for name, engine in engines.items():
        if (before := first.setdefault(engine["model"], name)) != name:
            pairs.append((before, name))
    return pairs


def _pair(one: str, first: Mapping[str, Any], other: str, second: Mapping[str, Any]) -> Finding:
    name, found = f"{one} and {other}", differences(_said(first), _said(second))
    if not found:
        return ok(name, "read each other's blocks")
    told = "; ".join(found[:MOST_TOLD]) + (f"; and {len(found) - MOST_TOLD} more" if len(found) > MOST_TOLD else "")
    return ok(name, f"do not read each other's blocks: {told}")


def _said(engine: Mapping[str, Any]) -> dict[str, Any]:
    """All that engines must have in common, from an engine's part of stats()."""
    found = engine["fingerprint"]
    named: dict[str, Any] = {key: engine[key] for key in ("model", "generation")}
    if isinstance(found, str):  # a daemon of a version without facts
        return named | {"fingerprint": found}
    return {**named, "layout": found["layout"].partition(" facts=")[0], **found["facts"]}
