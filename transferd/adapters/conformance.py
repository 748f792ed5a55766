"""Checks an adapter: it stores and loads while the daemon under it is restarted, suspended and killed. Compares bytes.

    python -m transferd.adapters.conformance MODULE:FACTORY [--only CHECK …]

FACTORY takes a `Trial` and returns a `Tried`: the adapter with a small engine around it (examples/own_adapter.py).
Each check starts daemons of its own in a temporary directory; the daemon stores files. Prints a line for each check.
Exits with 0 if the adapter passes all of them, 1 if not, 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import itertools
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from transferd.client.launch import DaemonProcess, start
from transferd.client.sync_client import SyncClient
from transferd.errors import TransferError
from transferd.tasks import ReadStorageTask, Status

LOOK_S = 0.02
ANSWER_S = 60.0  # a call of the adapter that takes longer is taken to hang
LOOKUP_S = 15.0  # the longest look-up without an answer, because an engine's request waits for it
SUSPENDED_S = 20.0  # a load that returns by then has been given up: the daemon is suspended
USED_AGAIN_S = 60.0  # for the adapter to use a daemon that has come back
KEYS = 12
STALE, OTHERS = 0xA5, 0x5A  # fill blocks: before a load, and by the engine after it


@dataclass(frozen=True, slots=True)
class Trial:
    """What the adapter is to be made with.

    endpoint: the daemon's.
    name: the engine's.
    model, generation, weights: what it serves.
    timeout: seconds for a transfer.
    start_timeout: how many seconds the start waits for a daemon.
    private: the engine's memory cannot be mapped by others; raise NotImplementedError if there is no such engine.
    """

    endpoint: str
    name: str = "tried"
    model: str = "model-1"
    generation: str = ""
    weights: str = "weights-1"
    timeout: float = 20.0
    start_timeout: float = 30.0
    private: bool = False

    def settings(self) -> dict[str, Any]:
        """As an operator gives them to an adapter on `CommonSettings`."""
        names = ("endpoint", "name", "generation", "weights", "timeout", "start_timeout")
        return {name: getattr(self, name) for name in names}


class Tried(Protocol):
    """An adapter and its engine. Keys are hex digits, 64 at most. A call returns when the blocks are free again."""

    @property
    def blocks(self) -> int:
        """How many blocks the engine has; at least 24."""
        ...

    @property
    def block_bytes(self) -> int: ...
    def fill(self, block: int, content: bytes) -> None: ...
    def read(self, block: int) -> bytes: ...
    def exists(self, keys: Sequence[str]) -> list[bool]: ...
    def store(self, keys: Sequence[str], blocks: Sequence[int]) -> list[bool]: ...
    def load(self, keys: Sequence[str], blocks: Sequence[int]) -> list[bool]: ...
    def close(self) -> None: ...


Make = Callable[[Trial], Tried]


class Unfit(Exception):
    """The adapter has failed a check. The text says what it did."""


def demand(true: object, what: str) -> None:
    if not true:
        raise Unfit(what)


@dataclass(slots=True)
class Bench:
    """A directory with a store, the daemons over it, and the adapters that a check has made."""

    make: Make
    directory: Path
    daemon: DaemonProcess | None = None
    _made: list[Tried] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def endpoint(self) -> str:
        return f"ipc://{self.directory}/d.sock"

    @property
    def blocks(self) -> Path:
        return self.directory / "blocks"

    def start(self) -> DaemonProcess:
        """A daemon at the endpoint, over what earlier ones have stored."""
        tree = {
            "server": {"endpoint": self.endpoint},
            "storage": {"backend": "file", "file": {"path": str(self.blocks), "capacity": "4GiB"}},
        }
        self.daemon = start(tree, self.directory, name=f"daemon-{next(self._numbers)}")
        return self.daemon

    def stop(self) -> None:
        if self.daemon is not None and not self.daemon.ended():
            self.daemon.signal(signal.SIGCONT)
            self.daemon.stop()

    def adapter(self, **trial: Any) -> Tried:
        made = self.make(Trial(self.endpoint, **trial))
        self._made.append(made)
        return made

    def close(self, one: Tried) -> None:
        self._made.remove(one)
        one.close()

    def close_all(self) -> None:
        for one in reversed(self._made):
            with contextlib.suppress(Exception):  # the check has failed already, or passed
                one.close()
        self.stop()


@dataclass(slots=True)
class AdapterCall:
    """A call of the adapter in its own thread, so that a call which hangs is noticed."""

    what: str
    results: list[Any] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    thread: threading.Thread | None = None

    @classmethod
    def begin(cls, what: str, call: Callable[[], Any]) -> AdapterCall:
        self = cls(what)

        def run() -> None:
            try:
                self.results.append(call())
            except BaseException as error:  # noqa: BLE001 - reported by `result`
                self.errors.append(error)

        self.thread = threading.Thread(target=run, name=what, daemon=True)
        self.thread.start()
        return self

    def returned(self, within: float) -> bool:
        assert self.thread is not None
        self.thread.join(within)
        return not self.thread.is_alive()

    def result(self, within: float = ANSWER_S) -> Any:
        """Raises Unfit if it does not return in time, or raises."""
        demand(self.returned(within), f"{self.what} has not returned within {within:g} s")
        if self.errors:
            raise Unfit(f"{self.what} has raised {self.errors[0]!r}; a cache never fails a request")
        return self.results[0]


def ask(what: str, call: Callable[[], Any], within: float = ANSWER_S) -> Any:
    return AdapterCall.begin(what, call).result(within)


def until(true: Callable[[], object], what: str, within: float = USED_AGAIN_S) -> None:
    give_up, pause = time.monotonic() + within, threading.Event()
    while not true():
        demand(time.monotonic() < give_up, f"{what} within {within:g} s")
        pause.wait(LOOK_S)


def key_of(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def content_of(number: int, nbytes: int) -> bytes:
    return hashlib.shake_128(str(number).encode()).digest(nbytes)


@dataclass(frozen=True, slots=True)
class BlockSample:
    """Contents in some blocks under some keys, and other blocks to load them to."""

    adapter: Tried
    numbers: Sequence[int]

    @property
    def keys(self) -> list[str]:
        return [key_of(number) for number in self.numbers]

    @property
    def sources(self) -> list[int]:
        return [2 * (5 * i % KEYS) for i in range(KEYS)]  # even ones, not in order

    @property
    def targets(self) -> list[int]:
        return [block + 1 for block in reversed(self.sources)]

    def store(self) -> None:
        for number, block in zip(self.numbers, self.sources, strict=True):
            self.adapter.fill(block, content_of(number, self.adapter.block_bytes))
        stored = ask("store", lambda: self.adapter.store(self.keys, self.sources))
        demand(stored == [True] * len(self.keys), f"store has answered {stored} to {len(self.keys)} new blocks")

    def empty(self) -> None:
        for block in range(self.adapter.blocks):
            self.adapter.fill(block, bytes([STALE]) * self.adapter.block_bytes)

    def check_loaded(self, answers: Sequence[bool], missing: Sequence[int] = ()) -> None:
        """Each block that the adapter calls loaded has its bytes. missing: positions that must not be loaded."""
        demand(len(answers) == len(self.keys), f"load has answered {len(answers)} times to {len(self.keys)} blocks")
        for i, (number, block, loaded) in enumerate(zip(self.numbers, self.targets, answers, strict=True)):
            demand(not (loaded and i in missing), f"load says that it has loaded key {i}, which was never stored")
            right = self.adapter.read(block) == content_of(number, self.adapter.block_bytes)
            demand(right or not loaded, f"load says that block {block} is loaded, but it has other bytes")

    def check_others(self) -> None:
        """No block but the targets was touched."""
        stale = bytes([STALE]) * self.adapter.block_bytes
        wrong = [b for b in range(self.adapter.blocks) if b not in self.targets and self.adapter.read(b) != stale]
        demand(not wrong, f"a load has written to blocks {wrong}, which it was not given")

    def load_all(self) -> None:
        self.empty()
        answers = ask("load", lambda: self.adapter.load(self.keys, self.targets))
        demand(answers == [True] * len(self.keys), f"load has answered {answers} to stored blocks")
        self.check_loaded(answers)
        self.check_others()

    def there_again(self) -> None:
        """Wait until the adapter uses the daemon that runs now."""
        until(lambda: all(ask("exists", lambda: self.adapter.exists(self.keys))), "the blocks are not found again")


# --- the checks -----------------------------------------------------------------------------------


def bytes_and_masks(bench: Bench) -> None:
    """Blocks come back with their bytes, each with an answer of its own, and no other block is touched."""
    bench.start()
    sample = BlockSample(bench.adapter(), range(KEYS))
    demand(not any(ask("exists", lambda: sample.adapter.exists(sample.keys))), "exists finds blocks in an empty store")
    sample.store()
    sample.load_all()
    mixed = BlockSample(sample.adapter, [number if number % 2 else KEYS + number for number in range(KEYS)])
    there = [number < KEYS for number in mixed.numbers]  # every second one was never stored
    found = ask("exists", lambda: sample.adapter.exists(mixed.keys))
    demand(found == there, f"exists has answered {found}, but {there} is so")
    mixed.empty()
    loaded = ask("load", lambda: sample.adapter.load(mixed.keys, mixed.targets))
    mixed.check_loaded(loaded, missing=[i for i, one in enumerate(there) if not one])
    demand(loaded == there, f"load has answered {loaded}, but {there} was stored")
    mixed.check_others()


def engine_restarts(bench: Bench) -> None:
    """A new adapter finds what an earlier one has stored."""
    bench.start()
    first = bench.adapter()
    BlockSample(first, range(KEYS)).store()
    bench.close(first)
    BlockSample(bench.adapter(), range(KEYS)).load_all()


def daemon_restarts(bench: Bench) -> None:
    """The adapter uses the next daemon, which has the same store, without being made anew."""
    bench.start()
    sample = BlockSample(bench.adapter(), range(KEYS))
    sample.store()
    bench.stop()
    demand(not any(ask("exists", lambda: sample.adapter.exists(sample.keys))), "exists finds blocks without a daemon")
    bench.start()
    sample.there_again()
    sample.load_all()


def daemon_is_killed(bench: Bench) -> None:
    """Calls end while the daemon is killed under them, none raises, and nothing wrong is loaded afterwards."""
    daemon = bench.start()
    sample = BlockSample(bench.adapter(), range(KEYS))
    sample.store()
    first = threading.Event()

    def stores() -> list[list[bool]]:
        answers = []
        for number in range(1, 40):
            answers.append(sample.adapter.store([key_of(1000 + number)], [sample.sources[0]]))
            first.set()
        return answers

    storing = AdapterCall.begin("store", stores)
    first.wait(ANSWER_S)
    daemon.kill()
    answers = storing.result(ANSWER_S * 2)
    demand(all(len(one) == 1 for one in answers), f"store has answered {answers} to one block each")
    lost = ask("load", lambda: sample.adapter.load(sample.keys, sample.targets))
    demand(lost == [False] * KEYS, f"load has answered {lost} without a daemon")
    bench.start()
    sample.there_again()
    sample.load_all()


def daemon_is_suspended(bench: Bench) -> None:
    """Once a load has returned, nothing writes to its blocks: not even a daemon that wakes up later."""
    daemon = bench.start()
    sample = BlockSample(bench.adapter(timeout=5.0), range(KEYS))
    sample.store()
    sample.load_all()
    sample.empty()
    others = bytes([OTHERS]) * sample.adapter.block_bytes
    daemon.signal(signal.SIGSTOP)
    try:
        load = AdapterCall.begin("load", lambda: sample.adapter.load(sample.keys, sample.targets))
        early = load.returned(SUSPENDED_S)
        if early:
            sample.check_loaded(load.result())
            for block in sample.targets:  # the engine gives them to other requests
                sample.adapter.fill(block, others)
    finally:
        daemon.signal(signal.SIGCONT)
    answers = load.result()
    sample.there_again()
    until(lambda: idle(bench), "the daemon has not finished what it had")
    if early:
        wrong = [block for block in sample.targets if sample.adapter.read(block) != others]
        demand(not wrong, f"load has returned, and later the daemon has written to its blocks {wrong}")
    else:
        sample.check_loaded(answers)
    sample.load_all()


def answers_in_time(bench: Bench) -> None:
    """A look-up at a silent daemon is a miss, soon."""
    daemon = bench.start()
    sample = BlockSample(bench.adapter(), range(KEYS))
    sample.store()
    daemon.signal(signal.SIGSTOP)
    try:
        found = ask("exists", lambda: sample.adapter.exists(sample.keys), LOOKUP_S)
        demand(found == [False] * KEYS, f"exists has answered {found} without the daemon")
    finally:
        daemon.signal(signal.SIGCONT)
    sample.there_again()


def no_daemon(bench: Bench) -> None:
    """Without a daemon the engine starts and everything misses; a daemon that comes later is used."""
    sample = BlockSample(ask("the start", lambda: bench.adapter(start_timeout=0.5)), range(KEYS))
    for what, found in (
        ("exists", ask("exists", lambda: sample.adapter.exists(sample.keys))),
        ("store", ask("store", lambda: sample.adapter.store(sample.keys, sample.sources))),
        ("load", ask("load", lambda: sample.adapter.load(sample.keys, sample.targets))),
    ):
        demand(found == [False] * KEYS, f"{what} has answered {found} without a daemon")
    bench.start()
    probe, block = [key_of(1000)], sample.sources[:1]
    until(lambda: any(ask("store", lambda: sample.adapter.store(probe, block))), "the daemon is not used")
    sample.store()
    sample.load_all()


def damage(bench: Bench) -> None:
    """Damaged objects are not loaded."""
    bench.start()
    sample = BlockSample(bench.adapter(), range(KEYS))
    sample.store()
    bench.stop()
    objects = [file for file in bench.blocks.rglob("*") if file.is_file() and file.stat().st_size > 1024]
    demand(len(objects) >= KEYS, f"{len(objects)} objects are stored, of {KEYS} blocks")
    for file in objects:
        content = bytearray(file.read_bytes())
        content[len(content) // 3] ^= 0x10
        file.write_bytes(content)
    bench.start()
    until(lambda: any(ask("exists", lambda: sample.adapter.exists(sample.keys))), "the daemon is not used")
    sample.empty()
    loaded = ask("load", lambda: sample.adapter.load(sample.keys, sample.targets))
    sample.check_loaded(loaded)
    demand(not any(loaded), f"load has answered {loaded} to damaged objects")
    sample.store()
    sample.load_all()


def fingerprint(bench: Bench) -> None:
    """Engines share blocks only if model, generation and weights are the same."""
    bench.start()
    sample = BlockSample(bench.adapter(), range(KEYS))
    sample.store()
    for what in ("model", "generation", "weights"):
        other = BlockSample(bench.adapter(name="other", **{what: "another"}), range(KEYS))
        _misses(other, what)
        other.store()  # it is not that nothing works
        other.load_all()
        bench.close(other.adapter)
    BlockSample(bench.adapter(name="other"), range(KEYS)).load_all()


def _misses(other: BlockSample, what: str) -> None:
    found = ask("exists", lambda: other.adapter.exists(other.keys))
    loaded = ask("load", lambda: other.adapter.load(other.keys, other.targets))
    demand(not any(found + loaded), f"an engine of another {what} is served these blocks")


def belonging(bench: Bench) -> None:
    """A client that knows only the engine's name cannot make the daemon write to its memory."""
    bench.start()
    sample = BlockSample(bench.adapter(), range(KEYS))
    sample.store()
    sample.empty()
    before = [sample.adapter.read(block) for block in range(sample.adapter.blocks)]
    with SyncClient(bench.endpoint, await_ready=False) as client:
        engines = [name for name, one in client.stats()["engines"].items() if one["ranks"]]
    demand(engines, "the adapter has registered no engine")
    for engine in engines:
        task = ReadStorageTask(task_id=f"thief-{engine}", keys=sample.keys, gpu_block_ids=list(range(KEYS)))
        with contextlib.suppress(TransferError), SyncClient(bench.endpoint, engine=engine, await_ready=False) as thief:
            result = thief.submit(task)
            demand(result.status is Status.REJECTED, f"the daemon has carried out a stranger's task: {result.status}")
    after = [sample.adapter.read(block) for block in range(sample.adapter.blocks)]
    demand(after == before, "a stranger has had the daemon write to the engine's memory")
    sample.load_all()


