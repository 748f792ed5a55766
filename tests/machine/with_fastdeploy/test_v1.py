"""FastDeploy's V1 cache manager with its storage on a daemon: one variable, as with the older manager.

The scheduler and the workers are FastDeploy's classes, in processes of their own. What copies between device and host
needs a GPU, so host memory is filled here. With $TRANSFERD_FASTDEPLOY/v1/staging_manager.py, FastDeploy's newer file
packs the layers of a block; without it, objects are of one layer each, as its other branch has them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fastdeploy import envs

from transferd.adapters.fastdeploy import plugin
from transferd.cli.pool.local import Master
from transferd.cli.pool.master import master_executable

pytestmark = pytest.mark.skipif(not hasattr(envs, plugin.V1_MANAGER), reason="this FastDeploy has no V1 cache manager")

PROGRAM = """
import ctypes, importlib.util, json, sys
from pathlib import Path
from types import SimpleNamespace
import numpy as np
from fastdeploy.cache_manager.v1 import cache_manager, transfer_manager

order = json.loads(sys.argv.pop())
planes, blocks, layers = order["planes"], order["blocks"], 3
cache = SimpleNamespace(
    kvcache_storage_backend=order["backend"], cache_dtype="bfloat16", block_size=4, num_cpu_blocks=len(blocks),
    total_block_num=8, enable_prefix_caching=True, write_policy="write_through", write_through_threshold=1,
    model_cfg=None,
)
config = SimpleNamespace(
    cache_config=cache, quant_config=None, parallel_config=None, model_config=SimpleNamespace(num_hidden_layers=layers),
)
if order["role"] == "scheduler":
    scheduler = cache_manager.CacheManager(config).storage_scheduler
    print(json.dumps({"class": type(scheduler).__name__, "there": scheduler.batch_exists(order["probes"])}))
    scheduler.disconnect()
    sys.exit()

rank = order["rank"]
connector = transfer_manager.create_storage_connector(cache, tp_rank=rank)
assert connector.connect()
host = {name: np.zeros((layers, len(blocks), size), dtype=np.uint8) for name, size in planes.items()}
kept = []


def alloc(nbytes):
    kept.append(np.zeros(nbytes, dtype=np.uint8))
    return kept[-1].ctypes.data


def contents(name, block):
    seed = [rank, list(planes).index(name), block]
    return np.random.default_rng(seed).integers(0, 256, (layers, planes[name]), dtype=np.uint8)


