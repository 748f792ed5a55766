"""Everything that is checked, in its order, and how long each row may take."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from tests.machine.gpu import (
    beside,
    copies,
    daemon,
    environment,
    memory,
    mps,
    ordering,
    probe,
    processes,
    sharing,
    speeds,
    vllm,
)
from tests.machine.gpu.machine import Found, Machine

LIMIT_S = 90.0


@dataclass(frozen=True)
class Row:
    """A check, or a part of the benchmark. limit_s: what takes longer has hung."""

    name: str
    check: Callable[[Machine], Coroutine[Any, Any, str | Found]]
    limit_s: float = LIMIT_S

    @property
    def words(self) -> str:
        return self.name.replace("_", " ")


_CHECKS = (
    environment.the_environment,
    *probe.CHECKS,
    *copies.CHECKS,
    *memory.CHECKS,
    *processes.CHECKS,
    *ordering.CHECKS,
    *sharing.CHECKS,
    *daemon.CHECKS,
    *vllm.CHECKS,
)
# Last is what takes much memory, joins other processes' fates, may lose the context, or hang in the driver.
_DANGEROUS = (
    *probe.WAITS,
    *memory.LARGE,
    *mps.CHECKS,
    environment.a_lost_device_is_noticed,
    processes.an_engine_is_killed,
)
_LIMITS = {
    "vllm_saves_and_loads_behind_a_busy_stream": 150.0,
    "a_busy_neighbour_under_mps": 150.0,
    "events_and_timelines_under_mps": 150.0,
    "the_best_settings_beside_a_busy_neighbour": 120.0,
    "a_full_launch_queue": 30.0,
}


def _of(checks: tuple[Callable[[Machine], Coroutine[Any, Any, str | Found]], ...]) -> tuple[Row, ...]:
    return tuple(Row(check.__name__, check, _LIMITS.get(check.__name__, LIMIT_S)) for check in checks)


def _bench(checks: dict[str, Callable[[Machine], Coroutine[Any, Any, str | Found]]]) -> tuple[Row, ...]:
    return tuple(Row(name, check, 150.0) for name, check in checks.items())


# What decides most comes first, for a run that is cut.
_FIRST = tuple(f"bench_{layout}_{way}" for layout in ("gqa", "mla") for way in ("alone", "beside", "one"))
_BENCH = sorted(_bench(speeds.CHECKS), key=lambda row: not row.name.startswith(_FIRST))

ROWS: tuple[Row, ...] = (
    *_of(_CHECKS),
    *(row for row in _BENCH if row.name.startswith(_FIRST)),
    *_bench(speeds.ENGINES),
    *_of(beside.CHECKS),
    *(row for row in _BENCH if not row.name.startswith(_FIRST)),
    *_of(_DANGEROUS),
    *_bench(speeds.LAST),
    *_of(ordering.LAST),
)
BENCH = "bench_"


def chosen(words: list[str], *, bench: bool, skip: list[str] | None = None) -> list[Row]:
    """The rows that these words name, all of them without words, and none that `skip` names. In order."""
    wanted, unwanted = _named(words), _named(skip or [])
    rows = [row for row in ROWS if (row.name in wanted or not words) and row.name not in unwanted]
    return [row for row in rows if bench or not row.name.startswith(BENCH)]


def _named(words: list[str]) -> set[str]:
    """The names that are one of these words, or, of words that are none, contain it."""
    names, found = [row.name for row in ROWS], set[str]()
    for word in words:
        word = word.replace(" ", "_")
        found.update([word] if word in names else [name for name in names if word in name])
    return found
