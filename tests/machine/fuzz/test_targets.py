"""Every target of the fuzzer, under hypothesis always and under atheris where it is installed.

RUNS says how many inputs atheris tries for each target; `make fuzz` gives it more.
"""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.machine.fuzz.frames import Frames
from tests.machine.fuzz.targets import TARGETS, seeds
from transferd.config import CacheSection, Config, from_tree, to_tree
from transferd.errors import ConfigError

ROOT = Path(__file__).parents[3]
RUNS = int(os.environ.get("RUNS", "8000"))

each_target = pytest.mark.parametrize("name", TARGETS)


@each_target
@given(data=st.binary(max_size=400))
def test_any_bytes(name: str, data: bytes) -> None:
    TARGETS[name](data)


@each_target
def test_good_inputs_and_damaged_ones(name: str) -> None:
    chance = random.Random(name)
    for seed in seeds(name):
        TARGETS[name](seed)
        for _ in range(200):
            damaged = bytearray(seed)
            for _ in range(chance.choice((1, 1, 4))):
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            TARGETS[name](bytes(damaged))
            TARGETS[name](seed[: chance.randrange(len(seed))])


@each_target
@pytest.mark.parametrize("trap", [b"\x91" * 10_000, b"\x81\xa1a" * 10_000, b"[" * 10_000, b"\xdd\xff\xff\xff\xff"])
def test_nesting_and_sizes_without_end(name: str, trap: bytes) -> None:
    for seed in (b"", *seeds(name)):
        TARGETS[name](seed + trap)
        TARGETS[name](seed[:12] + trap)


def test_what_the_attacker_of_the_socket_sends() -> None:
    frames = Frames(0)
    for _ in range(5000):
        TARGETS["request"](frames.draw())


# --- configuration, by its structure ----------------------------------------------------------------

_SECTIONS: dict[str, Any] = to_tree(Config(cache=CacheSection()))
_values = st.one_of(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    st.sampled_from(["64MiB", "1e400TiB", "-1", "0", "", "ipc://", "tcp://*:1", "nan", 2**70, -1, 0, 0.0, 1e308]),
    st.lists(st.integers(-2, 5) | st.text(max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def _section(values: Any) -> st.SearchStrategy[Any]:
    keys = st.sampled_from([*values, "unknown"])
    return st.dictionaries(keys, _values, max_size=3)


_trees = st.fixed_dictionaries({}, optional={name: _section(values) | _values for name, values in _SECTIONS.items()})


@settings(max_examples=500)
@given(_trees)
def test_any_tree_is_a_configuration_or_one_line_that_says_why_not(tree: dict[str, Any]) -> None:
    try:
        accepted = from_tree(tree)
    except ConfigError as refused:
        key, told = refused.key, str(refused)
    else:
        assert from_tree(to_tree(accepted)) == accepted
        return
    assert key
    assert told.isprintable()


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris (extra: fuzz) is not installed")
@pytest.mark.timeout(0 if RUNS > 100_000 else 300)
@each_target
def test_atheris_finds_nothing(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.machine.fuzz.run",
            name,
            f"-runs={RUNS}",
            f"-artifact_prefix={tmp_path}/",
            "-seed=1",
        ],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},  # libFuzzer ends the process, which leaves its corpus behind
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert f"Done {RUNS}" in done.stderr
