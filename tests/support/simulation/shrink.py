"""A small story out of a failing one: leave out what the failure does not need, and say what is left.

Greedy: each reduction of the plan is tried and kept if the story still fails in the same way (the same
type of error, about the same thing). A story takes some tens of milliseconds, so some hundred tries
are affordable; `MAX_TRIES` bounds them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.support.simulation.judge import BrokenPromise
from tests.support.simulation.plan import Plan
from tests.support.simulation.story import live
from transferd.runtime.compat import BaseExceptionGroup

MAX_TRIES = 400


@dataclass(frozen=True, slots=True)
class Failure:
    """A plan whose story failed. kind: what failures of the same fault have in common. told: for people."""

    plan: Plan
    kind: str
    told: str

    def __str__(self) -> str:
        return f"{self.plan}\n{self.told}"


def attempt(plan: Plan) -> Failure | None:
    """Live the plan's story; None if nothing is wrong with it."""
    try:
        live(plan)
    except Exception as error:  # noqa: BLE001 - whatever a story raises is what it found
        return _failure(plan, error)
    return None


def shrink(failure: Failure, tries: int = MAX_TRIES) -> Failure:
    """The smallest failure of the same kind that greedy reduction finds within so many tries."""
    smallest, progress = failure, True
    while progress:
        progress = False
        for plan in smallest.plan.reductions():
            if not tries:
                return smallest
            tries -= 1
            smaller = attempt(plan)
            if smaller is not None and smaller.kind == failure.kind:
                smallest, progress = smaller, True
                break
    return smallest


def _failure(plan: Plan, error: Exception) -> Failure:
    first: BaseException = error
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    what = first.what if isinstance(first, BrokenPromise) else str(first)
    notes = [note for part in dict.fromkeys((first, error)) for note in getattr(part, "__notes__", ())]
    function, line = _where(first)
    told = "\n".join((f"{type(first).__name__}: {first}", f"  raised in {function} ({line})", *notes))
    return Failure(plan, f"{type(first).__name__} in {function}: {_shape(what)}", told)


def _where(error: BaseException) -> tuple[str, str]:
    """The function that raised it, and the file and line."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return "nothing", "nowhere"
    code = traceback.tb_frame.f_code
    return getattr(code, "co_qualname", code.co_name), f"{code.co_filename.rpartition('/')[2]}:{traceback.tb_lineno}"


def _shape(text: str) -> str:
    """The beginning of a message without its numbers and names."""
    return re.sub(r"[0-9a-f]{8,}|\d+|'[^']*'", "_", text.partition("\n")[0])[:60]
