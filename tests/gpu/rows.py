"""Everything that is checked, in its order, and how long each row may take."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.gpu import beside, copies, daemon, environment, memory, ordering, processes, sharing, speeds, vllm
from tests.gpu.machine import Found, Machine

LIMIT_S = 90.0


@dataclass(frozen=True)
class Row:
    """A check, or a part of the benchmark. limit_s: what takes longer has hung."""

    name: str
    check: Callable[[Machine], Awaitable[str | Found]]
    limit_s: float = LIMIT_S

    @property
    def words(self) -> str:
        return self.name.replace("_", " ")


_CHECKS = (
    environment.the_environment,
    *copies.CHECKS,
    *memory.CHECKS,
    *processes.CHECKS,
    *ordering.CHECKS,
    *sharing.CHECKS,
    *daemon.CHECKS,
    *vllm.CHECKS,
    *beside.CHECKS,
)
# Last is what may lose the process's context, or hang in the driver (batches).
_DANGEROUS = (environment.a_lost_device_is_noticed, processes.an_engine_is_killed)
_LIMITS = {
    "vllm_saves_and_loads_behind_a_busy_stream": 150.0,
    "a_busy_neighbour_under_mps": 150.0,
    "the_best_settings_beside_a_busy_neighbour": 120.0,
}


def _of(checks: tuple[Callable[[Machine], Awaitable[str | Found]], ...]) -> tuple[Row, ...]:
    return tuple(Row(check.__name__, check, _LIMITS.get(check.__name__, LIMIT_S)) for check in checks)


ROWS: tuple[Row, ...] = (
    *_of(_CHECKS),
    *(Row(name, check, 150.0) for name, check in speeds.CHECKS.items()),
    *_of(_DANGEROUS),
    *(Row(name, check, 150.0) for name, check in speeds.LAST.items()),
)
BENCH = "bench_"


def chosen(words: list[str], *, bench: bool) -> list[Row]:
    """The rows that these words name: a whole name, or a part of several; all of them without words. In order."""
    wanted: set[str] = set()
    names = [row.name for row in ROWS]
    for word in words:
        word = word.replace(" ", "_")
        wanted.update([word] if word in names else [name for name in names if word in name])
    return [row for row in ROWS if (row.name in wanted or not words) and (bench or not row.name.startswith(BENCH))]
