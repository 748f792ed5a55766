"""How copies share the GPU: what is measured wins, MPS leaves room, and no DMA is long."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from transferd.tiers.cuda import tuning
from transferd.tiers.cuda.driver import DeviceInfo
from transferd.tiers.cuda.kernel import shortened
from transferd.tiers.cuda.tuning import Tuning, mps_runs, tuning_for

H100 = DeviceInfo(0, "NVIDIA H100 80GB HBM3", "0" * 32, "0000:17:00.0", (9, 0), multiprocessors=132)


def test_under_mps_most_of_the_gpu_is_the_engines_and_without_it_the_kernel_hurries() -> None:
    assert tuning_for(H100, mps=True).grid == 44
    assert tuning_for(H100, mps=False).grid == 264


def test_measured_figures_override_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Tuning(grid=7, dma_most=2)
    monkeypatch.setitem(tuning.MEASURED, (H100.capability, True), measured)
    assert tuning_for(H100, mps=True) is measured
    assert tuning_for(H100, mps=False).grid == 264


def test_mps_is_seen_where_its_control_daemon_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert not mps_runs()
    (tmp_path / "control").touch()
    assert mps_runs()


@pytest.mark.parametrize("most", [1, 7, 100, 1 << 20])
def test_long_runs_become_dmas_of_bounded_length_that_move_the_same_bytes(most: int) -> None:
    runs = np.array([[0, 1000, 100], [500, 5, 1], [200, 300, 250]], dtype=np.int64)
    pieces = shortened(runs, most)
    assert pieces[:, 2].max() <= max(most, 1)
    expected = [(at + i, to + i) for at, to, nbytes in runs.tolist() for i in range(nbytes)]
    assert [(at + i, to + i) for at, to, nbytes in pieces.tolist() for i in range(nbytes)] == expected
    assert pieces.flags.c_contiguous
