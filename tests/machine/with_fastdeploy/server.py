"""In place of FastDeploy's API server, for its example scripts: `python -m …openai.api_server` runs this there.

    python -m tests.machine.with_fastdeploy.server --port 52400 --splitwise-role prefill …

It takes that server's flags, answers /health and /v1/chat/completions, and registers with FastDeploy's own router. Its
engine is that of these tests (engine.py): FastDeploy's manager and cache processes, no model. A prompt's tokens are
the bytes of its messages, and the answer is a text that follows from them; a worker fills blocks with bytes that follow
from their tokens and checks every block that is found.

PLACES   a JSON object in the environment: for each port the prefix of the engine's command (a network namespace) and
         its XDG_RUNTIME_DIR. The front stays where the script is, which asks at 0.0.0.0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MARKS = {"user": 1001, "assistant": 1002}  # tokens; others are bytes
ANSWER = "an answer that says: "
HEARTBEAT_S = 1.0


def prompt_of(messages: list[dict[str, str]]) -> list[int]:
    tokens: list[int] = []
    for message in messages:
        tokens += [MARKS[message["role"]], *message["content"].strip().encode()]
    return [*tokens, MARKS["assistant"]]


# --- the engine's process ------------------------------------------------------------------------------


def engine_process(options: argparse.Namespace) -> None:
    from tests.machine.with_fastdeploy.engine import engine

    role, backend = options.splitwise_role, options.kvcache_storage_backend
    with engine(role=role, backend=backend, gpu_blocks=2048, cpu_blocks=0, model=options.model) as made:
        made.config.cache_config.enable_output_caching = options.enable_output_caching
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            tokens = prompt_of(asked["messages"])
            text = (ANSWER * 100)[: max(asked.get("min_tokens", 0), 40)].strip()
            if role == "decode":
                decode(made, tokens, list(text.encode()))
                found = 0
            else:
                found = made.run(tokens)["storage_match_token_num"]
            print(json.dumps({"text": text, "prompt": len(tokens), "storage_match_token_num": found}), flush=True)
    print(json.dumps("ended"), flush=True)


def decode(made: Any, prompt: list[int], output: list[int]) -> None:
    """A request of a decode engine: blocks arrive from the prefill engine, more are computed, all are stored."""
    from types import SimpleNamespace

    from tests.machine.with_fastdeploy.engine import BLOCK_SIZE, chain

    contents = chain(prompt + output)
    blocks = made.manager.allocate_gpu_blocks(len(contents) + 1)
    for block, content in zip(blocks, contents, strict=False):
        for worker in made.workers:
            worker.fill(block, content)
    request = SimpleNamespace(
        request_id=f"decode-{time.monotonic_ns()}", prompt_token_ids=prompt, output_token_ids=output,
        multimodal_inputs=None, user="", block_tables=blocks,
    )  # fmt: skip
    made.manager.write_cache_to_storage_decode(request)
    made.manager.recycle_gpu_blocks(blocks, request.request_id)
    assert len(contents) * BLOCK_SIZE <= len(prompt) + len(output)


# --- the front -----------------------------------------------------------------------------------------


class Front:
    """Passes requests to the engine's process, one at a time."""

    def __init__(self, options: argparse.Namespace) -> None:
        place = json.loads(os.environ["PLACES"])[str(options.port)]
        command = [*place["prefix"], sys.executable, "-m", __spec__.name, "--engine", *sys.argv[1:]]
        environment = {**os.environ, "XDG_RUNTIME_DIR": place["runtime"]}
        # In a session of its own: it ends in order when this process has ended, with the end of its input.
        self.engine = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        self._lock = threading.Lock()
        self._told()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            assert self.engine.stdin is not None
            print(json.dumps(request), file=self.engine.stdin, flush=True)
            said: dict[str, Any] = self._told()
        print(f"storage_match_token_num {said['storage_match_token_num']} of {said['prompt']}", flush=True)
        return said

    def _told(self) -> Any:
        assert self.engine.stdout is not None
        for line in self.engine.stdout:
            if line[:1] in '{"':  # FastDeploy and Paddle print, too
                return json.loads(line)
        raise SystemExit("the engine's process has ended")


def serve(options: argparse.Namespace) -> None:
    front = Front(options)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            said = front.ask(request)
            choice = {
                "index": 0,
                "message": {"role": "assistant", "content": said.pop("text")},
                "finish_reason": "stop",
            }
            self._answer({"choices": [choice], "usage": said})

        def _answer(self, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("0.0.0.0", options.port), Handler)
    if options.router:
        threading.Thread(target=register, args=(options,), daemon=True).start()
    server.serve_forever()


def register(options: argparse.Namespace) -> None:
    """As FastDeploy's RegisterManager: again and again, so that a router that starts later knows us too."""
    said = {"role": options.splitwise_role, "host_ip": "127.0.0.1", "port": options.port, "transfer_protocol": ["rdma"]}
    request = urllib.request.Request(
        f"http://{options.router}/register", json.dumps(said).encode(), {"Content-Type": "application/json"}
    )
    while True:
        try:
            urllib.request.urlopen(request, timeout=5).close()
        except (urllib.error.URLError, OSError) as error:
            print(f"the router does not know us yet: {error}", flush=True)
        time.sleep(HEARTBEAT_S)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", action="store_true", help="be the engine's process")
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    for unused in ("max-model-len", "max-num-seqs", "metrics-port", "engine-worker-queue-port", "cache-queue-port"):
        parser.add_argument(f"--{unused}", type=int)
    parser.add_argument("--splitwise-role", default="mixed")
    parser.add_argument("--cache-transfer-protocol")
    parser.add_argument("--router")
    parser.add_argument("--enable-output-caching", action="store_true")
    parser.add_argument("--kvcache-storage-backend")
    options = parser.parse_args()
    (engine_process if options.engine else serve)(options)


if __name__ == "__main__":
    main()