def private_memory(bench: Bench) -> None:
    """The adapter copies memory that no other process can map, or refuses it with one line that says what to do."""
    bench.start()
    try:
        adapter = bench.adapter(private=True)
    except NotImplementedError:
        raise Skipped("this engine's memory is never private") from None
    except Exception as error:  # noqa: BLE001 - any error will do that helps the operator
        text = str(error)
        demand(text and "\n" not in text, f"the error is not one line: {text!r}")
        demand(len(text.split()) > 3, f"the error does not say what to do: {text!r}")
        return
    sample = BlockSample(adapter, range(KEYS))
    sample.store()
    sample.load_all()


class Skipped(Exception):
    """A check does not apply. The text says why."""


CHECKS: tuple[Callable[[Bench], None], ...] = (
    bytes_and_masks, engine_restarts, daemon_restarts, daemon_is_killed, daemon_is_suspended, answers_in_time,
    no_daemon, damage, fingerprint, belonging, private_memory,
)  # fmt: skip


def idle(bench: Bench) -> bool:
    """Whether the daemon runs no task."""
    with SyncClient(bench.endpoint, await_ready=False) as client:
        report = client.stats()
    ranks = [rank for one in report["engines"].values() for rank in _list(one.get("ranks"))]
    lanes = [lane for rank in [*report["ranks"], *ranks] for lane in rank["lanes"].values()]
    return not report["queued"] and not any(lane["queued"] or lane["running"] for lane in lanes)


