"""Engines with facts about their models, on one real daemon in a process of its own, over one store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.own_memory import read, write
from transferd import Engine, Pages, RequestError, Status, SyncClient, shm_pages
from transferd.client.launch import DaemonProcess, running
from transferd.runtime.compat import Self
from transferd.tiers.offered import DIRECTORY

LAYERS, PAGE, BLOCKS = 2, 4096, 8
KEYS = ["k0", "k1", "k2"]
SECTIONS: dict[str, Any] = {"host": {"staging": "1MiB"}, "metrics": {"listen": ""}}


class Own:
    """An engine of one rank with memory of its own; its blocks hold bytes of its seed until it loads others."""

    def __init__(self, daemon: DaemonProcess, name: str, seed: int, **more: Any) -> None:
        self.name, self._file = name, DIRECTORY / f"fingerprints-{os.getpid()}-{name}"
        self._file.write_bytes(bytes(LAYERS * BLOCKS * PAGE))
        self.blocks = np.memmap(self._file, np.uint8, "r+", shape=(LAYERS, BLOCKS, PAGE))
        self.blocks[:] = np.random.default_rng(seed).integers(0, 256, self.blocks.shape, dtype=np.uint8)
        self.client = SyncClient(daemon.endpoint, engine=name, await_ready=False)
        self.client.connect()
        layout = Pages(layers=LAYERS, page_bytes=PAGE, blocks=BLOCKS, identity="test")
        facts: dict[str, Any] = {"ranks": 1, "model": "m", "layout": layout} | more
        self.client.register(Engine(**facts))
        self.client.offer(0, shm_pages(self._file.name, [(layer * BLOCKS * PAGE, PAGE) for layer in range(LAYERS)]))
        self.client.wait_ready(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.unregister()
        self.client.close()
        self._file.unlink()

    def store(self) -> bytes:
        assert self.client.submit(write(f"w-{self.name}", KEYS, [0, 1, 2])).status is Status.OK
        return self.blocks[:, :3].tobytes()

    def load(self) -> bytes | None:
        """The bytes of the three blocks; None for a miss, which touches nothing."""
        self.blocks[:, 5:8] = 0
        assert self.client.match(KEYS) in (0, 3)
        result = self.client.submit(read(f"r-{self.name}-{os.urandom(4).hex()}", KEYS, [5, 6, 7]))
        found = self.blocks[:, 5:8].tobytes()
        if result.status is Status.MISS:
            assert not any(found)
            return None
        assert result.status is Status.OK
        return found


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with running(SECTIONS, tmp_path) as daemon:
        yield daemon


FACTS: dict[str, Any] = {"rope theta": 10000.0, "weights": "a", "layers": 2, "sliding": False, "kinds": ["x", 1]}
CHANGES: list[dict[str, Any]] = [
    {"rope theta": 1000000.0}, {"rope theta": 10000}, {"weights": "b"}, {"layers": 3}, {"sliding": 0},
    {"kinds": ["x", 2]}, {"kinds": [1, "x"]}, {"one more": ""},
]  # fmt: skip


def test_engines_that_differ_in_one_fact_never_share_and_others_do(daemon: DaemonProcess) -> None:
    with Own(daemon, "first", 1, fingerprint=FACTS) as first:
        stored = {"first": first.store()}
        with Own(daemon, "same", 2, fingerprint=dict(reversed(FACTS.items()))) as same:
            assert same.load() == stored["first"]
        for number, change in enumerate(CHANGES):
            with Own(daemon, f"other-{number}", number + 3, fingerprint=FACTS | change) as other:
                assert other.load() is None, change
                stored[other.name] = other.store()
                assert other.load() == stored[other.name]
        with Own(daemon, "none", 99) as bare:
            assert bare.load() is None
        assert first.load() == stored["first"]
    assert len(set(stored.values())) == 1 + len(CHANGES)


def test_facts_outlive_the_daemon(tmp_path: Path) -> None:
    stored = None
    for start in range(2):
        with running(SECTIONS, tmp_path) as daemon, Own(daemon, "e", start, fingerprint=FACTS) as engine:
            stored = stored or engine.store()
            assert engine.load() == stored
            with Own(daemon, "f", 7, fingerprint=FACTS | {"weights": "b"}) as other:
                assert other.load() is None


def test_the_engine_of_the_configuration_has_facts_too(tmp_path: Path) -> None:
    sections = SECTIONS | {"cache": {"ranks": 1, "device_blocks": 8, "host_blocks": 0, "layers": 2}}
    for weights, there in (("a", 0), ("a", 1), ("b", 0), ("", 0), ("a", 1)):
        named = sections | {"cache": sections["cache"] | ({"fingerprint": {"weights": weights}} if weights else {})}
        with running(named, tmp_path) as daemon, SyncClient(daemon.endpoint) as client:
            client.attach(0)
            assert client.match(["k"]) == there, weights
            if weights:
                client.submit(write("w", ["k"], [0]))
            facts = client.stats()["engines"]["default"]["fingerprint"]["facts"]
            assert facts == ({"weights": weights} if weights else {})


@pytest.mark.parametrize("wrong", [{"a": None}, {"a": {"b": 1}}, {"a": "x" * 20_000}, {f"{i}": i for i in range(65)}])
def test_facts_beyond_the_bounds_are_refused_by_the_client(daemon: DaemonProcess, wrong: dict[str, Any]) -> None:
    with SyncClient(daemon.endpoint, engine="e", await_ready=False) as client:
        layout = Pages(layers=LAYERS, page_bytes=PAGE, blocks=BLOCKS, identity="test")
        with pytest.raises(RequestError, match="fingerprint") as refused:
            client.register(Engine(ranks=1, model="m", layout=layout, fingerprint=wrong))
        assert refused.value.reason == "bad_value"
        with pytest.raises(RequestError, match="fingerprint"):  # and by the daemon
            client.register(Engine(ranks=1, model="m", layout={**layout.as_cache(), "fingerprint": wrong}))
        assert client.stats()["engines"] == {}


def test_a_second_registration_with_other_facts_is_refused(daemon: DaemonProcess) -> None:
    with Own(daemon, "e", 1, fingerprint=FACTS) as engine:
        layout = Pages(layers=LAYERS, page_bytes=PAGE, blocks=BLOCKS, identity="test")
        with pytest.raises(RequestError) as refused:
            engine.client.register(Engine(ranks=1, model="m", layout=layout, fingerprint=FACTS | {"weights": "b"}))
        assert refused.value.reason == "layout_mismatch"


def transferd(*command: str) -> str:
    done = subprocess.run([sys.executable, "-m", "transferd", *command], capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    return " ".join(done.stdout.split())


def test_an_engine_is_shown_in_words_and_two_are_compared(daemon: DaemonProcess) -> None:
    at = ("--endpoint", daemon.endpoint)
    ropes = {"rope theta": 1000000.0, "weights": "a"}
    with (
        Own(daemon, "a", 1, fingerprint=FACTS) as one,
        Own(daemon, "b", 2, fingerprint=FACTS | ropes),
        Own(daemon, "c", 3, fingerprint=FACTS, model="n"),
        Own(daemon, "d", 4, fingerprint=FACTS),
    ):
        shown = transferd("stats", "--engine", "a", *at)
        assert "rope theta 10000.0" in shown
        digest = one.client.stats()["engines"]["a"]["fingerprint"]["digest"]
        assert f"fingerprint {digest}" in shown
        told = json.loads(transferd("stats", "--engine", "a", "--format", "json", *at))
        assert told["fingerprint"]["facts"] == FACTS
        one.store()
        story = transferd("explain", "w-a", "--engine", "a", *at)
        assert "engine model m" in story
        assert "rope theta 10000" in story
        found = {one["name"]: one["found"] for one in json.loads(transferd("doctor", "--format", "json", *at))}
        assert found["a and b"] == "do not read each other's blocks: rope theta 10000.0 / 1000000.0"
        assert found["a and d"] == "read each other's blocks"
        assert "a and c" not in found
        asked = transferd("doctor", "--engine", "c", "--engine", "b", "--format", "json", *at)
        found = {one["name"]: one["found"] for one in json.loads(asked)}
        assert found["c and b"].endswith("model n / m; rope theta 10000.0 / 1000000.0")
        assert "a and b" not in found
        for verb in ("stats", "doctor"):
            done = subprocess.run(
                [sys.executable, "-m", "transferd", verb, "--engine", "nobody", *at],
                capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
            assert done.returncode == 2
            assert "nobody" in done.stderr
