"""What is wrong with a daemon, or slower than it should be, as its report shows. Each sentence says what to do.

`transferd stats`, `transferd top`, `transferd doctor` and the page at `/` all show this list.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from transferd.errors import one_line
from transferd.observability.report import Report, StorageReport
from transferd.observability.units import span

UNATTACHED_S = 10.0  # an engine that starts has offered its memory by then


def concerns(report: Report, not_ready: str = "") -> list[str]:
    """List what an operator should know, the most urgent first; empty when all is well.

    not_ready: why tasks are not served, if the caller knows it (the text of /readyz).
    """
    found = (*_service(report, not_ready), *_storage(report.storage), *_quality(report))
    return [one_line(text) for text in found]


def _service(report: Report, not_ready: str) -> list[str]:
    """Why no tasks are served, or only some."""
    cache, found = report.cache, []
    found += [f"rank {rank} has died: restart the daemon" for rank in report.barrier.dead]
    if cache.cleared:
        found.append("the cache is cleared: tasks are rejected until restore_cache")
    elif cache.missing:
        found.append(f"ranks {_listed(cache.missing)} have no memory: the engine has not offered it yet")
    elif not report.ready:
        found.append(f"not ready: {not_ready or 'see /readyz and the log'}")
    elif cache.unmapped and report.rejects.get("not_attached"):  # an engine that has left is no problem
        found.append(f"no engine has attached ranks {_listed(cache.unmapped)}: tasks are rejected (not_attached)")
    for name, engine in report.engines.items():
        for_s = engine.unattached_s or 0.0
        if engine.registered and for_s >= UNATTACHED_S:
            ranks = _ranks(engine.unattached)
            found.append(f"engine {name!r}: connected, but the memory of {ranks} is not attached, since {span(for_s)}")
    for hold in report.held:
        found.append(f"{hold.what} for {span(hold.for_s)}, held by {hold.holder}: `resume` ends it")
    if report.draining and not report.held:
        found.append("the daemon is stopping: it admits no new tasks")
    if report.straggling:
        found.append(f"{report.straggling} answered tasks still occupy blocks: a copy or a call hangs")
    return found


def _storage(storage: StorageReport) -> list[str]:
    found = []
    if (storage.breaker or "closed") != "closed":
        found.append(f"storage {storage.backend} does not answer: tasks fail at once until it does")
    if storage.corrupt:
        found.append(f"{storage.corrupt} damaged objects were set aside: check the medium, run `transferd verify`")
    if storage.errors:
        found.append(f"{storage.errors} storage calls failed since the start: see the log")
    return found


def _quality(report: Report) -> list[str]:
    found = _together(report.degraded)
    expired = report.tasks.get("expired", 0)
    if expired:
        found.append(f"{expired} tasks missed their deadline: see `transferd tasks --failed`")
    if report.effects_failed:
        found.append(f"internal errors: {report.effects_failed}: please report them with the log")
    if report.log_dropped:
        found.append(f"{report.log_dropped} log lines were lost: the reader of stderr is too slow")
    refused = {reason: n for reason, n in report.refused.items() if n}
    if refused:
        found.append(
            "refused connections since the start: " + ", ".join(f"{reason} {n}" for reason, n in refused.items())
        )
    return found


def _together(reasons: Iterable[str]) -> list[str]:
    """One sentence for all ranks that have the same reason."""
    ranks: dict[str, list[int]] = {}
    for reason in reasons:
        said = re.fullmatch(r"rank (\d+): (.*)", reason, re.DOTALL)
        ranks.setdefault(said[2] if said else reason, []).extend([int(said[1])] if said else [])
    return [f"{_ranks(which)}: {reason}" if which else reason for reason, which in ranks.items()]


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_listed(ranks)}"


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
