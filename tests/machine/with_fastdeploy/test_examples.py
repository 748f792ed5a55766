"""FastDeploy's own example scripts for storage and prefill/decode, as they are: every byte that they find is compared.

Bash runs the script, with its variables, its ports, its requests, Mooncake's master and FastDeploy's router. `python`
is a word on its path: the API server, which needs a model on a GPU, is server.py. Prefill hands blocks to decode by
RDMA there, which is not run; what both store and find in the pool is.

A script names one host. `nodes=2` changes that name alone, as its comment asks for, and puts the second engine into
another network namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fastdeploy
import pytest

from tests.machine.rack.lab import Lab, laboratory
from tests.machine.with_fastdeploy.engine import BLOCK_SIZE, wait_for
from tests.machine.with_fastdeploy.server import ANSWER
from transferd.cli.pool.master import master_executable

EXAMPLES = Path(fastdeploy.__file__).parents[1] / "examples" / "cache_storage"
pytestmark = [
    pytest.mark.skipif(not EXAMPLES.is_dir(), reason="FastDeploy's examples/cache_storage is not beside its package"),
    pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed"),
    pytest.mark.skipif(shutil.which("curl") is None or shutil.which("ss") is None, reason="no curl, or no ss"),
]
PYTHON = f"""#!/bin/bash
if [ "$2" = fastdeploy.entrypoints.openai.api_server ]; then
    exec {sys.executable} -m tests.machine.with_fastdeploy.server "${{@:3}}"
fi
exec {sys.executable} "$@"
"""
# Where each script names the master's host, and how.
HOSTS = {"run.sh": ("mooncake_config.json", "0.0.0.0"), "run_03b_pd_storage.sh": ("run_03b_pd_storage.sh", "127.0.0.1")}
PORTS = {"run.sh": (52700, 52800), "run_03b_pd_storage.sh": (52400, 52500)}
OUTPUT = 130  # tokens: the second script's min_tokens
TIMEOUT_S = 240


@contextlib.contextmanager
def ended(place: Path, lab: Lab, name: str, nodes: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A script that has come to its end, while its servers still run. Yields what it printed."""
    here = place / "cache_storage"
    shutil.copytree(EXAMPLES, here)
    (here / "stop.sh").write_text("")  # the script calls it, FastDeploy's tree has none
    if nodes == 2:
        file, host = here / HOSTS[name][0], HOSTS[name][1]
        assert host in file.read_text()
        if "localhost" in file.read_text():  # of release 2.5
            pytest.skip("this example names localhost as the node's own address")
        file.write_text(file.read_text().replace(host, lab.address(1)))
    words = place / "bin"
    words.mkdir()
    for word in ("python", "python3"):
        (words / word).write_text(PYTHON)
        (words / word).chmod(0o755)
    places = {}
    for number, port in enumerate(PORTS[name]):
        node = 1 + number * (nodes - 1)
        runtime = place / f"node{node}"
        runtime.mkdir(exist_ok=True)
        places[port] = {"prefix": lab.prefix(lab._nodes[node]), "runtime": str(runtime)}
    monkeypatch.setenv("PLACES", json.dumps(places))
    monkeypatch.setenv("PATH", os.pathsep.join([str(words), str(Path(sys.executable).parent), os.environ["PATH"]]))
    # The examples lend 50 GB and 1 GB.
    monkeypatch.setenv("TRANSFERD_STORAGE__MOONCAKE__GLOBAL_SEGMENT_SIZE", "256MiB")
    monkeypatch.setenv("TRANSFERD_WEIGHTS", "these")
    monkeypatch.delenv("FD_LOG_DIR")
    said = place / "said"
    with said.open("wb") as output:
        script = subprocess.Popen(
            [*lab.prefix(lab._nodes[1]), "bash", name], cwd=here, stdout=output, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    try:
        code = script.wait(TIMEOUT_S)
        text = said.read_text(errors="replace")
        assert code == 0, text[-3000:]
        yield text
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
        script.wait()
        wait_for(lambda: not engines(here))


def engines(place: Path) -> list[str]:
    """Processes that still run in this directory: they end when their script's have ended."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (entry / "cwd").readlink() == place and (entry / "stat").read_text().rpartition(")")[2].split()[
                0
            ] != "Z":
                found.append(entry.name)
    return found


@pytest.mark.parametrize("nodes", [1, 2])
def test_two_servers_share_a_pool(place: Path, monkeypatch: pytest.MonkeyPatch, nodes: int) -> None:
    """run.sh: what server 0 has computed, server 1 finds, but for the last tokens."""
    with laboratory(place, 2) as lab, ended(place, lab, "run.sh", nodes, monkeypatch) as said:
        answers = [json.loads(line) for line in re.findall(r'\{"choices".*?\}\}', said)]
        assert [answer["choices"][0]["message"]["content"][:10] for answer in answers] == [ANSWER[:10]] * 2
        first, second = [answer["usage"] for answer in answers]
        assert first["storage_match_token_num"] == 0
        assert second["prompt"] - 4 <= second["storage_match_token_num"] <= second["prompt"]


@pytest.mark.parametrize("nodes", [1, 2])
def test_prefill_finds_what_decode_has_stored(place: Path, monkeypatch: pytest.MonkeyPatch, nodes: int) -> None:
    """run_03b_pd_storage.sh: the second round's prefill finds the first round's answer, which decode has stored."""
    name = "run_03b_pd_storage.sh"
    if not (EXAMPLES / name).is_file():
        pytest.skip("this FastDeploy has no example of prefill and decode with storage")
    with laboratory(place, 2) as lab, ended(place, lab, name, nodes, monkeypatch) as said:
        assert "=== Test completed ===" in said
        found = (place / "cache_storage" / "log_prefill" / "nohup").read_text()
        rounds = re.findall(r"^storage_match_token_num (\d+) of (\d+)$", found, re.MULTILINE)
        (none, first), (matched, _) = [(int(match), int(length)) for match, length in rounds]
        assert none == 0
        # The first round's prompt is still in prefill's own GPU cache; only decode had the answer's tokens.
        assert matched == (first + OUTPUT) // BLOCK_SIZE * BLOCK_SIZE - first // BLOCK_SIZE * BLOCK_SIZE
