"""`make bench-peers`: its arithmetic, and what becomes of a peer that is missing, fails, dies, hangs or lies."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import table
from benchmarks.peers import driver
from benchmarks.peers.driver import Found, Gone, Group, Peer, Process
from benchmarks.peers.program import POISON, Contents

ROUNDS = 2
PROGRAM = """
import json, subprocess, sys, time

what, directory = sys.argv[1], ""
for line in sys.stdin:
    asked = json.loads(line)
    if asked["do"] == what and asked.get("round", 1) == 1:
        if sys.argv[2] == "dies":
            sys.exit("no more\\nof this")
        if sys.argv[2] == "fails":
            print(json.dumps({"error": "OSError: a disk | that\\nis full"}), flush=True)
            continue
        if sys.argv[2] == "hangs":
            time.sleep(600)
        if sys.argv[2] == "starts":
            subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], pass_fds=[int(sys.argv[3])])
    if asked["do"] == "prepare":
        directory = asked["directory"]
    if asked["do"] == "store" and directory:
        open(f"{directory}/{asked['round']}", "w").write("an object")
    answer = {"version": "9", "seconds": 0.5, "wrong": 0}
    if asked["do"] == what and sys.argv[2] == "lies":
        answer["wrong"] = 3
    print(json.dumps(answer), flush=True)
