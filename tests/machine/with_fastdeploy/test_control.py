"""FastDeploy's own control functions, with the daemon at the other end: pause, sleep, new weights, both protocols."""

from __future__ import annotations

import collections
import contextlib
import inspect
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from fastdeploy.cache_manager.cache_data import CacheStatus
from fastdeploy.engine.common_engine import EngineService
from fastdeploy.engine.request import ControlRequest
from fastdeploy.inter_communicator import KVCacheStatus, PrefixTreeStatus
from fastdeploy.inter_communicator.fmq import FMQ

from tests.machine.with_fastdeploy.engine import CREATES_FOR_HOST, TIMEOUT_S, Engine, engine, wait_for
from tests.machine.with_fastdeploy.test_tiers import prompts

# Release 2.5 updates its workers' weights only.
SENDS_NEW_WEIGHTS = "cache_task_queue" in inspect.getsource(EngineService._control_update_weights)


class Service:
    """An EngineService whose control functions, and their way of waiting for answers, are FastDeploy's own."""

    def __init__(self, made: Engine) -> None:
        service = self.service = object.__new__(EngineService)
        service.llm_logger = MagicMock()
        service.cfg = SimpleNamespace(
            cache_config=made.config.cache_config, scheduler_config=SimpleNamespace(name="local"), model_config=None
        )
        service._pause_cond = threading.Condition()
        service.is_paused = service._rejecting_new_requests = False
        service.resource_manager = SimpleNamespace(
            cache_manager=made.manager, requests={}, log_status=lambda: None, add_abort_req_ids=lambda _: None,
            preempted_all=list,
        )  # fmt: skip
        service.scheduler = SimpleNamespace(requests={}, get_inflight_requests=list, reset=lambda: None)
        service.token_processor = SimpleNamespace(clear_data=lambda: None)
        service.cache_task_queue = made.queue
        first = made.shape.tp * made.shape.dp
        names = [f"ctrl_c2e_rank{first + rank}_{made.cache_port}" for rank in range(made.shape.tp)]
        service._ctrl_output_queues = {name: FMQ().queue(name, "consumer") for name in names}
        service._ctrl_response_mailboxes = collections.defaultdict(collections.OrderedDict)
        service._call_worker = lambda *_: []
        service.engine_worker_queue = SimpleNamespace(put_tasks=lambda _: None, exist_tasks=lambda: False)
        self._made = made
        self._ids = itertools.count()

    def ask(self, method: str, **args: Any) -> Any:
        request = ControlRequest(request_id=f"{method}-{next(self._ids)}", method=method, args=args)
        return getattr(self.service, f"_control_{method}")(request)

    def transfer(self, method: str, **args: Any) -> Any:
        """What `_control_sleep` and `_control_wakeup` send to the transfer processes, awaited as they do."""
        import asyncio

        request = ControlRequest(request_id=f"{method}-{next(self._ids)}", method=method, args=args)
        self.service._dispatch_control_request(request, {"cache_transfer"})
        return asyncio.run(self.service._wait_for_control_responses(request.request_id, TIMEOUT_S, ["cache_transfer"]))

    def close(self) -> None:
        for queue in self.service._ctrl_output_queues.values():
            queue.socket.close()
            Path(queue.endpoint.address).unlink(missing_ok=True)


