"""Every control request with every fault: it works, or one more of its kind makes it work, and all bytes are right.

The requests are FastDeploy's own functions, the daemon is a process, and one engine lives through the table: what one
cell leaves behind, the next one meets.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastdeploy.inter_communicator import KVCacheStatus

from tests.machine.with_fastdeploy.engine import TIMEOUT_S, Engine, engine, wait_for
from tests.machine.with_fastdeploy.test_control import SENDS_NEW_WEIGHTS, Service, weights
from tests.machine.with_fastdeploy.test_tiers import prompts
from transferd.adapters.common import companion as common
from transferd.adapters.fastdeploy import control, group
from transferd.client.sync_client import SyncClient
from transferd.errors import TransferError

REQUESTS = ("pause", "resume", "update_weights", "sleep", "wakeup", "CLEARING", "UPDATING")
FAULTS = (
    "killed before",
    "killed in it",
    "killed after",
    "slow workers",
    "half a version",
    "lost directory",
    "suspended",
)
NEW_WEIGHTS = ("update_weights", "UPDATING")
# Where the daemon dies in the middle of a request: in this call of the client, before or after the daemon has done it.
IN_IT = {
    "resume": ("set_generation", False), "update_weights": ("set_generation", True), "sleep": ("clear_cache", False),
    "wakeup": ("restore_cache", True), "CLEARING": ("clear_cache", True), "UPDATING": ("restore_cache", True),
}  # fmt: skip


class Loop:
    """A training loop over one engine: it brings FastDeploy to where a request makes sense, and back to work."""

    def __init__(self, stores: bool) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="tfd."))
        self.step = 1
        self._stack = contextlib.ExitStack()
        patch = self._stack.enter_context(pytest.MonkeyPatch.context())
        for name in ("XDG_RUNTIME_DIR", "FD_LOG_DIR"):
            patch.setenv(name, str(self.place))
        patch.setenv("TRANSFERD_CACHE__DEVICE", "shm")
        patch.setattr(common, "LONGEST_PAUSE_S", 1.0)  # a daemon dies in every cell, and none may wait for the next
        more: dict[str, Any] = {"backend": "file"} if stores else {}
        model = str(weights(self.place, self.step))
        self.engine: Engine = self._stack.enter_context(engine(gpu_blocks=24, cpu_blocks=48, model=model, **more))
        self.creates = self.engine.shape.creates
        self.service = self._stack.enter_context(contextlib.closing(Service(self.engine)))
        self.status = self.engine.signals["kv_cache_status"].value

    def close(self) -> None:
        self._stack.close()
        shutil.rmtree(self.place, ignore_errors=True)

    def new_weights(self) -> None:
        self.step += 1
        weights(self.place, self.step)

    def half_a_version(self) -> None:
        self.step += 1
        weights(self.place, self.step)
        (self.place / "model" / "version.yaml").write_text("vers")

    def lose_directory(self) -> None:
        """The daemon's directory is gone at once: the daemon may be writing to it, and would delay its removal."""
        lost = Path(tempfile.mkdtemp(dir=self.place))
        next(self.place.glob("transferd-fastdeploy-*")).rename(lost / "directory")
        shutil.rmtree(lost, ignore_errors=True)

    def prepare(self, request: str) -> None:
        if request in ("resume", "update_weights", "sleep", "wakeup"):
            self.service.ask("pause")
        if request == "wakeup":
            self.workers_let_go()
            self.service.transfer("sleep", tags="kv_cache")
        if request == "UPDATING":
            self._set(KVCacheStatus.CLEARING, KVCacheStatus.CLEARED)
        if request in NEW_WEIGHTS:
            self.new_weights()

    def ask(self, request: str) -> None:
        """As FastDeploy asks. Raises what FastDeploy raises; a status is waited for by `finish`."""
        match request:
            case "CLEARING":
                self.workers_let_go()
                self.status[0] = KVCacheStatus.CLEARING
            case "UPDATING":
                self.status[0] = KVCacheStatus.UPDATING
                self.workers_make()
            case "sleep":
                self.workers_let_go()
                self.service.transfer("sleep", tags="kv_cache")
            case "wakeup":
                self.workers_make()
                self.service.transfer("wakeup", tags="kv_cache")
                self.workers_map()
            case _:
                self.service.ask(request)

    def finish(self, request: str) -> None:
        """Go on from there until requests run."""
        if request in ("CLEARING", "UPDATING"):
            if request == "CLEARING":
                wait_for(lambda: self.status[0] == KVCacheStatus.CLEARED)
                self.new_weights()
                self.status[0] = KVCacheStatus.UPDATING
                self.workers_make()
            wait_for(lambda: self.status[0] == KVCacheStatus.NORMAL)
            self.engine.manager.reset()
        if request == "sleep":
            self.ask("wakeup")
        if request in ("pause", "sleep", "wakeup", "update_weights"):
            self.service.ask("resume")
        self.workers_map()

    def _set(self, status: Any, then: Any) -> None:
        self.workers_let_go()
        self.status[0] = status
        wait_for(lambda: self.status[0] == then)

    # --- workers --------------------------------------------------------------------------------------

    def workers_let_go(self) -> None:
        if self.creates:
            self.engine.unmap()

    def workers_make(self) -> None:
        """They create what the daemon does not."""
        if not self.creates and not self.engine.signals["cache_ready_signal"].value.all():
            self.engine.make_anew()

    def workers_map(self) -> None:
        if self.creates and not self.engine.workers:
            self.engine.attach(again=True)

    # --- afterwards -----------------------------------------------------------------------------------

    def stats(self) -> Any:
        """The daemon's report, or None if none answers that has our engine."""
        try:
            told = self.engine.queue.client.stats()
        except TransferError:
            return None
        return told if self.engine.queue.group._engine in told["engines"] else None

    def works(self) -> None:
        """Blocks come back from host or storage, with the right bytes. If need be, workers map their memory again."""
        client = self.engine.queue.group.client
        wait_for(lambda: self.stats() is not None)
        if client.outdated:  # the daemon has died with their memory
            for request in ("pause", "sleep", "wakeup", "resume"):
                self.ask(request)
            self.workers_map()
        if not self.creates:
            self.engine.offer()
        client.wait_ready(30.0)
        wait_for(lambda: self.engine.queue.group.settled)  # at the latest with the client's next heartbeat
        assert self.engine.inflight() == [1]
        asked = prompts(4)
        for tokens in asked:
            self.engine.run(tokens)
        self.engine.settle()
        found = [self.engine.run(tokens) for tokens in asked]
        self.engine.settle()
        assert sum(one["cpu_match_token_num"] + one["storage_match_token_num"] for one in found) > 0


