"""FastDeploy's workers: who creates, who maps, who lets go, and that every byte is theirs and the daemon's alike."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paddle
import pytest
from fastdeploy.entrypoints.engine_client import EngineClient
from fastdeploy.inter_communicator import ModelWeightsStatus
from fastdeploy.rl.dynamic_weight_manager import DynamicWeightManager

from tests.machine.with_fastdeploy import engine as base
from tests.machine.with_fastdeploy.engine import Shape, wait_for
from tests.machine.with_fastdeploy.gpu.engine import GpuEngine, gpu_engine
from tests.machine.with_fastdeploy.test_control import Service, weights
from tests.machine.with_fastdeploy.test_tiers import prompts
from transferd.adapters.fastdeploy.group import Group
from transferd.errors import TransferError


@pytest.fixture(autouse=True)
def ranks_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are threads here, and what they load goes through no process group."""
    barrier = threading.Barrier(2)
    monkeypatch.setattr(paddle.distributed, "barrier", lambda *_: barrier.wait(30))


@pytest.mark.parametrize("tp", [1, 2])
def test_the_daemon_swaps_in_the_workers_memory(place: Path, tp: int) -> None:
    """A CPU cache alone: since #7471 GPUModelRunner.initialize_kv_cache creates and publishes, before it the daemon."""
    with gpu_engine(tp=tp, gpu_blocks=24, cpu_blocks=48) as made:
        assert made.report()["registered"] is not made.shape.creates
        asked = prompts(4)
        for tokens in asked:
            made.run(tokens)
        made.settle()
        assert sum(made.run(tokens)["cpu_match_token_num"] for tokens in asked) > 0
        made.settle()


@pytest.mark.parametrize("tp", [1, 2])
def test_the_daemon_creates_and_workers_map_what_it_published(place: Path, tp: int) -> None:
    """With a storage backend its transfer processes create; GPUModelRunner waits for the signal, then maps by name."""
    with gpu_engine(tp=tp, gpu_blocks=16, cpu_blocks=16, backend="file") as made:
        configured = made.queue.client.stats()["configured"]["cache"]
        assert (configured["device"], configured["ownership"]) == ("paddle", "create")
        asked = prompts(3)
        for tokens in asked:
            made.run(tokens)
        assert made.run(asked[0])["storage_match_token_num"] == 40
        made.settle()


@pytest.mark.parametrize("backend", [None, "file"], ids=["workers-create", "daemon-creates"])
def test_workers_sleep_and_wake_up_with_the_same_weights(place: Path, backend: str | None) -> None:
    """GPUModelRunner.sleep and wakeup: whoever only maps lets go first, on both sides of the rule."""
    with (
        gpu_engine(tp=2, gpu_blocks=24, cpu_blocks=48, backend=backend, model=str(weights(place, 1))) as made,
        contextlib.closing(Service(made)) as service,
    ):
        made.new_weights(place / "model")
        asked = prompts(4)
        for tokens in asked:
            made.run(tokens)
        for _ in range(2):
            service.ask("pause")
            asleep = made.in_workers(lambda runner: runner.sleep("weight,kv_cache"))
            service.transfer("sleep", tags="weight,kv_cache")
            asleep()
            assert not made.workers
            awake = made.in_workers(lambda runner: runner.wakeup("weight,kv_cache"))
            service.transfer("wakeup", tags="weight,kv_cache")
            awake()
            service.ask("resume")
            found = [made.run(tokens) for tokens in asked * 2]
            name = "storage_match_token_num" if backend else "cpu_match_token_num"
            assert sum(metrics[name] for metrics in found) > 0
            made.settle()


class ApiServer:
    """The way of FastDeploy's API server to new weights: /clear_load_weight and /update_model_weight."""

    def __init__(self, made: GpuEngine) -> None:
        client = self._client = object.__new__(EngineClient)
        client.clear_update_lock = threading.Lock()
        client.data_parallel_info = {}
        client.enable_cache_transfer = client.enable_prefix_caching = True
        for name in ("model_weights_status", "kv_cache_status", "prefix_tree_status"):
            setattr(client, f"{name}_signal", made.signals[name])
        self._made = made

    def ask(self, method: str, wanted: int) -> None:
        """Call it, and do what the workers' loop does when it sees that."""
        made, signals = self._made, self._made.signals

        def look(runner: Any) -> None:
            status = signals["model_weights_status"], signals["kv_cache_status"]
            DynamicWeightManager.check_model_weights_status(*status, runner, made.port, False)

        with ThreadPoolExecutor(1) as server:
            answer = server.submit(getattr(self._client, method), 60)
            wait_for(lambda: signals["model_weights_status"].value[0] == wanted)
            made.in_workers(look)()
            code, body = answer.result()
        assert code == 200, body


