"""SGLang's real server as a process, with the arguments of docs/sglang.md, and what a client sees of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.tiny_llama import TINY

ROOT = Path(__file__).parents[3]
NOTES = "TRANSFERD_WITNESS"  # environment: the directory that witnesses note in
STORED, LOADED, COMPUTED = "stored", "loaded", "computed"  # what they note of pages
KILL = "kill"  # a file there: an order for witness.py
START_S = 900.0  # on a busy machine; 30 s on a quiet one
ASK_S = 300.0
PAGE = 16  # tokens
ADMIN_KEY = "of-the-operator"
NEAR = 1e-4  # of a log probability
ON_THE_CPU = (
    "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend",
    "none", "--skip-server-warmup", "--skip-tokenizer-init", "--sleep-on-idle", "--page-size", str(PAGE),
    "--context-length", "4096", "--hicache-ratio", "2", "--hicache-write-policy", "write_through",
    "--dtype", "float32", "--hicache-storage-prefetch-policy", "wait_complete",
    # --max-total-tokens bounds the pool. SGLang takes memory that others use meanwhile for its own weights, and gives
    # up where that is more than this part of what was free before
    "--mem-fraction-static", "0.5",
)  # fmt: skip
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1",
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "tests.machine.with_sglang.models",
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",  # one thread, one order of additions
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",  # of two ranks; more than the machine has of NUMA nodes
    "TORCHDYNAMO_DISABLE": "1",  # else the first request waits for a compiler
    # SGLang compiles its hash of pages at the first look-up, once; a flush meanwhile ends the server
    "TORCH_EXTENSIONS_DIR": str(ROOT / "build" / "sglang-extensions"),
}  # fmt: skip


def documented() -> tuple[list[str], dict[str, Any]]:
    """The arguments in docs/sglang.md after the model, and the JSON that follows them."""
    text = (ROOT / "docs" / "sglang.md").read_text(encoding="utf-8")
    [(arguments, extra)] = re.findall(r"launch_server --model-path MODEL (.* --hicache.*) '(\{.*\})'\n", text)
    return arguments.split(), json.loads(extra)


def tiny_model(directory: Path, **other: Any) -> Path:
    """A model with random weights, the same at every call."""
    import torch
    from safetensors.torch import save_file

    shape: dict[str, Any] = TINY | other
    hidden, inner, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    sizes = {"model.embed_tokens": (shape["vocab_size"], hidden), "lm_head": (shape["vocab_size"], hidden)}
    for layer in range(shape["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        sizes |= {f"{name}.self_attn.{one}_proj": (keys, hidden) for one in "kv"}
        sizes[f"{name}.self_attn.q_proj"] = (queries, hidden)
        sizes |= {f"{name}.self_attn.o_proj": (hidden, queries), f"{name}.mlp.down_proj": (hidden, inner)}
        sizes |= {f"{name}.mlp.{one}_proj": (inner, hidden) for one in ("gate", "up")}
    random = torch.Generator().manual_seed(20)
    weights = {f"{name}.weight": torch.randn(size, generator=random) * 0.08 for name, size in sizes.items()}
    norms = ["model.norm"] + [
        f"model.layers.{layer}.{one}_layernorm"
        for layer in range(shape["num_hidden_layers"])
        for one in ("input", "post_attention")
    ]
    weights |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    directory.mkdir(exist_ok=True)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(shape), encoding="ascii")
    return directory


def tiny_adapter(directory: Path, seed: int) -> Path:
    """A LoRA adapter of the tiny model with random weights, strong enough that every answer shows it."""
    import torch
    from safetensors.torch import save_file

    tiny: dict[str, Any] = TINY
    hidden, rank = tiny["hidden_size"], 8
    sizes = {"q": tiny["num_attention_heads"] * tiny["head_dim"], "v": tiny["num_key_value_heads"] * tiny["head_dim"]}
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(tiny["num_hidden_layers"]):
        for one, out in sizes.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{one}_proj"
            weights[f"{name}.lora_A.weight"] = torch.randn((rank, hidden), generator=random)
            weights[f"{name}.lora_B.weight"] = torch.randn((out, rank), generator=random) * 0.1
    directory.mkdir(exist_ok=True)
    save_file(weights, directory / "adapter_model.safetensors", {"format": "pt"})
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(about), encoding="ascii")
    return directory


@dataclass(frozen=True, slots=True)
class Answer:
    """tokens, logprobs: of the answer. read: log probabilities of the prompt's tokens after its last whole page.

    cached: tokens of the prompt that were not computed. seconds: until the answer was whole.
    """

    tokens: list[int]
    logprobs: list[float]
    read: list[float]
    cached: int
    seconds: float = dataclasses.field(compare=False)

    def like(self, other: Answer) -> bool:
        """Whether the same was computed, in batches of other requests perhaps: additions then have another order."""
        mine, its = ([*one.logprobs, *one.read] for one in (self, other))
        near = len(mine) == len(its) and all(abs(a - b) < NEAR for a, b in zip(mine, its, strict=True))
        return near and self.tokens == other.tokens


@dataclass(frozen=True, slots=True)
class Storage:
    """HiCache's arguments, the JSON of its storage, environment variables, and the argument that has the JSON."""

    arguments: Sequence[str]
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    section: str = "--hicache-storage-backend-extra-config"


