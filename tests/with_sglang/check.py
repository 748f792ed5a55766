"""`make sglang-check`: the adapter on SGLang's own host pools, on the CPU.

    python -m tests.with_sglang.check [--python PYTHON]

Sets up an environment under build/sglang (about 3 GB) and runs every test of this directory there. Where SGLang or its
torch cannot be installed, that is said, and nothing fails.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.own_environment import GIB, OwnEnvironment

WITHOUT_DEPENDENCIES = ("sglang==0.5.23", "torchvision==0.28.0", "apache-tvm-ffi==0.1.11", "timm==1.0.25", "easydict")
SGLANG = OwnEnvironment(
    "sglang",
    6 * GIB,
    (("-r", str(Path(__file__).parent / "requirements.txt")), ("--no-deps", *WITHOUT_DEPENDENCIES)),
)

if __name__ == "__main__":
    sys.exit(SGLANG.check(__doc__))