_loops: dict[bool, Loop] = {}


@pytest.fixture(scope="module", autouse=True)
def loops() -> Iterator[None]:
    yield
    for one in _loops.values():
        one.close()
    _loops.clear()


@pytest.fixture
def loop(stores: bool) -> Iterator[Loop]:
    """One engine for all cells, and a new one after a cell that failed."""
    one = _loops.pop(stores, None) or Loop(stores)
    yield one
    if stores not in _loops:
        one.close()


@pytest.fixture(params=[True, False], ids=["storage", "host alone"])
def stores(request: pytest.FixtureRequest) -> bool:
    """With storage the daemon creates the device memory, without it workers do; in release 2.5 the daemon does."""
    return bool(request.param)


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_request_with_a_fault(
    loop: Loop, stores: bool, request_: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request_ == "update_weights" and not SENDS_NEW_WEIGHTS:
        pytest.skip("this FastDeploy sends its transfer processes no update_weights")
    if fault == "killed in it" and request_ not in IN_IT:
        pytest.skip("a pause asks the daemon for nothing")
    made = loop.engine
    loop.prepare(request_)
    faults: dict[str, Callable[[], None]] = {
        "killed before": made.kill_daemon,
        "killed in it": lambda: _die_in(monkeypatch, made, *IN_IT[request_]),
        "slow workers": lambda: _slow(monkeypatch, loop),
        "half a version": loop.half_a_version,
        "lost directory": lambda: _lose(monkeypatch, loop),
        "suspended": lambda: os.kill(made.daemon.pid, signal.SIGSTOP),
    }
    if request_ == "resume" and fault == "killed in it":
        loop.new_weights()  # so that a resume has something to ask for
    faults.get(fault, lambda: None)()
    failed: Exception | None = None
    try:
        loop.ask(request_)
    except Exception as error:  # noqa: BLE001 - FastDeploy raises Exception itself
        failed = error
    monkeypatch.undo()
    if fault == "suspended":
        os.kill(made.daemon.pid, signal.SIGCONT)
    if fault == "half a version":
        weights(loop.place, loop.step)
    if fault == "slow workers" and request_ == "CLEARING":
        loop.workers_let_go()
    if fault == "slow workers" and request_ == "UPDATING":
        loop.workers_make()
    if fault in ("killed after", "lost directory"):
        made.kill_daemon()
    if failed is not None:
        loop.ask(request_)
    loop.finish(request_)
    loop.works()
    assert made.queue.group.client.generation == f"RL-STEP{loop.step:02}" or fault == "half a version"
    assert not made.queue.group.failed
    _loops[stores] = loop


@pytest.mark.parametrize("stores", [True], indirect=True, ids=["storage"])
@pytest.mark.skipif(not SENDS_NEW_WEIGHTS, reason="this FastDeploy sends its transfer processes no update_weights")
def test_a_worker_that_has_not_heard_of_new_weights_does_not_decide(loop: Loop) -> None:
    """The daemon dies right after an update, and a worker is the first to say to its successor which weights it serves.

    It names those before. FastDeploy knows better, and its next request works all the same.
    """
    made, ours = loop.engine, loop.engine.queue.group
    worker = made.client()
    worker.attach(0)  # only who uses the engine says what it serves
    before, boot_id = worker.generation, worker.boot_id
    loop.service.ask("pause")
    loop.new_weights()
    worker_goes_on = _hold_up(worker)
    loop.service.ask("update_weights")
    others_go_on = [_hold_up(one) for one in (ours.client, *made.clients) if one is not worker]
    loop.lose_directory()
    made.kill_daemon()
    worker_goes_on.set()
    wait_for(lambda: worker.connected and worker.boot_id != boot_id)
    assert worker.generation == before
    for one in others_go_on:
        one.set()
    loop.ask("sleep")
    loop.finish("sleep")
    loop.works()
    assert ours.client.generation == f"RL-STEP{loop.step:02}" != before
    _loops[True] = loop


def _hold_up(client: SyncClient) -> threading.Event:
    """Nothing happens on the client's thread until the event is set."""
    stands, goes_on = threading.Event(), threading.Event()

    def stand() -> None:
        stands.set()
        goes_on.wait(TIMEOUT_S)

    assert client._loop is not None
    client._loop.call_soon_threadsafe(stand)
    assert stands.wait(TIMEOUT_S)
    return goes_on


def _slow(monkeypatch: pytest.MonkeyPatch, loop: Loop) -> None:
    """Workers do not do their part in the time that a request gives them."""
    monkeypatch.setattr(control, "WORKER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(group, "READY_TIMEOUT_S", 0.2)
    for part in ("workers_let_go", "workers_make"):
        monkeypatch.setattr(loop, part, lambda: None)


def _lose(monkeypatch: pytest.MonkeyPatch, loop: Loop) -> None:
    """Nobody reaches the daemon any more who has no connection yet, such as the workers that offer memory."""
    monkeypatch.setattr(group, "READY_TIMEOUT_S", 5.0)
    loop.lose_directory()


def _die_in(monkeypatch: pytest.MonkeyPatch, made: Engine, call: str, done: bool) -> None:
    original = getattr(SyncClient, call)

    def dies(self: SyncClient, *args: Any, **kwargs: Any) -> Any:
        monkeypatch.undo()
        if done:
            original(self, *args, **kwargs)
        made.kill_daemon()
        return original(self, *args, **kwargs)

    monkeypatch.setattr(SyncClient, call, dies)
