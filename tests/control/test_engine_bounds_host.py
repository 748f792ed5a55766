"""One budget of host memory for all engines, a quota for each; what does not fit is refused before it is allocated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transferd.control.engine_bounds import HostBudget
from transferd.errors import RequestError, TransferError
from transferd.observability.report import BudgetReport


def test_an_engine_beyond_its_quota_can_never_have_it() -> None:
    budget = HostBudget(100, 40)
    with pytest.raises(
        RequestError, match=r"'e' needs 41 bytes .* one may have 40 \(engines.host_memory_each\)"
    ) as told:
        budget.book("e", "e", 41)
    assert told.value.reason == "no_room"
    assert budget.taken == 0


def test_a_refusal_for_host_memory_names_the_bytes_that_are_left() -> None:
    budget = HostBudget(100)
    budget.book("a", "a", 70)
    with pytest.raises(
        TransferError, match=r"'b' needs 31 bytes .* 30 are left of 100 .*\(engines.host_memory\)"
    ) as told:
        budget.book("b", "b", 31)
    assert not isinstance(told.value, RequestError), "it may fit when another has left"
    budget.give_back("a")
    budget.book("b", "b", 31)
    assert budget.statistics() == BudgetReport(most=100, each=100, taken=31, left=69)


def test_a_quota_is_no_more_than_the_budget() -> None:
    assert HostBudget(100, 500).each == 100


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60), st.booleans())), st.integers(0, 100))
def test_the_sum_never_passes_the_budget(steps: list[tuple[int, int, bool]], each: int) -> None:
    budget, held = HostBudget(100, each), dict[int, int]()
    for holder, nbytes, leaves in steps:
        if leaves:
            budget.give_back(holder)
            held.pop(holder, None)
        elif holder not in held:
            try:
                budget.book(holder, f"e{holder}", nbytes)
            except TransferError:
                assert nbytes > budget.left or nbytes > budget.each
            else:
                held[holder] = nbytes
        assert budget.taken == sum(held.values()) <= 100
        assert all(nbytes <= budget.each for nbytes in held.values())
