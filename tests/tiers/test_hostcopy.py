"""The C function that executes copy plans beside its slow twin: both copy exactly the bytes of the plan."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.extension import compiled
from transferd.tiers import hostcopy
from transferd.tiers.hostcopy import copy_runs_python

SOURCE = Path(hostcopy.__file__).with_name("_copyruns.c")
MEMORY = 3 * 1024**2


@pytest.fixture(scope="module", params=["as installed", "without AVX2"])
def copy_runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if request.param == "as installed":
        if not hostcopy.NATIVE:
            pytest.skip("the installation found no compiler")
        return hostcopy.copy_runs
    return compiled(SOURCE, tmp_path_factory.mktemp("native"), "-DWITHOUT_AVX2").copy_runs


def drawn_runs(draw: random.Random, total: int, longest: int) -> np.ndarray:
    """Runs of `total` bytes altogether whose targets do not overlap, of any length and alignment, in any order."""
    lengths = []
    while total:
        lengths.append(min(total, draw.choice([1, 31, 32, 63, 64, 65, 1023, 1024, draw.randint(1, longest)])))
        total -= lengths[-1]
    gaps, at, runs = MEMORY - sum(lengths), 0, []
    for length in lengths:
        gap = draw.randint(0, min(gaps, 100))
        gaps, at = gaps - gap, at + gap
        runs.append((draw.randint(0, MEMORY - length), at, length))
        at += length
    draw.shuffle(runs)
    return np.array(runs, np.int64)


@settings(max_examples=30)
@given(total=st.sampled_from([1000, 1024**2 - 1, 1024**2, 2 * 1024**2]), seed=st.integers(0, 2**32))
def test_it_copies_the_bytes_of_the_plan_and_no_others(copy_runs: Any, total: int, seed: int) -> None:
    """Plans of 1 MiB and more are copied past the caches."""
    draw = random.Random(seed)
    runs = drawn_runs(draw, total, draw.choice([100, 5000, 300_000]))
    source = np.frombuffer(draw.randbytes(MEMORY), np.uint8)
    target, wanted = np.full(MEMORY, 7, np.uint8), np.full(MEMORY, 7, np.uint8)
    copy_runs(source.ctypes.data, target.ctypes.data, runs)
    copy_runs_python(source.ctypes.data, wanted.ctypes.data, runs)
    assert np.array_equal(target, wanted)
    for start, at, length in runs.tolist():
        wanted[at : at + length] -= source[start : start + length]
        assert not wanted[at : at + length].any()
    assert set(np.unique(wanted).tolist()) <= {0, 7}


def test_a_malformed_plan_is_refused(copy_runs: Any) -> None:
    for wrong in (np.zeros(3, np.int32), np.zeros(4, np.int64)):
        with pytest.raises(ValueError, match="int64"):
            copy_runs(0, 0, wrong)
    copy_runs(0, 0, np.zeros((0, 3), np.int64))