def packed():
    spec = importlib.util.spec_from_file_location("staging_manager", order["staging"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    import fastdeploy.cache_manager.ops as ops
    ops.cuda_host_alloc = alloc
    staging = module.StagingManager(connector, staging_batch_size=4)
    staging.initialize(layers, planes)
    keys = {name: [f"{block}_{rank}_{name}" for block in blocks] for name in planes}
    pointers = {name: [int(array[layer].ctypes.data) for layer in range(layers)] for name, array in host.items()}
    deed = staging.batch_set_block if order["deed"] == "set" else staging.batch_get_block
    return deed(keys, pointers, list(range(len(blocks))))


def single():
    names, pointers, sizes = [], [], []
    for i, block in enumerate(blocks):
        for layer in range(layers):
            for name in planes:
                names.append(f"{block}_{rank}_{name}" + (f"_{layer}" if layer else ""))
                pointers.append(int(host[name][layer][i].ctypes.data))
                sizes.append(planes[name])
    done = getattr(connector, f"batch_{order['deed']}")(names, pointers, sizes)
    each = layers * len(planes)
    return [all(done[i * each : (i + 1) * each]) for i in range(len(blocks))]


if order["deed"] == "set":
    for name, array in host.items():
        for block in range(len(blocks)):
            array[:, block] = contents(name, block)
done = packed() if order["staging"] else single()
if order["deed"] == "get":
    for name, array in host.items():
        for block, there in enumerate(done):
            wanted = contents(name, block) if there else np.zeros_like(array[:, block])
            assert np.array_equal(array[:, block], wanted), name
connector.disconnect()
print(json.dumps({"class": type(connector).__name__, "done": done}))
"""
PLANES = {
    "gqa": {"key": 512, "value": 512},
    "fp8": {"key": 256, "value": 256, "key_scale": 16, "value_scale": 16},
    "dsa": {"key": 2624, "indexer": 528},
}
BLOCKS = [f"{number:064x}" for number in range(10)]


def told(**order: Any) -> dict[str, Any]:
    """What a process of FastDeploy's with the plugin and the V1 manager says at its end."""
    staging = Path(os.environ.get("TRANSFERD_FASTDEPLOY", "/nowhere")) / "v1" / "staging_manager.py"
    whole = {"blocks": BLOCKS, "staging": str(staging) if staging.is_file() else ""} | order
    options = ["--model", "/models/some-model", "--tensor_parallel_size", "2", json.dumps(whole)]
    environment = {**os.environ, plugin.V1_MANAGER: "1"}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, *options],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=environment,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    said: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return said | {"stderr": run.stderr}


@pytest.fixture(autouse=True)
def engine_of_its_own(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that outlives each process of a test, as another engine's would keep the daemon."""
    monkeypatch.setenv("TRANSFERD_FASTDEPLOY_ENGINE", "one")
    monkeypatch.setenv("TRANSFERD_WEIGHTS", "these")


@pytest.mark.parametrize(("backend", "family"), [("file", "dsa"), ("attention_store", "fp8"), ("mooncake", "gqa")])
def test_what_a_worker_stored_the_next_one_loads_with_every_byte(
    place: Path, monkeypatch: pytest.MonkeyPatch, backend: str, family: str
) -> None:
    if backend == "mooncake":
        if master_executable() is None:
            pytest.skip("Mooncake's master is not installed")
        master = Master(place / "master.log")
        monkeypatch.setenv("MOONCAKE_MASTER_SERVER_ADDR", master.address)
        monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", str(64 * 1024**2))
    work = {"backend": backend, "planes": PLANES[family]}
    stay = ["import sys", "from transferd.adapters.fastdeploy.companion import for_objects"]
    stay += [f"made = for_objects({backend!r})", "made.await_answer()", "print('up', flush=True)", "sys.stdin.read()"]
    with (
        master if backend == "mooncake" else open(os.devnull) as _,
        subprocess.Popen(
            [sys.executable, "-c", "\n".join(stay)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other,
    ):
        assert other.stdout is not None
        assert other.stdout.readline() == "up\n", "another engine of the node, which keeps the daemon"
        for rank in range(2):
            wrote = told(role="worker", deed="set", rank=rank, **work)
            assert wrote["class"] == "TransferdConnector"
            assert all(wrote["done"])
        for rank in range(2):
            assert all(told(role="worker", deed="get", rank=rank, **work)["done"])
        assert told(role="worker", deed="get", rank=0, **work | {"blocks": ["new"]})["done"] == [False]
        other.communicate()
    assert ("AttentionStore hears nothing" in wrote["stderr"]) is (backend == "attention_store")


def test_the_scheduler_sees_what_workers_have_stored(place: Path) -> None:
    code = PROGRAM.replace("connector.disconnect()\nprint", "print").replace(
        '"done": done}))', '"done": done}), flush=True)\nsys.stdin.read()'
    )
    order = {
        "role": "worker",
        "deed": "set",
        "rank": 0,
        "backend": "file",
        "planes": PLANES["dsa"],
        "blocks": BLOCKS,
        "staging": "",
    }
    with subprocess.Popen(
        [sys.executable, "-c", code, "--model", "/models/some-model", json.dumps(order)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, plugin.V1_MANAGER: "1"},
    ) as worker:  # fmt: skip
        assert worker.stdout is not None
        assert all(json.loads(worker.stdout.readline())["done"])
        probes = [f"{block}_0_key" for block in [*BLOCKS, "new"]]
        seen = told(role="scheduler", backend="file", planes=PLANES["dsa"], probes=probes)
        worker.communicate()
    assert seen["class"] == "TransferdScheduler"
    assert seen["there"] == [True] * len(BLOCKS) + [False]
