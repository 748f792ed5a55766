"""An engine whose workers run FastDeploy's GPUModelRunner, and whose cache messagers are FastDeploy's processes.

The runner's functions for the KV cache, for sleep and wakeup and for new weights are its own; so is its
DynamicWeightManager, over a model of one layer. Its constructor, which builds a model, is not run.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
from fastdeploy.engine import common_engine
from fastdeploy.inter_communicator import EngineWorkerQueue, IPCSignal
from fastdeploy.model_executor.layers.attention.append_attn_backend import AppendAttentionBackend
from fastdeploy.rl.dynamic_weight_manager import DynamicWeightManager
from fastdeploy.splitwise.splitwise_connector import SplitwiseConnector
from fastdeploy.worker import gpu_model_runner
from safetensors.paddle import save_file

from tests.machine.with_fastdeploy import engine as base
from tests.machine.with_fastdeploy.gpu import operators
from tests.machine.with_fastdeploy.gpu.memory import array_of
from transferd.tiers.fastdeploy import read
from transferd.tiers.offered import DIRECTORY

gpu_model_runner.print_gpu_memory_use = lambda *_: None  # asks NVIDIA's management library


class GpuEngine(base.Engine):
    """An engine on the machine with the double. Use `gpu_engine(...)`, which ends it."""

    def __init__(self, shape: base.Shape) -> None:
        super().__init__(shape)
        self.runners = [self._runner(rank) for rank in range(shape.tp)]
        self.worker_queue: Any = None
        self._worker_queue_server: Any = None
        if shape.role != "mixed":
            common = {"address": base.address_at(self.port), "num_client": shape.tp}
            self._worker_queue_server = EngineWorkerQueue(is_server=True, local_data_parallel_size=1, **common)
            self.worker_queue = EngineWorkerQueue(is_server=False, client_id=0, local_data_parallel_id=0, **common)

    def _stand_in(self) -> None:
        self.manager._get_kv_cache_shape = lambda blocks: _backend().get_kv_cache_shape(max_num_blocks=blocks)

    def start(self) -> None:
        mapping = self.map_in_background()
        super().start()
        mapping()

    def _make_memory(self) -> None:
        """Workers do in `map_in_background`, as FastDeploy's own code has it."""

    def attach(self, *, again: bool = False) -> None:
        """As `_make_memory`."""

    def _runner(self, rank: int) -> Any:
        shape = self.shape
        runner = object.__new__(gpu_model_runner.GPUModelRunner)
        runner.device_id, runner.local_rank = self.devices[rank], rank
        runner.num_gpu_blocks = shape.gpu_blocks
        runner.model_config = SimpleNamespace(dtype="bfloat16", num_hidden_layers=base.LAYERS)
        runner.quant_config = runner.forward_meta = runner.routing_replay_manager = None
        runner.spec_method = runner.speculative_method = None  # the older name is release 2.5's
        runner.parallel_config = SimpleNamespace(
            tensor_parallel_size=shape.tp, tensor_parallel_rank=rank, enable_expert_parallel=False,
            shutdown_comm_group_if_worker_idle=False, local_engine_worker_queue_port=self.port,
            tp_group=None, local_data_parallel_id=0, expert_parallel_rank=0,
        )  # fmt: skip
        runner.scheduler_config = SimpleNamespace(splitwise_role=shape.role, max_num_seqs=4)
        runner.fd_config = SimpleNamespace(
            cache_config=self.config.cache_config, scheduler_config=runner.scheduler_config,
            parallel_config=runner.parallel_config, load_config=SimpleNamespace(load_strategy="ipc_snapshot"),
            model_config=SimpleNamespace(model=shape.model),
            routing_replay_config=SimpleNamespace(enable_routing_replay=False),
        )  # fmt: skip
        runner.attn_backends = [_backend()]
        runner.cache_kvs_map = {}
        runner.share_inputs = _Inputs(stop_flags=np.zeros(1, dtype=bool))
        runner.prompt_logprobs_reqs, runner.in_progress_prompt_logprobs = {}, {}
        runner.use_cudagraph = runner.speculative_decoding = runner.enable_cache_manager_v1 = False
        runner.mla_cache = runner.dsa_cache = False
        runner.is_weight_sleeping = runner.is_kvcache_sleeping = False
        runner.cache_ready_signal = IPCSignal(
            name="cache_ready_signal", array=np.zeros([shape.tp], dtype=np.int32), dtype=np.int32, suffix=self.port,
            create=False,
        )  # fmt: skip
        return runner

    def map_in_background(self) -> Any:
        """Every worker's initialize_kv_cache, each on a thread, as they are processes. Returns how to wait for them."""
        return self.in_workers(lambda runner: runner.initialize_kv_cache())

    def in_workers(self, do: Any) -> Any:
        """Do something with each runner at the same time. Returns a function that waits and looks at their caches."""
        failed: list[BaseException] = []

        def work(runner: Any) -> None:
            try:
                do(runner)
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                failed.append(error)
                self.queue.group.closing.set()  # or the engine would wait for this worker as long as FastDeploy does

        self.workers = []
        threads = [threading.Thread(target=work, args=(runner,), daemon=True) for runner in self.runners]
        for thread in threads:
            thread.start()

        def wait() -> None:
            for thread in threads:
                thread.join(base.TIMEOUT_S)
                assert not thread.is_alive(), "a worker hangs"
            if failed:
                raise failed[0]
            self.look()

        return wait

    def look(self) -> None:
        """The workers' arrays, from what their runners hold."""
        self.workers = []
        for runner in self.runners:
            if runner.cache_kvs_map:
                arrays = {
                    plane: [
                        array_of(runner.cache_kvs_map[f"{plane}_caches_{i}_rank{runner.local_rank}.device{runner.device_id}"])
                        for i in range(base.LAYERS)
                    ]
                    for plane in ("key", "value")
                }  # fmt: skip
                self.workers.append(base.Worker(runner.local_rank, arrays))

    def new_weights(self, directory: Path) -> None:
        """A model of one layer with FastDeploy's own manager of its weights, which reads them from this directory."""
        save_file(paddle.nn.Linear(2, 2).state_dict(), directory / "model_state.tp0.0.pdparams")

        def load(runner: Any) -> None:
            runner.model = paddle.nn.Linear(2, 2)
            runner.dynamic_weight_manager = DynamicWeightManager(runner.fd_config, runner.model, runner.local_rank)

        self.in_workers(load)()

    # --- direct hand-over ---------------------------------------------------------------------------

    def send_to(self, other: GpuEngine, request: Any, blocks: list[int]) -> None:
        """Prefill's and decode's part in a hand-over by cache messagers, up to the last layer of the last chunk."""
        request.disaggregate_info = {
            "transfer_protocol": "ipc", "device_ids": other.devices, "decode_device_ids": other.devices,
        }  # fmt: skip
        connector = SimpleNamespace(engine_worker_queue=self.worker_queue, logger=common_engine.llm_logger)
        SplitwiseConnector.send_cache_info_to_messager(connector, [request], request.idx)
        self.worker_queue.put_cache_info([{"request_id": request.request_id, "dest_block_ids": blocks}])
        if hasattr(self.worker_queue, "get_finished_add_cache_task_req"):  # versions whose engine waits for it
            assert _awaited(self.worker_queue.get_finished_add_cache_task_req) == [request.request_id]

    def tell(self, request: Any, tokens: range) -> None:
        """What the attention kernels say while a chunk of the prompt is computed, layer by layer."""
        for layer in range(base.LAYERS):
            for rank in range(self.shape.tp):
                operators.tell(rank, layer, [(request.idx, tokens.start, len(tokens))])

    def await_content(self, blocks: list[tuple[int, str]]) -> None:
        """Wait until every worker has these blocks, each with its content, from another engine."""
        base.wait_for(lambda: all(worker.holds(*block) for worker in self.workers for block in blocks))

    def await_sent(self) -> list[Any]:
        return _awaited(self.worker_queue.get_finished_req)

    def close(self) -> None:
        self.workers = []
        messagers = [one for one in self.processes if _is_messager(one)]
        for process in messagers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(os.getpgid(process.pid), 9)  # as FastDeploy's engine ends them
            process.wait(base.TIMEOUT_S)
        super().close()
        if self._worker_queue_server is not None:
            self._worker_queue_server.cleanup()
        for runner in self.runners:
            runner.cache_kvs_map.clear()
            runner.share_inputs.clear()
        _remove_names(self.devices)