"""


def own() -> tuple[str, str]:
    return sys.executable, ""


def fake(name: str, what: str = "nothing", how: str = "") -> Peer:
    return Peer(name, ("-S", "-c", PROGRAM, what, how), own)


def measured(group: Group, place: Path) -> dict[str, dict[str, Any]]:
    found = driver.run(group, place, ROUNDS, 2, 2**20, lambda _: None)
    return {row["name"]: row for row in driver.rows(group, found, 2 * 2**20)}


def test_a_peer_without_figures_is_a_row_that_says_why_and_the_others_go_on(tmp_path: Path) -> None:
    missing = Peer("missing", (), lambda: ("", "pip install it failed:\nno such package"))
    bad = [fake("dies", "load", "dies"), fake("fails", "store", "fails"), fake("lies", "check", "lies")]
    never = fake("never starts", "prepare", "fails")
    rows = measured(Group("files", [fake("plain"), *bad, missing, never, fake("good")]), tmp_path)
    assert {name: row.get("why_not") for name, row in rows.items()} == {
        "plain": None,
        "dies": "round 1: it ended with 1: of this",
        "fails": "round 1: store: OSError: a disk / that is full",
        "lies": "round 0: it returned wrong bytes in 3 blocks",
        "missing": "cannot be installed: pip install it failed: no such package",
        "never starts": "prepare: OSError: a disk / that is full",
        "good": None,
    }
    assert rows["good"]["store"]["ratios"] == [1.0] * ROUNDS


def test_peers_leave_their_files_empty_because_freed_inodes_slow_the_next_group_down(tmp_path: Path) -> None:
    measured(Group("files", [fake("plain"), fake("dies", "load", "dies")]), tmp_path)
    left = {str(path.relative_to(tmp_path)): path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"warm": 0, "peer-0/0": 0, "peer-0/1": 0, "peer-0/2": 0, "peer-1/0": 0, "peer-1/1": 0}


def test_without_its_limit_a_group_has_no_ratios(tmp_path: Path) -> None:
    rows = measured(Group("files", [fake("plain", "store", "dies"), fake("good")]), tmp_path)
    assert rows["good"]["why_not"] == "the limit, plain, has no figures"


def test_a_peer_that_hangs_is_given_up(tmp_path: Path) -> None:
    process = Process(sys.executable, fake("", "store", "hangs").command, tmp_path / "peer")
    with pytest.raises(Gone, match=r"no answer to store within 0\.05 s"):
        process.ask("store", 0.05, round=1)
    process.stop(0.05)


def test_what_a_peer_started_ends_with_it_and_its_cpu_counts(tmp_path: Path) -> None:
    read, write = os.pipe()
    program = ("-S", "-c", PROGRAM, "store", "starts", str(write))
    os.set_inheritable(write, True)
    process = Process(sys.executable, program, tmp_path / "peer", pass_fds=[write])
    os.close(write)
    process.ask("store", round=1)
    assert len(driver.tree_of(process.pid)) == 2
    process.stop(0.05)
    assert os.read(read, 1) == b""  # its child held the other end
    os.close(read)


def test_the_cpu_clock_of_a_process_is_the_one_it_sees_itself() -> None:
    before = time.process_time()
    seen = driver.cpu_of(os.getpid())
    assert before <= seen <= time.process_time()
    assert driver.tree_of(os.getpid())[0] == os.getpid()


def test_ratios_are_of_each_round_and_more_is_better_for_blocks_and_worse_for_tasks() -> None:
    limit, ours = Found(fake("plain")), Found(fake("transferd"))
    for what in ("store", "load", "task"):
        limit.seconds[what], limit.cpu[what] = [1.0, 2.0, 4.0], [1.0, 1.0, 1.0]
        ours.seconds[what], ours.cpu[what] = [2.0, 2.0, 2.0], [3.0, 1.0, 2.0]
    row = driver.rows(Group("files", []), [limit, ours], 4 * 10**9)[1]
    assert row["store"] == {
        "ratio": 1.0,
        "spread": 1.5,
        "ratios": [0.5, 1.0, 2.0],
        "GB/s": 2.0,
        "CPU s/GB": 0.5,
    }
    row = driver.rows(Group("tasks", [], calls=10), [limit, ours], 0)[1]
    assert row["task"] == {"ratio": 1.0, "spread": 1.5, "ratios": [2.0, 1.0, 0.5], "us": 2e6, "CPU us": 2e6}


def test_the_table_has_the_ratio_first_and_every_row_as_many_cells() -> None:
    limit, ours, gone = Found(fake("plain"), "1"), Found(fake("transferd"), "2"), Found(fake("gone"), why_not="dead")
    for found in (limit, ours):
        for what in ("store", "load", "task"):
            found.seconds[what], found.cpu[what] = [0.5], [0.25]
    rows = [
        *driver.rows(Group("files", []), [limit, ours, gone], 10**9),
        *driver.rows(Group("tasks", [], calls=1), [limit, ours, gone], 0),
    ]
    where = {"cpu": "C", "cores": 2, "kernel": "6", "python": "3.11", "load_1min_before": 1.0, "load_1min_after": 2.0}
    tree = {"bench": "peers", "machine": where, "rounds": 1, "blocks": 2, "block_bytes": 2**20, "rows": rows}
    lines = table.table(tree).splitlines()
    assert "| **transferd** | 1.00 (spread 0%) | 1.00 (spread 0%) | 0.25 | 0.25 | 2.00 | 2.00 | no | 2 |" in lines
    assert "| **transferd** | 1.00 (spread 0%) | 500,000 | 250,000 | 2 |" in lines
    assert "| gone | — dead | | | | | | | |" in lines
    for part in ("\n".join(lines).split("**Files**")[1].split("**Tasks**")[0], "\n".join(lines).split("**Tasks**")[1]):
        assert len({line.count("|") for line in part.splitlines() if line}) == 1


def test_the_table_says_how_often_transferd_was_ahead_of_each_peer_in_the_same_round() -> None:
    limit, ours, theirs, gone = (
        Found(fake("plain")),
        Found(fake("transferd")),
        Found(fake("theirs")),
        Found(fake("gone")),
    )
    gone.why_not = "dead"
    timed: list[tuple[Found, list[float], list[float]]] = [
        (limit, [1, 1, 1], [1, 1, 1]),
        (ours, [1, 2, 4], [2, 2, 2]),
        (theirs, [2, 3, 2], [1, 2, 1]),
    ]
    for found, store, load in timed:
        found.seconds["store"], found.seconds["load"] = store, load
        found.cpu["store"], found.cpu["load"] = [1.0] * 3, [1.0] * 3
    where = {"cpu": "C", "cores": 2, "kernel": "6", "python": "3.11", "load_1min_before": 1.0, "load_1min_after": 2.0}
    tree = {"bench": "peers", "machine": where, "rounds": 3, "blocks": 2, "block_bytes": 2**20}
    tree["rows"] = driver.rows(Group("files", []), [limit, ours, theirs, gone], 10**9)
    rounds = table.table(tree).partition("| round by round | × theirs |")[2].splitlines()
    assert rounds[2:] == [
        "| **transferd**, store | 1.50 (ahead in 2 of 3) |",
        "| **transferd**, load | 0.50 (ahead in 0 of 3) |",
    ]
    tree["rows"] = driver.rows(Group("files", []), [limit, ours, gone], 10**9)
    assert "round by round" not in table.table(tree)


def test_wrong_bytes_are_seen_wherever_they_are() -> None:
    areas = [np.zeros((3, 4096), np.uint8), np.zeros((3, 8192), np.uint8)]
    contents = Contents(areas)
    contents.fill(7)
    assert contents.wrong(7) == 0
    assert contents.wrong(8) == 3
    areas[1][2, 8191] ^= 1
    assert contents.wrong(7) == 1
    areas[0][[0, 1]] = areas[0][[1, 0]]
    assert contents.wrong(7) == 3
    contents.poison()
    assert {int(byte) for part in areas for byte in np.unique(part)} == {POISON}
