"""Sixteen engines in four processes on a daemon in a process of its own; one of these processes is killed."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.machine.faults.world import ROOT
from tests.support.waits import wait_until
from transferd import SyncClient
from transferd.client.launch import start

pytestmark = pytest.mark.one_loop

PROCESSES, EACH = 4, 4
NAMES = [f"e{number:02}" for number in range(PROCESSES * EACH)]
ROUNDS = 2  # that each engine has done before the kill, and does after it
WITHIN_S = 60.0
PAUSE_S = "0.25"  # between rounds


class Process:
    """Some engines in a process (tests/machine/faults/bystander.py). The neighbour of each is in the next one."""

    def __init__(self, endpoint: str, directory: Path, number: int) -> None:
        self.names = NAMES[number * EACH : (number + 1) * EACH]
        self._journal = directory / f"process-{number}.jsonl"
        self._journal.touch()
        pairs = [f"{name}:{NAMES[(NAMES.index(name) + EACH) % len(NAMES)]}" for name in self.names]
        command = [
            sys.executable,
            "-m",
            "tests.machine.faults.bystander",
            endpoint,
            str(self._journal),
            PAUSE_S,
            *pairs,
        ]
        with (directory / f"process-{number}.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=ROOT)

    def rounds(self) -> dict[str, list[Any]]:
        """For each engine, what it was told in its rounds so far."""
        rounds: dict[str, list[Any]] = {name: [] for name in self.names}
        for line in self._journal.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                event = json.loads(line)
                rounds[event["engine"]].append(event["told"])
        return rounds

    def kill(self) -> None:
        """SIGKILL, unless it has ended; then clean up."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def end(self) -> int:
        """Close its standard input; its exit code."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            return self._process.wait(WITHIN_S)
        finally:
            self.kill()


def all_have(processes: list[Process], more: int, than: dict[str, int]) -> Callable[[], bool]:
    def have() -> bool:
        done = {name: len(rounds) for process in processes for name, rounds in process.rounds().items()}
        return all(count >= than.get(name, 0) + more for name, count in done.items())

    return have


def test_engines_of_other_processes_do_not_notice_that_four_were_killed(tmp_path: Path) -> None:
    tree = {"storage": {"backend": "memory"}, "host": {"staging": "64KiB"}, "server": {"client_timeout": 2.5}}
    with contextlib.ExitStack() as stack:
        daemon = start(tree, tmp_path, wait=False)
        stack.callback(daemon.stop)
        processes = [Process(daemon.endpoint, tmp_path, number) for number in range(PROCESSES)]
        for process in processes:
            stack.callback(process.kill)
        wait_until(all_have(processes, ROUNDS, {}), "all engines are at work", within=WITHIN_S)
        with SyncClient(daemon.endpoint, engine=NAMES[-1], await_ready=False) as client:
            stats = client.stats()
            assert sorted(stats["engines"]) == NAMES
            assert len({engine["fingerprint"]["digest"] for engine in stats["engines"].values()}) == 1
            killed, *others = processes
            killed.kill()
            before = {name: len(rounds) for process in others for name, rounds in process.rounds().items()}
            gone = set(killed.names)
            wait_until(
                lambda: not gone & set(client.stats()["engines"]), "the killed engines are given up", within=WITHIN_S
            )
            wait_until(lambda: not client.stats()["engines_leaving"], "their memory is unmapped", within=WITHIN_S)
            wait_until(all_have(others, ROUNDS, before), "the others go on", within=WITHIN_S)
            stats = client.stats()
            assert sorted(stats["engines"]) == sorted(set(NAMES) - gone)
            assert len(stats["ranks"]) == 2 * len(stats["engines"])
            assert not any(stats["engines"][name]["missing"] for name in stats["engines"])
        for process in others:
            for name, rounds in process.rounds().items():
                for told in rounds:
                    assert all(right for *_, right in told), (name, told)
                    wrong = [one for one in told if one[1] != "ok" and one[:2] != ["neighbour", "miss"]]
                    assert not wrong, (name, wrong)
                assert rounds[-1][-1][:2] == ["neighbour", "ok"], "what another process stored, the killed one too"
        assert [process.end() for process in others] == [0] * len(others)
        assert daemon.stop() == 0
