"""What interface.json says of vLLM is what the vLLM that is here has; tests without vLLM rely on it."""

from __future__ import annotations

import json

import pytest
import vllm

from tests.machine.with_vllm import interface

RECORDED = json.loads(interface.FILE.read_text(encoding="ascii"))


@pytest.mark.skipif(vllm.__version__ != RECORDED["vllm"], reason="another vLLM than the recorded one")
def test_the_recorded_interface_is_the_real_one() -> None:
    assert interface.recorded() == RECORDED, "record it anew: python -m tests.machine.with_vllm.interface"


@pytest.mark.parametrize("name", interface.DUTIES)
def test_every_duty_that_vllm_gives_to_us_was_considered(name: str) -> None:
    """A method or a field that is new is a duty, even if its default does nothing: that may be wrong for us."""
    real, known = interface.recorded()["classes"][name], RECORDED["classes"][name]
    new = {*real["methods"], *real["fields"]} - {*known["methods"], *known["fields"]} - {*interface.DUTIES[name]}
    assert not new, f"vLLM {vllm.__version__}: read what {name} wants of these, and say in DUTIES what we do"
    changed = {
        method
        for method in {*real["methods"]} & {*known["methods"]}
        if set(known["methods"][method]) - set(real["methods"][method])
    }
    assert not changed, "parameters that were there are gone"
    assert set(real["abstract"]) <= set(known["abstract"]), "we must have them"
