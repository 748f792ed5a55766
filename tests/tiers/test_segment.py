"""Shared memory: attached by others, gone with its owner, and never left behind by the dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from transferd.errors import TierError
from transferd.tiers.segment import DIRECTORY, PREFIX, Segment, attach_arrays, remove_stale_segments

OWNER = """
import sys
from transferd.tiers.segment import Segment
segment = Segment(sys.argv[1], 8192, create=True)
print("made", flush=True)
sys.stdin.read()
"""


def name(suffix: str) -> str:
    return f"{PREFIX}test.{os.getpid()}.{suffix}"


def owner(segment: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, segment], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "made\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_what_one_process_writes_another_sees() -> None:
    segment = Segment(name("shared"), 4096, create=True)
    data = {
        "name": segment.name,
        "nbytes": 4096,
        "arrays": [{"plane": "key", "layer": 0, "offset": 256, "shape": [2, 3], "dtype": "uint16"}],
    }
    code = f"from transferd.tiers.segment import attach_arrays; attach_arrays({data!r})['key'][0][1] = 77"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    array = attach_arrays(data)["key"][0]
    assert array.tolist() == [[0, 0, 0], [77, 77, 77]]
    assert array.dtype == np.uint16
    assert (DIRECTORY / segment.name).exists(), "an attaching process that ends takes nothing with it"
    segment.close()
    segment.close()
    assert not (DIRECTORY / segment.name).exists()
    assert array[1, 0] == 77, "a mapping outlives the name"


def test_segments_of_the_dead_are_removed_and_those_of_the_living_are_not() -> None:
    living, dead = owner(name("living")), owner(name("dead"))
    try:
        dead.send_signal(signal.SIGKILL)
        dead.communicate()
        assert (DIRECTORY / name("dead")).exists()
        removed = remove_stale_segments()
        assert name("dead") in removed
        assert name("living") not in removed
        assert (DIRECTORY / name("living")).exists()
    finally:
        end(living)
    assert name("living") in remove_stale_segments()


def test_a_name_in_use_is_refused_and_left_alone() -> None:
    segment = Segment(name("taken"), 4096, create=True)
    with pytest.raises(TierError, match="exists already"):
        Segment(name("taken"), 4096, create=True)
    assert (DIRECTORY / name("taken")).exists()
    segment.close()


def test_more_memory_than_there_is_is_an_error_and_not_a_signal_later() -> None:
    with pytest.raises(TierError, match="cannot allocate"):
        Segment(name("huge"), 2**46, create=True)
    assert not (DIRECTORY / name("huge")).exists()


@pytest.mark.parametrize("wrong", ["", "../etc/passwd", "transferd.nobody"])
def test_only_names_of_segments_are_attached(wrong: str) -> None:
    with pytest.raises(TierError):
        attach_arrays({"name": wrong, "nbytes": 1, "arrays": []})


def test_a_segment_that_is_too_small_is_refused() -> None:
    segment = Segment(name("small"), 4096, create=True)
    with pytest.raises(TierError, match="has 4096 bytes, 8192 are needed"):
        attach_arrays({"name": segment.name, "nbytes": 8192, "arrays": []})
    segment.close()


def test_others_files_are_not_ours_to_remove(tmp_path: Path) -> None:
    foreign = DIRECTORY / f"not-transferd-{os.getpid()}"
    foreign.write_bytes(b"x")
    try:
        remove_stale_segments()
        assert foreign.exists()
    finally:
        foreign.unlink()
