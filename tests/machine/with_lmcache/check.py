"""`make lmcache-check`: the adapter under LMCache's own storage manager, on the CPU.

    python -m tests.machine.with_lmcache.check [--gains] [--python PYTHON]

Sets up an environment under build/lmcache (about 1.5 GB) and runs every test of this directory there. Where LMCache or
its torch cannot be installed, that is said, and nothing fails.

--gains    measure the adapter beside LMCache's own backends, and write the table of docs/lmcache.md; tests nothing
"""

from __future__ import annotations

import sys

from tests.support.own_environment import GIB, OwnEnvironment

VERSION = "0.5.6"
# LMCache asks for CUDA builds of what its CPU paths do not use; so its own list is not followed.
LMCACHE = OwnEnvironment(
    "lmcache",
    4 * GIB,
    (
        ("torch==2.13.0+cpu",),
        ("--no-deps", f"lmcache=={VERSION}"),
        (
            "aiofile", "aiofiles", "aiohttp", "awscrt", "blake3", "cachetools", "cryptography", "fastapi",
            "grpcio>=1.78", "httptools", "httpx", "msgspec", "numba", "numpy<=2.2.6", "nvtx",
            "opentelemetry-api<=1.40.0", "opentelemetry-exporter-otlp",
            "opentelemetry-exporter-prometheus<=0.61b0", "opentelemetry-sdk",
            "prometheus_client<=0.24.1", "protobuf<7", "psutil", "py-cpuinfo", "pytest>=8.2", "pyyaml", "pyzmq",
            "redis", "safetensors", "setuptools<81", "sortedcontainers", "transformers>=5.4", "uvicorn",
            "hypothesis>=6.100", "pytest-asyncio>=1.4", "pytest-timeout>=2.3",
        ),
    ),
    (("lmcache", ("benchmarks.peers", "--of", "lmcache")),),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(LMCACHE.check(__doc__))
