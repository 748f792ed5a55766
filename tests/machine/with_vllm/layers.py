"""What does TransferdConnector gain by loading layer by layer, while vLLM computes? (docs/adr/0092)

    PYTHON_WITH_VLLM -m tests.machine.with_vllm.layers [--repeats 5] [--heads 896 3520]    on a quiet machine

vLLM's real engine on the CPU, the model of benchmarks/vllm_offload.py, and prompts of a stored head and a new tail:

    now       the time to the first token: the head is loaded, then the tail is computed
    load      the load's part of that
    by layer  the time to the first token with `by_layer`: the tail is computed while the head is loaded
    in step   the same, but the daemon loads whole blocks: what it gains is that no step comes before and after the load
    tail      the time to the first token with the head in vLLM's own cache: only the tail is computed

All of them in turn, for each prompt and repeat, so that what else the machine does meets all of them; the first three
change places from turn to turn. gain: now - by layer (now - in step), as a part of now; of the medians, of the minima,
and the median over all turns. CPU: of engine and daemon; a busy machine changes it least.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.vllm_offload import MODEL
from tests.machine.with_vllm import play
from transferd.tasks import ReadStorageTask, Status, TaskResult

HEADS = (896, 3520)  # tokens
TAILS = (20, 250)
WAYS = ("now", "by layer", "in step")
PROMPTS = 3
Times = defaultdict[str, list[float]]


class Measured:
    """One engine, in this process."""

    def __init__(self, place: Path) -> None:
        from vllm import LLM, SamplingParams
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        chosen = {"keep_blocks_on_reset": True, "by_layer": True}
        self._llm: Any = LLM(
            model=str(play.tiny_model(place / "model", **MODEL)), load_format="dummy", skip_tokenizer_init=True,
            enforce_eager=True, dtype="float32", block_size=32, seed=0, gpu_memory_utilization=0.3,
            num_gpu_blocks_override=600, max_model_len=4096, max_num_seqs=1, max_num_batched_tokens=4096,
            kv_transfer_config=play.transfer("connector", chosen, witness=False), disable_log_stats=False,
        )  # fmt: skip
        self._ask = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True)
        scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        self._pool = scheduler.kv_cache_manager.block_pool
        self._scheduling, self._link = scheduler.connector._scheduling, scheduler.connector._link
        self._submit, self._link.submit = self._link.submit, self._watched
        self._took = 0.0
        loads = get_kv_transfer_group()._working.loads
        self._push, loads._submit, self._whole = loads._submit, self._pushed, False

    def first_token(self, prompt: list[int], cached: int) -> float:
        """Seconds to the first token. cached: how many of the prompt's tokens must not be computed."""
        (output,) = self._llm.generate([{"prompt_token_ids": prompt}], self._ask, use_tqdm=False)
        assert output.num_cached_tokens == cached, output.num_cached_tokens
        return float(output.metrics.first_token_latency)

    def settle(self) -> None:
        while self._scheduling._waiting or self._scheduling._running:
            self._llm.llm_engine.step()
            time.sleep(0.002)

    def round(self, head: list[int], tails: list[list[int]], times: Times) -> None:
        """Each of the times once. tails: new ones of equal length."""
        for name in WAYS[len(times["tail"]) % 3 :] + WAYS[: len(times["tail"]) % 3]:
            self._scheduling._by_layer, self._whole = name != "now", name == "in step"
            assert self._llm.reset_prefix_cache()
            worked = cpu_seconds()
            times[name].append(self.first_token(head + tails.pop(), len(head)))
            times[f"CPU {name}"].append(cpu_seconds() - worked)
            if name == "now":
                times["load"].append(self._took)
            self.settle()
        times["tail"].append(self.first_token(head + tails.pop(), len(head)))
        self.settle()

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    def _pushed(self, task: ReadStorageTask, *callbacks: Any) -> None:
        """What a step pushes itself."""
        self._push(msgspec.structs.replace(task, by_parts=msgspec.UNSET) if self._whole else task, *callbacks)

    def _watched(self, task: Any, done: Any) -> None:
        """Note how long a load takes."""
        began = time.perf_counter()

        def ended(result: TaskResult) -> None:
            if isinstance(task, ReadStorageTask):
                assert result.status is Status.OK, result
                self._took = time.perf_counter() - began
            done(result)

        self._submit(task, ended)


def gain(times: Mapping[str, float], way: str) -> float:
    return (times["now"] - times[way]) / times["now"]


def cpu_seconds() -> float:
    """Of this process and the daemon that it has started: of all their threads that are alive."""
    tasks = [Path("/proc/self/task")]
    tasks += [Path(f"/proc/{child.pid}/task") for child in psutil.Process().children()]
    return sum(int((task / "schedstat").read_text().split()[0]) for some in tasks for task in some.iterdir()) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--heads", type=int, nargs="*", default=HEADS, help="tokens; whole blocks")
    asked = parser.parse_args()
    draw = random.Random(1)
    with tempfile.TemporaryDirectory(prefix="tv.") as directory:
        place = Path(directory)
        os.environ |= play.ENVIRONMENT | {"XDG_RUNTIME_DIR": directory, "XDG_CACHE_HOME": str(place / "cache")}

        def tokens(count: int) -> list[int]:
            return [draw.randrange(3, 500) for _ in range(count)]

        engine = Measured(place)
        for size in asked.heads:
            heads = [tokens(size) for _ in range(PROMPTS)]
            for head in heads:
                engine.first_token(head, 0)
                engine.settle()
            for tail in TAILS:
                times: Times = defaultdict(list)
                for head in heads * asked.repeats:
                    engine.round(head, [tokens(tail) for _ in range(4)], times)
                print(f"head {size}, tail {tail} tokens, load average {os.getloadavg()[0]:.1f}")
                for name, of in (("median", statistics.median), ("least", min)):
                    ms = {what: 1e3 * of(values) for what, values in times.items()}
                    print(f"  {name}: " + ", ".join(f"{k} {v:.1f} ms" for k, v in ms.items()))
                    print(f"    gain {gain(ms, 'by layer'):.0%}, in step {gain(ms, 'in step'):.0%}")
                turns = [dict(zip(times, values, strict=True)) for values in zip(*times.values(), strict=True)]
                gains = [statistics.median(gain(turn, way) for turn in turns) for way in ("by layer", "in step")]
                print(f"  {len(turns)} turns: gain {gains[0]:.0%}, in step {gains[1]:.0%}", flush=True)
        engine.close()


if __name__ == "__main__":
    main()
