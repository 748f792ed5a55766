"""Write examples/trace.jsonl: a small trace in Mooncake's format, drawn from a seed. It is nobody's traffic.

    python scripts/make_trace.py [--check]

`--check` writes nothing and exits 1 if the file is not what this would write.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from transferd.cli.replay.trace import generated_workload

FILE = Path(__file__).parent.parent / "examples" / "trace.jsonl"
SEED, REQUESTS = 17, 240


def trace() -> bytes:
    encode = msgspec.json.Encoder().encode
    return b"".join(encode(request) + b"\n" for request in generated_workload(SEED, REQUESTS))


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(FILE.read_bytes() != trace())
    FILE.write_bytes(trace())
