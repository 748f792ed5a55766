"""`make dynamo-check`: KV events as NVIDIA Dynamo's own indexer understands them.

    python -m tests.machine.with_dynamo.check [--python PYTHON]

Sets up an environment under build/dynamo (about 0.4 GB) and runs every test of this directory there. Where Dynamo's
runtime cannot be installed, that is said, and nothing fails.
"""

from __future__ import annotations

import sys

from tests.support.own_environment import GIB, OwnEnvironment

VERSION = "1.6.1"
DYNAMO = OwnEnvironment(
    "dynamo",
    1 * GIB,
    (
        (f"ai-dynamo-runtime=={VERSION}",),
        ("hypothesis>=6.100", "pytest>=8.2", "pytest-asyncio>=1.4", "pytest-timeout>=2.3"),
    ),
)

if __name__ == "__main__":
    sys.exit(DYNAMO.check(__doc__))
