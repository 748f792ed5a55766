"""Runs vLLM's engine once, in this process and its workers.

    python -m tests.machine.with_vllm.play SCRIPT OUT    both are JSON

SCRIPT: {model, kind, notes, extra, llm, rounds: [[[token, …], …], …], max_tokens}
images: a prompt is [text, seed of an image, text] (images.py).
kind: "none", "tier", "connector", "fs", "obj" or "mooncake". real: weights that answers depend on. forget: the rounds,
from 0 on, after which vLLM's cache is emptied; all if not given. sleeps: after which of them vLLM sleeps, how deep, and
the version of the weights that it has then (None: none is named). zeroed: those in which loaded blocks are zeroed after
the load. wait: for a line of standard input after each round. alone: one prompt after another, timed by a probe. OUT:
for each round and prompt its tokens, logprobs, cached tokens and seconds.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.tiny_llama import TINY

# For all servers: vLLM looks at a model's class in a process that imports everything, and keeps here what it saw.
CACHE = Path(__file__).resolve().parents[3] / "build" / "vllm-cache"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CACHE_ROOT": str(CACHE), "TORCHDYNAMO_DISABLE": "1",  # vLLM compiles how it counts logprobs, eager or not
}  # fmt: skip


def path() -> str:
    """Where an engine's process finds the tests, and another vLLM than the environment's (check.py)."""
    return os.pathsep.join(one for one in (os.getcwd(), os.environ.get("TRANSFERD_VLLM_OVER", "")) if one)


def tiny_model(directory: Path, **other: Any) -> Path:
    """A model of two layers, or as `other` says; vLLM makes up its weights."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(TINY | other), encoding="ascii")
    return directory


def transfer(kind: str, extra: dict[str, Any], witness: bool) -> dict[str, Any] | None:
    """The value of --kv-transfer-config."""
    if kind == "none":
        return None
    if kind == "connector":
        return {
            "kv_connector": "WitnessConnector" if witness else "TransferdConnector",
            "kv_connector_module_path": "tests.machine.with_vllm.witness" if witness else "transferd.adapters.vllm",
            "kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra,
        }  # fmt: skip
    if kind == "mooncake":  # vLLM's own connector for Mooncake, over transferd's store
        from tests.support import as_mooncake

        sys.path.insert(0, as_mooncake.__path__[0])
        return {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    tier = {"type": kind} if kind in ("fs", "obj") else {
        "type": "WitnessTier" if witness else "TransferdTier",
        "module_path": "tests.machine.with_vllm.witness" if witness else "transferd.adapters.vllm",
    }  # fmt: skip
    pool = extra.pop("cpu_bytes_to_use", 64 * 2**20)
    return {
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec", "spec_module_path": "tests.machine.with_vllm.witness",
            "cpu_bytes_to_use": pool, "secondary_tiers": [tier | extra],
        },
    }  # fmt: skip


def play(script: dict[str, Any]) -> list[list[dict[str, Any]]]:
    from vllm import LLM, SamplingParams
    from vllm.model_executor.models import registry

    from tests.machine.with_vllm import forks, weights
    from tests.machine.with_vllm.probe import Probe

    form: Any = lambda tokens: {"prompt_token_ids": tokens}  # noqa: E731
    if script.get("images"):
        from tests.machine.with_vllm import images

        images.write_processors(script["model"])
        form = lambda parts: images.prompt(*parts)  # noqa: E731
    forks.use()
    if script.get("real"):
        weights.use()
    registry._run_in_subprocess = lambda look: look()  # else every new class of models costs half a minute of a core
    options = {
        "gpu_memory_utilization": 0.3,
        "num_gpu_blocks_override": 80,
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "dtype": "float32",
        "block_size": 32,
    } | script.get("llm", {})
    llm = LLM(
        model=script["model"], load_format="dummy", skip_tokenizer_init=not script.get("images"), enforce_eager=True,
        seed=0, kv_transfer_config=transfer(script["kind"], _extra(script), "notes" in script),
        disable_log_stats=False, **options,
    )  # fmt: skip
    ask = SamplingParams(
        temperature=0, max_tokens=script.get("max_tokens", 8), detokenize=False, ignore_eos=True, logprobs=0
    )
    rounds = []
    alone = script.get("alone", False)
    probe = Probe(llm) if alone else None
    for number, prompts in enumerate(script["rounds"]):
        os.environ["TRANSFERD_ZEROED"] = "1" if number in script.get("zeroed", ()) else ""
        before, worked = time.monotonic(), _cpu_seconds()
        outputs = []
        for together in [[prompt] for prompt in prompts] if alone else [prompts]:
            outputs += llm.generate([form(prompt) for prompt in together], ask, use_tqdm=False)
        seconds = time.monotonic() - before
        rounds.append([_told(output, seconds) | {"cpu": _cpu_seconds() - worked} for output in outputs])
        if number in script.get("forget", range(len(script["rounds"]))):
            _forget(llm)
        if str(number) in script.get("sleeps", {}):
            _sleep(llm, *script["sleeps"][str(number)])
        if probe is not None:
            rounds[-1][0]["seen"] = probe.take()
        print("PLAYED", len(rounds), flush=True)
        if script.get("wait"):
            sys.stdin.readline()
    collector: Any = gc  # when it ends, vLLM looks three times at all that was imported
    collector.collect = collector.unfreeze = lambda *_: 0
    llm.llm_engine.engine_core.shutdown()
    return rounds


def _extra(script: dict[str, Any]) -> dict[str, Any]:
    """The adapter's settings. The scripts reset vLLM's caches to load again, with the same weights."""
    kept: dict[str, Any] = {"keep_blocks_on_reset": True} if script["kind"] in ("connector", "tier") else {}
    return {**kept, **script.get("extra", {})}


def _forget(llm: Any) -> None:
    """Empty the GPU's cache and vLLM's host pool, once nothing moves any more."""
    give_up = time.monotonic() + 10
    while not llm.reset_prefix_cache(reset_connector=True) and time.monotonic() < give_up:
        time.sleep(0.05)
        llm.llm_engine.step()


def _sleep(llm: Any, level: int, version: str | None) -> None:
    """Sleep, wake up and name new weights, as a training loop does (`update_weights`, `finish_weight_update`)."""
    llm.sleep(level)
    llm.wake_up(tags=["weights"])
    if version is not None:
        llm.llm_engine.set_weight_version(version)
    llm.wake_up(tags=["kv_cache"])


def _cpu_seconds() -> float:
    """Of this process and of all that it has started, the daemon too."""
    import psutil

    me = psutil.Process()
    return sum(sum(one.cpu_times()[:2]) for one in (me, *me.children(recursive=True)))


def _told(output: Any, seconds: float) -> dict[str, Any]:
    answer = output.outputs[0]
    return {
        "tokens": list(answer.token_ids),
        "logprobs": [next(iter(place.values())).logprob for place in answer.logprobs],
        "cached": output.num_cached_tokens,
        "seconds": seconds,
        "ttft": output.metrics.first_token_latency if output.metrics else None,
        "decode": output.metrics.last_token_ts - output.metrics.first_token_ts if output.metrics else None,
    }


def main() -> None:
    script = json.loads(Path(sys.argv[1]).read_text(encoding="ascii"))
    if "notes" in script:
        os.environ["TRANSFERD_WITNESS"] = script["notes"]
    Path(sys.argv[2]).write_text(json.dumps(play(script)), encoding="ascii")


if __name__ == "__main__":
    main()
