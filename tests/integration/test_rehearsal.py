"""Prefill to decode on two nodes, as `transferd demo --pd` shows it, and over the conversation trace."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from transferd.cli.demo_pd import command
from transferd.cli.demo_pd.command import two_nodes
from transferd.cli.demo_pd.play import prompts
from transferd.cli.pool.master import master_executable
from transferd.cli.replay.trace import TraceRequest, read_trace

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "conversation_trace.jsonl"
REQUESTS = 60

needs_mooncake = pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed")


@needs_mooncake
def test_the_demo_hands_over_every_request_in_both_modes() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "transferd", "demo", "--pd", "--format", "json"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    report = json.loads(shown.stdout)
    assert set(report) == {"storage", "direct"}
    for mode in report.values():
        assert mode["requests"] == command.REQUESTS
        assert mode["blocks"] > 1000
        assert mode["incomplete_blocks"] > 100
        assert (mode["verify_failures"], mode["failures"], mode["errors"]) == (0, 0, [])


@needs_mooncake
@pytest.mark.skipif(not TRACE.exists(), reason="the conversation trace is not here")
@pytest.mark.parametrize("mode", command.MODES)
def test_the_conversation_trace_arrives_byte_for_byte(mode: str) -> None:
    (report,) = command.run(Console(quiet=True), read_trace(TRACE, REQUESTS), [mode])
    assert report.good, report.errors
    assert report.requests == REQUESTS
    assert report.incomplete_blocks > 0


def test_a_prompt_is_as_long_as_the_request_and_its_last_block_as_full() -> None:
    requests = [
        TraceRequest(hash_ids=(5, 6), input_length=512 + 256),
        TraceRequest(hash_ids=(5, 6), input_length=1024),
        TraceRequest(hash_ids=(5, 6, 7), input_length=1100),
    ]
    half, full, cut = prompts(requests, block_size=16, most=2)
    assert (len(half.tokens), half.contents, half.incomplete) == (24, [10, 13], True)
    assert (len(full.tokens), full.contents, full.incomplete) == (32, [10, 12], False)
    assert cut.tokens == full.tokens, "a sequence that is cut short ends in a full block"
    assert half.tokens == full.tokens[:24]


def test_two_nodes_leave_nothing_behind() -> None:
    with two_nodes() as network:
        pids = [part for node in (network.prefill, network.decode) for part in "".join(node.prefix).split("/")]
    assert not [pid for pid in pids if pid.isdigit() and Path(f"/proc/{pid}").exists()]
