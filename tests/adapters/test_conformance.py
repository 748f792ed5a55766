"""The conformance script: adapters that are right pass it, and for each check there is an adapter that does not."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.own_adapter import Tried, make
from tests.support import fake_sglang
from tests.support.tried import TriedFakeSglang, TriedMooncake
from transferd.adapters import conformance
from transferd.adapters.conformance import CHECKS, Bench, Trial
from transferd.client.sync_client import SyncClient

pytestmark = pytest.mark.one_loop

ROOT = Path(__file__).parents[2]
Check = Callable[[Bench], None]


@pytest.fixture(autouse=True)
def suspended_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load has 5 s, and its client takes the daemon for lost before that; by itself, the script waits for longer."""
    monkeypatch.setattr(conformance, "SUSPENDED_S", 9.0)


@pytest.fixture(scope="module")
def sglang() -> Iterator[None]:
    with fake_sglang.installed():
        yield


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_example_is_fit(check: Check) -> None:
    assert conformance.run(make, check) == ""


@pytest.mark.usefixtures("sglang")  # the others on SGLang's own host pool: make sglang-check
@pytest.mark.parametrize("check", [conformance.bytes_and_masks, conformance.daemon_is_suspended])
def test_sglangs_adapter_is_fit(check: Check) -> None:
    assert conformance.run(TriedFakeSglang, check) == ""


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_mooncakes_interface_is_fit(check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert conformance.run(TriedMooncake, check) == ""


class ByCount(Tried):
    """Takes the number of loaded blocks for the first ones."""

    def load(self, keys: Sequence[str], blocks: Sequence[int]) -> list[bool]:
        loaded = super().load(keys, blocks)
        return sorted(loaded, reverse=True)


class Hasty(Tried):
    """Gives up a load after a while, though its blocks are not free."""

    def load(self, keys: Sequence[str], blocks: Sequence[int]) -> list[bool]:
        loaded: list[list[bool]] = []
        patient = super().load
        load = threading.Thread(target=lambda: loaded.append(patient(keys, blocks)), daemon=True)
        load.start()
        load.join(2.0)
        return loaded[0] if loaded else [False] * len(keys)


class Careless(Tried):
    """Raises if a block is not stored."""

    def store(self, keys: Sequence[str], blocks: Sequence[int]) -> list[bool]:
        stored = super().store(keys, blocks)
        if not all(stored):
            raise OSError("not stored")
        return stored


class Forgetful(Tried):
    """Keys of another life are other keys."""

    lives = itertools.count()

    def __init__(self, trial: Trial) -> None:
        super().__init__(trial)
        self.salt = f"{next(self.lives)}-"

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return super().exists([self.salt + key for key in keys])

    def store(self, keys: Sequence[str], blocks: Sequence[int]) -> list[bool]:
        return super().store([self.salt + key for key in keys], blocks)

    def load(self, keys: Sequence[str], blocks: Sequence[int]) -> list[bool]:
        return super().load([self.salt + key for key in keys], blocks)


class Lasting(Tried):
    """Remembers what it has seen, and does not ask again."""

    def __init__(self, trial: Trial) -> None:
        super().__init__(trial)
        self.seen: set[str] = set()

    def store(self, keys: Sequence[str], blocks: Sequence[int]) -> list[bool]:
        stored = super().store(keys, blocks)
        self.seen.update(key for key, one in zip(keys, stored, strict=True) if one)
        return stored

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return [key in self.seen for key in keys]


class Trusting(Tried):
    """Takes every load of a block that is there for a good one."""

    def load(self, keys: Sequence[str], blocks: Sequence[int]) -> list[bool]:
        there = self.exists(keys)
        super().load(keys, blocks)
        return there


class Wordy(Tried):
    """Refuses private memory in several lines."""

    def __init__(self, trial: Trial) -> None:
        if trial.private:
            raise ValueError("this memory is private\nand nobody says what to do")
        super().__init__(trial)


def weightless(trial: Trial) -> Tried:
    """Its fingerprint does not have the weights."""
    return Tried(Trial(trial.endpoint, trial.name, trial.model, trial.generation))


class Needy(Tried):
    """Does not start without a daemon."""

    def __init__(self, trial: Trial) -> None:
        super().__init__(trial)
        if not self.link.ready:
            raise ConnectionError("no daemon")


UNFIT: list[tuple[Any, Check, str]] = [
    (ByCount, conformance.bytes_and_masks, "never stored"),
    (Forgetful, conformance.engine_restarts, "load has answered"),
    (Lasting, conformance.daemon_restarts, "without a daemon"),
    (Careless, conformance.daemon_is_killed, "has raised OSError"),
    (Hasty, conformance.daemon_is_suspended, "later the daemon has written"),
    (Lasting, conformance.answers_in_time, "without the daemon"),
    (Needy, conformance.no_daemon, "the start has raised ConnectionError"),
    (Trusting, conformance.damage, "other bytes"),
    (weightless, conformance.fingerprint, "another weights"),
    (Wordy, conformance.private_memory, "not one line"),
]


@pytest.mark.parametrize(("adapter", "check", "wrong"), UNFIT, ids=lambda one: getattr(one, "__name__", ""))
def test_an_adapter_that_is_wrong_is_found(adapter: Any, check: Check, wrong: str) -> None:
    assert wrong in conformance.run(adapter, check)


def test_a_stranger_who_is_let_in_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon refuses strangers; so this one has the token, as from an adapter that gives it away."""
    tokens: list[str] = []
    entered = Tried.__init__

    def given_away(self: Tried, trial: Trial) -> None:
        entered(self, trial)
        assert self.link._client is not None
        tokens.append(self.link._client.token)

    class Thief(SyncClient):
        def __init__(self, endpoint: str, **more: Any) -> None:
            super().__init__(endpoint, token=tokens[0] if more.get("engine") else "", **more)

    monkeypatch.setattr(Tried, "__init__", given_away)
    monkeypatch.setattr(conformance, "SyncClient", Thief)
    assert "a stranger" in conformance.run(make, conformance.belonging)


def test_the_command_says_what_passed_and_its_exit_code_says_whether_all_did() -> None:
    command = [sys.executable, "-m", "transferd.adapters.conformance"]

    def done(*given: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *given], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)

    good = done("examples.own_adapter:make", "--only", "bytes_and_masks")
    assert (good.returncode, good.stdout.split()[:2]) == (0, ["passed", "bytes_and_masks:"]), good.stderr
    bad = done("tests.adapters.test_conformance:ByCount", "--only", "bytes_and_masks")
    assert (bad.returncode, bad.stdout.split()[:2]) == (1, ["FAILED", "bytes_and_masks:"]), bad.stderr
    for wrong in ("nobody.knows:make", "examples.own_adapter", "examples.own_adapter:nobody"):
        assert done(wrong).returncode == 2
