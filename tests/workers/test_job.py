"""The stop signal of a job, where a copy that waits on it is given up; parts that a daemon may not have."""

from __future__ import annotations

import contextvars

import pytest

from transferd.errors import InvariantError
from transferd.runtime.threads import noted
from transferd.workers.job import StopSignal, require


class Never:
    """Awaited, it never comes back."""

    def __await__(self):  # type: ignore[no-untyped-def]
        yield


async def never() -> None:
    await Never()


def test_a_forgotten_copy_is_collected_in_any_context(recwarn: pytest.WarningsRecorder) -> None:
    """A loop that ends with copies in flight leaves them to the collector, which runs wherever it likes."""
    stop = StopSignal()
    copying = stop.copied(never())
    contextvars.copy_context().run(copying.send, None)
    others: list[object] = []
    there = noted.set(others)  # type: ignore[arg-type]
    try:
        copying.close()
        assert noted.get() is others, "what another context notes is not ours to change"
    finally:
        noted.reset(there)
    assert not stop._copies
    assert not recwarn.list


def test_a_part_that_admission_should_have_asked_for_is_a_bug() -> None:
    assert require("") == "", "only None is no part"
    with pytest.raises(InvariantError, match="a tier this daemon does not have"):
        require(None)
