"""Codes: every one has a name, and the groups that decisions hang on do not contradict each other."""

from __future__ import annotations

from transferd.storage.mooncake import error_codes
from transferd.storage.mooncake.error_codes import (
    NAMES,
    NO_ANSWER,
    NO_AVAILABLE_HANDLE,
    NOT_THERE,
    OVERTAKEN,
    SETTLED,
    TRANSFER_FAIL,
)


def test_a_code_is_described_by_name_and_number_and_an_unknown_one_by_number() -> None:
    assert error_codes.describe(-704) == "OBJECT_NOT_FOUND, -704"
    assert error_codes.describe(-4711) == "code -4711"


def test_every_code_in_a_group_has_a_name() -> None:
    for group in (NO_ANSWER, NOT_THERE, OVERTAKEN, SETTLED):
        assert group <= NAMES.keys()


def test_the_groups_do_not_contradict_each_other() -> None:
    assert not NO_ANSWER & (NOT_THERE | OVERTAKEN), "an answer is not the lack of one"
    assert NO_AVAILABLE_HANDLE not in OVERTAKEN | NOT_THERE, "full is neither stored nor missing"
    assert TRANSFER_FAIL not in SETTLED, "a failed transfer may leave bytes on their way"


def test_codes_without_an_answer_leave_no_transfer() -> None:
    assert NO_ANSWER | NOT_THERE | {NO_AVAILABLE_HANDLE} <= SETTLED
