"""vLLM's API server with the argument of docs/vllm.md, started, stopped and started again as an operator would.

A server stops its engine with SIGKILL, and the daemon that the engine had started as well. Only the connector can be
served on a CPU: vLLM's own copies, which a tier needs, refuse one.
"""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

import pytest

from tests.machine.with_vllm import play
from tests.machine.with_vllm.engine import START_S, witnessed
from tests.machine.with_vllm.witness import NOTES
from transferd import SyncClient

pytestmark = pytest.mark.timeout(1200)

ROOT = Path(__file__).parents[3]
PROMPT = [3 + 7 * i % 400 for i in range(300)]
BLOCK, WHOLE = 32, 9  # tokens of a block; whole blocks of the prompt


def documented() -> dict[str, Any]:
    """The connector's argument in docs/vllm.md."""
    arguments = re.findall(r"--kv-transfer-config '(\{.*?\})'\n", (ROOT / "docs/vllm.md").read_text(encoding="utf-8"))
    [found] = [tree for tree in map(json.loads, arguments) if tree["kv_connector"] == "TransferdConnector"]
    return dict(found)


class Server:
    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self._process, self._port, self._log = process, port, log

    def wait(self) -> None:
        give_up = time.monotonic() + START_S
        while True:
            try:
                self._get("/health")
                return
            except OSError:
                assert self._process.poll() is None, self._log.read_text(errors="replace")[-3000:]
                assert time.monotonic() < give_up, "the server does not come up"
                time.sleep(0.5)

    def ask(self, prompt: Sequence[int] = PROMPT, rank: int = 0, **limits: int) -> list[int]:
        """The answer's tokens. rank: of the data-parallel engine to ask. limits: in kv_transfer_params."""
        asked = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True, "detokenize": False}
        body = json.dumps(asked | ({"kv_transfer_params": limits} if limits else {})).encode()
        kind = {"Content-Type": "application/json", "X-data-parallel-rank": str(rank)}
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}/v1/completions", body, kind)
        with urllib.request.urlopen(request, timeout=120) as answer:
            tokens: list[int] = json.load(answer)["choices"][0]["token_ids"]
        return tokens

    def metric(self, name: str, rank: int = 0) -> float:
        found = re.search(rf"^{name}_total\{{engine=\"{rank}\".*\}} (\S+)$", self._get("/metrics"), re.MULTILINE)
        return 0.0 if found is None else float(found[1])

    def named_memory(self) -> list[str]:
        """Files in /dev/shm that torch made for a process of this server's session."""
        made = [(int(path.name.split("_")[1]), path.name) for path in Path("/dev/shm").glob("torch_[0-9]*_*")]
        return [name for pid, name in made if _session(pid) == self._process.pid]

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=10) as answer:
            text: str = answer.read().decode()
        return text


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


@contextmanager
def serving(place: Path, argument: dict[str, Any], ranks: int = 1) -> Iterator[Server]:
    """A server, which is told to stop (SIGTERM) at the end. ranks: of data-parallel engines, which are forks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {"XDG_RUNTIME_DIR": str(place), "XDG_CACHE_HOME": str(place / "cache"), "PYTHONPATH": play.path()}
    variables |= {NOTES: str(place / "notes")}
    command = [
        sys.executable, "-m", *(["tests.machine.with_vllm.forks"] if ranks > 1 else []),
        "vllm.entrypoints.openai.api_server",
        "--model", str(play.tiny_model(place / "model")), "--load-format", "dummy", "--skip-tokenizer-init",
        "--host", "127.0.0.1", "--port", str(port),
        "--max-model-len", "512", "--num-gpu-blocks-override", "64", "--block-size", str(BLOCK),
        "--enforce-eager", "--kv-transfer-config", json.dumps(argument),
        *(["--data-parallel-size", str(ranks), "--distributed-executor-backend", "uni"] if ranks > 1 else []),
    ]  # fmt: skip
    log, environment = place / "server.log", os.environ | play.ENVIRONMENT | variables
    with log.open("ab") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    server = Server(process, port, log)
    try:
        server.wait()
        yield server
        process.terminate()
        assert process.wait(120) == 0
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_server_that_is_stopped_leaves_nothing_and_the_next_one_loads_what_it_stored(place: Path) -> None:
    argument = documented()
    witness = {"kv_connector": "WitnessConnector", "kv_connector_module_path": "tests.machine.with_vllm.witness"}
    (place / "notes").mkdir()
    with serving(place, argument | witness) as server:
        first = server.ask()
        give_up = time.monotonic() + 120
        while server.metric("vllm:transferd_blocks_saved") < WHOLE:  # the engine tells at a step that follows the save
            assert time.monotonic() < give_up
            assert server.ask() == first
        assert server.named_memory() == [], "what has a name stays behind when its process is killed"
    with serving(place, argument | witness) as server:
        assert server.ask() == first
        assert server.metric("vllm:external_prefix_cache_hits") == WHOLE * BLOCK
        assert server.metric("vllm:transferd_blocks_loaded") == WHOLE
        assert server.metric("vllm:transferd_blocks_not_loaded") == 0
    stored, loaded = witnessed(place)
    assert stored >= WHOLE
    assert loaded == WHOLE
    said = [line for line in (place / "server.log").read_text(errors="replace").splitlines() if "transferd" in line]
    assert any("so this engine started one" in line for line in said)
    assert not [line for line in said if "still waiting" in line], "a start of our own is no reason to worry"


@pytest.mark.timeout(3600)
def test_two_data_parallel_engines_of_one_name_share_a_daemon_and_load_each_others_blocks(place: Path) -> None:
    witness = {"kv_connector": "WitnessConnector", "kv_connector_module_path": "tests.machine.with_vllm.witness"}
    argument = documented() | witness | {"kv_connector_extra_config": {"name": "fleet"}}
    (place / "notes").mkdir()
    asked = [[3 + (11 * i + 7 * number) % 400 for i in range(150)] for number in range(8)]
    with serving(place, argument, ranks=2) as server:
        with SyncClient(f"ipc://{daemon_socket(place)}", await_ready=False) as client:
            assert set(client.stats()["engines"]) == {"fleet-dp0", "fleet-dp1"}
        first = [server.ask(prompt, rank=number % 2) for number, prompt in enumerate(asked)]
        for rank in (0, 1):
            give_up = time.monotonic() + 120
            while server.metric("vllm:transferd_blocks_saved", rank) < 16:
                assert time.monotonic() < give_up
                server.ask(asked[rank][:40], rank)
        assert [server.ask(prompt, rank=1 - number % 2) for number, prompt in enumerate(asked)] == first
        unsaved = [7 + 13 * i % 390 for i in range(150)]
        server.ask(unsaved, rank=0, max_offload_tokens=0)
        server.ask(unsaved, rank=1)
        server.ask(asked[0] + asked[1], rank=0, max_load_tokens=0)
        loaded = [server.metric("vllm:transferd_blocks_loaded", rank) for rank in (0, 1)]
        assert loaded == [16, 16], "what the other one has stored, and not what a request would not store or load"
    stored, noted = witnessed(place)
    assert stored >= 32
    assert noted == 32


def daemon_socket(place: Path) -> Path:
    """The socket of the daemon that an engine has started; one of them, because both use it."""
    (found,) = place.glob("transferd-vllm-*/*.sock")
    return found