def _list(ranks: Any) -> list[dict[str, Any]]:
    return ranks if isinstance(ranks, list) else []


def run(make: Make, check: Callable[[Bench], None]) -> str:
    """Run one check. Returns what is wrong, or ""; raises Skipped."""
    with tempfile.TemporaryDirectory(prefix="tc.") as directory:
        bench = Bench(make, Path(directory))
        try:
            check(bench)
        except Unfit as error:
            return str(error)
        finally:
            bench.close_all()
    return ""


def factory(named: str) -> Make:
    """MODULE:FACTORY. Raises ValueError, ImportError, AttributeError."""
    module, colon, name = named.partition(":")
    if not (module and colon and name):
        raise ValueError(f"not MODULE:FACTORY: {named!r}")
    found: Make = getattr(importlib.import_module(module), name)
    return found


def main() -> int:
    parser = argparse.ArgumentParser("transferd.adapters.conformance", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("factory", metavar="MODULE:FACTORY")
    names = [check.__name__ for check in CHECKS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="CHECK", default=names, help=", ".join(names))
    asked = parser.parse_args()
    try:
        make = factory(asked.factory)
    except (ValueError, ImportError, AttributeError) as error:
        parser.error(str(error))
    failed = 0
    for check in CHECKS:
        if check.__name__ not in asked.only:
            continue
        about = (check.__doc__ or "").partition("\n")[0]
        try:
            wrong = run(make, check)
        except Skipped as why:
            print(f"skipped  {check.__name__}: {why}", flush=True)
            continue
        failed += bool(wrong)
        print(f"FAILED   {check.__name__}: {wrong}" if wrong else f"passed   {check.__name__}: {about}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
