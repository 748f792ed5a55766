"""The adapter under vLLM's own scheduler, on a machine that has vLLM."""

from __future__ import annotations

import pytest

from tests.with_vllm import check


@pytest.mark.one_loop
@pytest.mark.timeout(600)
def test_a_few_runs_under_vllm_itself() -> None:
    python = check.found()
    if not python:
        pytest.skip(f"no vLLM here: `make vllm-check SHORT=1` sets it up, or name a Python in {check.PYTHON_VARIABLE}")
    assert check.tests(python, *check.SMOKE)