def of_transferd(
    backend: str = "WitnessHiCache", module: str = "tests.machine.with_sglang.witness", **extra: Any
) -> Storage:
    """What docs/sglang.md has, with another class and with further keys."""
    arguments, documented_extra = documented()
    chosen = {"module_path": module, "class_name": backend, "prefetch_threshold": PAGE}
    return Storage(arguments[:-1], documented_extra | chosen | extra)


LINKER = "--unified-cache-external-linker-config"


def of_linker(**extra: Any) -> Storage:
    """What docs/sglang.md has of the external linker, with further keys."""
    text = (ROOT / "docs" / "sglang.md").read_text(encoding="utf-8")
    [(arguments, config)] = re.findall(rf"launch_server --model-path MODEL (.*) {LINKER} '(\{{.*\}})'\n", text)
    return Storage(arguments.split(), json.loads(config) | {"linker_extra_config": extra}, section=LINKER)


class Server:
    """place: where it keeps everything. more: further arguments."""

    def __init__(self, place: Path, model: Path, storage: Storage, more: Sequence[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.place, self.notes = place, place / "notes"
        self.notes.mkdir(exist_ok=True)
        keys = [storage.section, json.dumps(storage.extra)] if storage.extra else []
        command = [
            sys.executable, "-m", "tests.machine.with_sglang.server", "--model-path", str(model), "--host", "127.0.0.1",
            "--port", str(self._port), *storage.arguments, *keys, *ON_THE_CPU, *more,
        ]  # fmt: skip
        variables = {"XDG_RUNTIME_DIR": str(place), "XDG_CACHE_HOME": str(place / "cache"), NOTES: str(self.notes)}
        self._log = place / f"server-{self._port}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env=os.environ | ENVIRONMENT | variables | storage.variables | {"PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=log,
                cwd=place,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait(self) -> None:
        give_up = time.monotonic() + START_S
        while True:
            try:
                self._post("/health", method="GET")
                return
            except OSError:
                assert self.process.poll() is None, self.log[-5000:]
                assert time.monotonic() < give_up, self.log[-5000:]
                time.sleep(0.2)

    def ask(self, prompt: Sequence[int], tokens: int = 4, adapter: str | None = None) -> Answer:
        """adapter: the name of a LoRA adapter. Raises OSError if the request fails."""
        asked = {
            "input_ids": list(prompt),
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": (len(prompt) - 1) // PAGE * PAGE,
            **({"lora_path": adapter} if adapter else {}),
        }
        began = time.monotonic()
        found = json.loads(self._post("/generate", asked))
        about = found["meta_info"]
        return Answer(
            found["output_ids"],
            [one[0] for one in about["output_token_logprobs"]],
            [one[0] for one in about["input_token_logprobs"][1:]],  # of the first one it says nothing
            about["cached_tokens"],
            time.monotonic() - began,
        )

    def forget(self) -> None:
        """Empty SGLang's own caches, on device and host. It refuses while a request runs, and stores first."""
        assert "flushed" in self._post("/flush_cache?timeout=60").lower()

    def clear(self) -> None:
        """Have SGLang remove what is stored."""
        self._post("/hicache/storage-backend/clear")

    def attach(self, storage: Storage) -> None:
        """Give a running server its storage, as an operator does; the server has ADMIN_KEY."""
        asked = {
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config_json": json.dumps(storage.extra),
            "hicache_storage_prefetch_policy": "wait_complete",
            "hicache_write_policy": "write_through",
        }
        self._post("/hicache/storage-backend", asked, method="PUT")

    def detach(self) -> None:
        self._post("/hicache/storage-backend", method="DELETE")

    def forget_notes(self) -> None:
        for file in self.notes.glob("*.jsonl"):
            file.unlink()

    def daemon(self) -> int:
        """The pid of the daemon that it started last."""
        return int(re.findall(r"started one: pid (\d+)", self.log)[-1])

    def runs_daemon(self) -> bool:
        """Whether a daemon lives that it has started."""
        started = re.findall(r"started one: pid (\d+)", self.log)
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return bool(started) and Path(f"/proc/{started[-1]}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        return False

    def noted(self, what: str) -> list[tuple[str, str]]:
        """Keys and digests of pages, in the order of the notes of this server's process and of those before it."""
        return noted(self.notes, what)

    def stop(self) -> None:
        """As an operator does, with SIGTERM."""
        self.process.terminate()
        self.process.wait(120)

    def kill(self) -> None:
        """All of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _post(self, path: str, body: Any = None, method: str = "POST") -> str:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"}
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=ASK_S) as answer:
            text: str = answer.read().decode()
        return text


def noted(directory: Path, what: str) -> list[tuple[str, str]]:
    lines = [json.loads(line) for file in sorted(directory.glob("*.jsonl")) for line in file.read_text().splitlines()]
    return [(key, digest) for kind, key, digest in lines if kind == what]


@contextmanager
def serving(place: Path, model: Path, backend: str = "WitnessHiCache", *more: str, **extra: Any) -> Iterator[Server]:
    with started(place, model, of_transferd(backend, **extra), more) as server:
        yield server


@contextmanager
def started(place: Path, model: Path, storage: Storage, more: Sequence[str]) -> Iterator[Server]:
    server = Server(place, model, storage, more)
    try:
        server.wait()
        yield server
    except OSError:  # a request has failed: say why
        print(server.log[-5000:])
        raise
    finally:
        server.kill()
