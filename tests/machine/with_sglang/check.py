"""`make sglang-check`: the adapter on SGLang's own host pools and under its real server, on the CPU.

    python -m tests.machine.with_sglang.check [--gains] [--python PYTHON]

Sets up an environment under build/sglang (about 3.5 GB) and runs every test of this directory there. Where SGLang or
its torch cannot be installed, that is said, and nothing fails.

--gains    measure what SGLang gains, and write the tables of docs/sglang.md; tests nothing
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.own_environment import GIB, OwnEnvironment

WITHOUT_DEPENDENCIES = ("sglang==0.5.23", "torchvision==0.28.0", "apache-tvm-ffi==0.1.11", "timm==1.0.25", "easydict")
MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"  # for --gains
SGLANG = OwnEnvironment(
    "sglang",
    6 * GIB,
    (("-r", str(Path(__file__).parent / "requirements.txt")), ("--no-deps", *WITHOUT_DEPENDENCIES, MOONCAKE)),
    (
        ("sglang_first_token", ("benchmarks.sglang_first_token",)),
        ("hicache", ("benchmarks.peers", "--of", "hicache")),
    ),
)

if __name__ == "__main__":
    sys.exit(SGLANG.check(__doc__))