@pytest.mark.parametrize("backend", [None, "file"], ids=["workers-create", "daemon-creates"])
def test_workers_clear_and_update_their_weights_by_signals(place: Path, backend: str | None) -> None:
    """FD_ENABLE_V1_UPDATE_WEIGHTS=0: EngineClient asks, DynamicWeightManager does it, as the workers' loop calls it."""
    with gpu_engine(tp=2, gpu_blocks=24, cpu_blocks=48, backend=backend, model=str(weights(place, 1))) as made:
        made.new_weights(place / "model")
        server = ApiServer(made)
        asked = prompts(4)
        for step in (2, 3):
            for tokens in asked * 2:
                made.run(tokens)
            made.settle()
            server.ask("clear_load_weight", ModelWeightsStatus.CLEARING)
            assert made.report()["missing"] == [0, 1]
            weights(place, step)
            server.ask("update_model_weight", ModelWeightsStatus.UPDATING)
            assert made.queue.client.generation == f"RL-STEP0{step}"
            metrics = made.run(asked[0])
            assert metrics["storage_match_token_num"] == metrics["cpu_match_token_num"] == 0
        made.settle()


def creating(made: GpuEngine) -> None:
    """Workers that believe that they create, beside a command that says that transfer processes do (#7420, XPU)."""
    for runner in made.runners:
        nothing = {"kvcache_storage_backend": None, "num_cpu_blocks": 0}
        runner.fd_config.cache_config = SimpleNamespace(**vars(runner.fd_config.cache_config) | nothing)


@pytest.mark.parametrize("tp", [1, 2])
def test_workers_that_have_created_already_are_served_whatever_the_command_says(
    place: Path, caplog: pytest.LogCaptureFixture, tp: int
) -> None:
    made = GpuEngine(Shape(tp=tp, gpu_blocks=16, cpu_blocks=16, backend="file"))
    try:
        creating(made)
        mapping = made.map_in_background()
        mapping()  # before the engine launches
        base.Engine.start(made)
        made.look()
        assert [one for one in caplog.messages if "have created it already: transferd maps theirs" in one]
        asked = prompts(3)
        for tokens in asked:
            made.run(tokens)
        assert made.run(asked[0])["storage_match_token_num"] == 40
        made.settle()
    finally:
        made.close()


@pytest.mark.parametrize("tp", [1, 2])
def test_a_worker_that_creates_after_the_daemon_gets_no_foreign_block(
    place: Path, caplog: pytest.LogCaptureFixture, tp: int
) -> None:
    """Its bytes are checked by every request: FastDeploy's own transfer processes fill it with wrong ones here."""
    made = GpuEngine(Shape(tp=tp, gpu_blocks=16, cpu_blocks=16, backend="file"))
    try:
        creating(made)
        base.Engine.start(made)
        assert made.signals["cache_ready_signal"].value.tolist() == [1] * tp
        made.map_in_background()()
        asked = prompts(4)
        for tokens in asked + asked:
            assert made.run(tokens)["storage_match_token_num"] == 0
        told = [one for one in caplog.messages if "published it in place of transferd's" in one]
        assert len(told) == 1, caplog.messages
    finally:
        made.close()


def test_a_worker_that_creates_while_the_daemon_does_ends_the_start(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = GpuEngine(Shape(gpu_blocks=16, cpu_blocks=16, backend="file"))
    creating(made)
    ready = Group._await_ready

    def create_and_wait(group: Group) -> None:
        made.map_in_background()()
        ready(group)

    monkeypatch.setattr(Group, "_await_ready", create_and_wait)
    try:
        with pytest.raises(TransferError, match="workers and its command disagree about who creates"):
            base.Engine.start(made)
    finally:
        made.close()
