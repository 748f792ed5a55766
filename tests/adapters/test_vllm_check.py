"""The adapter under vLLM's own scheduler, on a machine that has vLLM."""

from __future__ import annotations

import pytest

from tests.machine.with_vllm import check


@pytest.mark.one_loop
@pytest.mark.timeout(600)
def test_a_few_runs_under_vllm_itself() -> None:
    python = check.found()
    if not python:
        needs = f"{check.ROOM >> 30} GiB and minutes, which a run of the tests does not have"
        where = f"`make vllm-check` installs it, or {check.PYTHON_VARIABLE} names a Python that has it"
        pytest.skip(f"no vLLM here; it needs {needs}: {where}")
    assert check.tests(python, *check.SMOKE)
