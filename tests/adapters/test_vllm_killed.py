"""An engine that is killed halfway through a load leaves a clean daemon, and the next one loads every block.

The processes have the adapter's link and memory, and no vLLM; tests/machine/with_vllm/test_engine.py has it with vLLM.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.machine.with_vllm.held import HoldingDaemon, holding
from tests.support import kv_engine

pytestmark = pytest.mark.one_loop

LEAST_CLIENT_TIMEOUT_S = 2.5  # that the daemon accepts


def engine(daemon: HoldingDaemon, kind: str, deed: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.support.kv_engine", daemon.endpoint, kind, deed]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def digests(process: subprocess.Popen[bytes]) -> dict[str, str]:
    """What the engine printed at its end."""
    said, _ = process.communicate(timeout=kv_engine.WAIT_S)
    found: dict[str, str] = json.loads(said)
    return found


@pytest.mark.parametrize("kind", ["tier", "connector"])
def test_an_engine_killed_in_the_middle_of_a_load_leaves_a_clean_daemon(kind: str) -> None:
    place = Path(tempfile.mkdtemp(prefix="tk."))  # a short name: a socket lives in it
    try:
        with holding(place, client_timeout=LEAST_CLIENT_TIMEOUT_S) as daemon:
            stored = digests(engine(daemon, kind, "store"))
            assert sorted(stored) == kv_engine.KEYS
            daemon.hold()
            with engine(daemon, kind, "load") as victim:
                daemon.reached()
                assert daemon.stats()["running"] == 1
                victim.kill()
            kv_engine.memory_of(kind, victim.pid).unlink(missing_ok=kind == "connector")
            daemon.noticed()
            daemon.release()
            daemon.clean()
            assert digests(engine(daemon, kind, "load")) == stored
            daemon.clean()
    finally:
        shutil.rmtree(place)