def _awaited(ask: Callable[[], list[Any]]) -> list[Any]:
    """What a queue of FastDeploy's has, as soon as it has something."""
    found: list[Any] = []

    def some() -> bool:
        found.extend(ask())
        return bool(found)

    base.wait_for(some)
    return found


class _Inputs(dict[str, Any]):
    """The worker's inputs of a step, of which the cache is one."""

    def reset_share_inputs(self) -> None:
        """Nothing of the cache is reset by it."""


def _backend() -> Any:
    """FastDeploy's attention backend, as far as it says what a block is."""
    backend = object.__new__(AppendAttentionBackend)
    backend.kv_num_heads, backend.block_size, backend.head_dim = base.HEADS, base.BLOCK_SIZE, base.DIM
    return backend


def _is_messager(process: Any) -> bool:
    return isinstance(getattr(process, "args", None), str) and "cache_messager.py" in process.args


def _remove_names(devices: list[int]) -> None:
    """Names of the double's memory that a killed process left, as FastDeploy's do; never a real GPU's."""
    for device in devices:
        for path in DIRECTORY.glob(f"*_caches_*_rank*.device{device}"):
            with contextlib.suppress(Exception):
                if read(path.name).startswith(b"transferd.fake-gpu."):
                    path.unlink()


@contextlib.contextmanager
def gpu_engine(**shape: Any) -> Iterator[GpuEngine]:
    made = GpuEngine(base.Shape(**shape))
    try:
        made.start()
        yield made
    finally:
        made.close()
