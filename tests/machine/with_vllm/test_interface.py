"""What interface.json says of vLLM is what the vLLM that is here has; tests without vLLM rely on it."""

from __future__ import annotations

import json

from tests.machine.with_vllm import interface


def test_the_recorded_interface_is_the_real_one() -> None:
    recorded = json.loads(interface.FILE.read_text(encoding="ascii"))
    assert interface.recorded() == recorded, "record it anew: python -m tests.machine.with_vllm.interface"