@pytest.fixture(params=[1, 2], ids=["tp1", "tp2"])
def tp(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def made(place: Path, tp: int) -> Iterator[Engine]:
    with engine(tp=tp, gpu_blocks=16, cpu_blocks=32, backend="file", model=str(weights(place, 1))) as one:
        yield one


@pytest.fixture
def service(made: Engine) -> Iterator[Service]:
    one = Service(made)
    yield one
    one.close()


def weights(place: Path, step: int) -> Path:
    """A model's directory as the training loop leaves it."""
    model = place / "model"
    model.mkdir(exist_ok=True)
    (model / "version.yaml").write_text(f"version: RL-STEP{step:02}-20261121-x\n")
    return model


def test_a_pause_drops_what_is_queued_and_a_resume_goes_on(made: Engine, service: Service, tp: int) -> None:
    asked = prompts(3)
    for tokens in asked:
        made.run(tokens)
    assert made.inflight() == [1] * tp
    service.ask("pause")
    assert made.inflight() == [0] * tp
    assert not made.manager.node_map, "FastDeploy resets its tree"
    service.ask("pause")  # FastDeploy: already paused, nothing to do
    gone = (CacheStatus.SWAP2CPU, "late", [1], [0], [0])  # of a node that the tree has no more
    made.queue.put_transfer_task(gone)
    service.ask("resume")
    assert made.inflight() == [1] * tp
    assert made.run(asked[0])["storage_match_token_num"] == 40
    made.settle()


def test_a_second_group_is_answered_on_the_queues_of_its_own_ranks(place: Path) -> None:
    with (
        engine(tp=2, dp=1, groups=2, gpu_blocks=24, cpu_blocks=48) as made,
        contextlib.closing(Service(made)) as service,
    ):
        assert all("_rank2_" in name or "_rank3_" in name for name in service.service._ctrl_output_queues)
        service.ask("pause")
        assert made.inflight() == [0, 0]
        service.ask("resume")
        assert made.inflight() == [1, 1]


def test_new_weights_find_nothing_of_the_old_ones(made: Engine, service: Service, place: Path) -> None:
    (tokens,) = prompts(1)
    made.run(tokens)
    service.ask("pause")
    weights(place, 2)
    service.ask("update_weights")
    service.ask("resume")
    assert made.queue.client.generation == "RL-STEP02"
    assert made.run(tokens)["storage_match_token_num"] == 0
    service.ask("pause")
    weights(place, 1)
    service.ask("update_weights")
    service.ask("resume")
    assert made.run(tokens)["storage_match_token_num"] == 40, "those of before are still under their name"


@pytest.mark.skipif(not SENDS_NEW_WEIGHTS, reason="this FastDeploy sends its transfer processes no update_weights")
def test_new_weights_without_a_name_find_nothing_of_the_old_ones(place: Path, tp: int) -> None:
    """No version.yaml: FastDeploy would go on with the same keys, and serve blocks of the old weights."""
    (tokens,) = prompts(1)
    with (
        engine(tp=tp, gpu_blocks=16, cpu_blocks=0, backend="file") as made,
        contextlib.closing(Service(made)) as service,
    ):
        for args in ({}, {"version": "RL-STEP09-20261121-x"}):
            made.run(tokens)
            service.ask("pause")
            service.ask("update_weights", **args)
            service.ask("resume")
            assert made.run(tokens)["storage_match_token_num"] == 0
        assert made.queue.client.generation == "RL-STEP09"


def test_sleep_and_wakeup_with_the_same_weights(made: Engine, service: Service, tp: int) -> None:
    (tokens,) = prompts(1)
    made.run(tokens)
    for _ in range(2):
        service.ask("pause")
        made.unmap()
        service.transfer("sleep", tags="weight,kv_cache")
        service.transfer("sleep", tags="kv_cache")  # already asleep
        assert made.queue.client.stats()["cache"]["cleared"]
        assert made.signals["cache_ready_signal"].value.tolist() == [0] * tp
        assert made.signals["swap_space_ready_signal"].value.tolist() == [0] * tp
        service.transfer("wakeup", tags="weight,kv_cache")
        assert made.signals["swap_space_ready_signal"].value.tolist() == [1] * tp
        made.attach()
        service.ask("resume")
        assert made.run(tokens)["storage_match_token_num"] == 40
        made.settle()


def test_a_worker_that_does_not_let_go_fails_the_sleep_on_every_rank(
    made: Engine, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transferd.adapters.fastdeploy.control.WORKER_TIMEOUT_S", 0.2)
    service.ask("pause")
    with pytest.raises(Exception, match="release their KV cache"):
        service.transfer("sleep", tags="kv_cache")
    service.ask("resume")
    assert made.run(prompts(1)[0])["gpu_match_token_num"] == 0


def test_an_unknown_request_is_answered_so(service: Service) -> None:
    with pytest.raises(Exception, match="Unknown control method: explode"):
        service.transfer("explode")


def test_weights_cleared_and_updated_by_signals(made: Engine, place: Path, tp: int) -> None:
    """FD_ENABLE_V1_UPDATE_WEIGHTS=0, the default: workers set kv_cache_status, the API server waits for its end."""
    (tokens,) = prompts(1)
    made.run(tokens)
    status, tree = made.signals["kv_cache_status"].value, made.signals["prefix_tree_status"].value
    for step in (2, 3):
        status[0] = KVCacheStatus.CLEARING
        made.unmap()
        wait_for(lambda: status[0] == KVCacheStatus.CLEARED)
        assert made.inflight() == [0] * tp
        tree[0] = PrefixTreeStatus.CLEARING
        wait_for(lambda: tree[0] == PrefixTreeStatus.CLEARED)
        assert made.queue.client.stats()["cache"]["cleared"]
        weights(place, step)
        status[0] = KVCacheStatus.UPDATING
        wait_for(lambda: made.signals["cache_ready_signal"].value.tolist() == [1] * tp)
        made.attach()
        wait_for(lambda: status[0] == KVCacheStatus.NORMAL)
        assert made.inflight() == [1] * tp
        tree[0] = PrefixTreeStatus.UPDATING
        wait_for(lambda: tree[0] == PrefixTreeStatus.NORMAL)
        assert made.queue.client.generation == f"RL-STEP0{step}"
        assert made.run(tokens)["storage_match_token_num"] == 0
        made.settle()
        metrics = made.run(tokens)
        assert metrics["gpu_match_token_num"] + metrics["cpu_match_token_num"] == 40


def test_a_status_that_a_late_worker_sets_again_is_served_again(made: Engine, place: Path, tp: int) -> None:
    """Every worker sets kv_cache_status; one may come when what it asks for was done for another already."""
    (tokens,) = prompts(1)
    made.run(tokens)
    status = made.signals["kv_cache_status"].value
    for number in range(2):
        status[0] = KVCacheStatus.CLEARING
        if number == 0:
            made.unmap()
        wait_for(lambda: status[0] == KVCacheStatus.CLEARED)
    made.manager.reset()
    weights(place, 2)
    for _ in range(2):
        status[0] = KVCacheStatus.UPDATING
        wait_for(lambda: status[0] == KVCacheStatus.NORMAL)
    made.attach()
    assert made.inflight() == [1] * tp
    for wanted in (0, 40):
        metrics = made.run(tokens)
        assert sum(metrics[f"{tier}_match_token_num"] for tier in ("gpu", "cpu", "storage")) == wanted
    made.settle()


@pytest.mark.skipif(CREATES_FOR_HOST, reason="in this FastDeploy no worker creates the cache")
def test_memory_that_workers_create_sleeps_and_wakes_up(place: Path, tp: int) -> None:
    """No storage: workers create, the daemon lets go first, and maps again what they make anew."""
    with engine(tp=tp, gpu_blocks=24, cpu_blocks=32) as made:
        service = Service(made)
        try:
            asked = prompts(4)
            for tokens in asked:
                made.run(tokens)
            service.ask("pause")
            service.transfer("sleep", tags="kv_cache")
            assert made.signals["cache_ready_signal"].value.tolist() == [0] * tp
            made.make_anew()
            service.transfer("wakeup", tags="kv_cache")
            service.ask("resume")
            for tokens in asked * 2:
                made.run(tokens)
            made.settle()
        finally:
            service.close()
