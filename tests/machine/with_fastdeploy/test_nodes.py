"""Two machines with FastDeploy's own settings for a pool: what one engine stores, the other reads with every byte.

The machines are network namespaces; the variables are those of FastDeploy's examples/cache_storage, which name no
address of a node.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.machine.rack.lab import MASTER, laboratory
from transferd.cli.pool.master import master_executable

pytestmark = pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed")

METADATA_PORT = 15002
PROGRAM = """
import sys
from tests.machine.with_fastdeploy.engine import engine
from tests.machine.with_fastdeploy.test_tiers import prompts
with engine(tp=2, role=sys.argv[1], backend="mooncake", gpu_blocks=16, cpu_blocks=0) as made:
    for tokens in prompts(2):
        print(made.run(tokens)["storage_match_token_num"], flush=True)
    made.settle()
    print("all", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(("first", "second"), [("mixed", "mixed"), ("prefill", "decode")])
def test_what_one_machine_stores_another_one_reads(place: Path, first: str, second: str) -> None:
    flags: tuple[str, ...] = ("--enable_http_metadata_server=true", "--http_metadata_server_host=0.0.0.0")
    flags += (f"--http_metadata_server_port={METADATA_PORT}",)
    with laboratory(place, 2, *flags) as lab, contextlib.ExitStack() as stack:
        said = {
            "MOONCAKE_MASTER_SERVER_ADDR": lab.master.address,
            "MOONCAKE_METADATA_SERVER": f"http://{MASTER}:{METADATA_PORT}/metadata",
            "MOONCAKE_GLOBAL_SEGMENT_SIZE": "64000000",
            "MOONCAKE_PROTOCOL": "tcp",  # the examples' is rdma
        }

        def node(number: int, role: str) -> list[str]:
            own = place / f"node{number}"
            own.mkdir()
            made = stack.enter_context(
                subprocess.Popen(
                    [*lab.prefix(lab._nodes[number]), sys.executable, "-c", PROGRAM, role],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, **said, "XDG_RUNTIME_DIR": str(own), "FD_LOG_DIR": str(own)},
                )
            )
            assert made.stdin is not None
            stack.callback(made.stdin.close)
            assert made.stdout is not None
            return [made.stdout.readline().strip() for _ in range(3)]

        assert node(1, first) == ["0", "0", "all"]
        assert {host.partition(":")[0] for host in lab.master.segments()} == {lab.address(1)}
        assert len(lab.master.segments()) == 2, "one for each rank"
        assert node(2, second) == ["40", "40", "all"]
