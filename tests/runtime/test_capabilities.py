"""What the kernel says of a process: compared with processes that gave capabilities up."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from transferd.runtime import descriptors as capabilities
from transferd.runtime.descriptors import CAP_CHOWN, CAP_IPC_LOCK, CAP_SYS_RESOURCE, has_capability

ASK = (
    "from transferd.runtime.descriptors import has_capability;"
    f"print([has_capability(n) for n in ({CAP_CHOWN}, {CAP_IPC_LOCK}, {CAP_SYS_RESOURCE})])"
)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can give one up")
def test_a_capability_that_was_given_up_is_gone_and_no_other() -> None:
    without = ["setpriv", "--inh-caps=-chown", "--bounding-set=-chown", sys.executable, "-c", ASK]
    here = [has_capability(number) for number in (CAP_IPC_LOCK, CAP_SYS_RESOURCE)]
    assert has_capability(CAP_CHOWN)
    told = subprocess.run(without, capture_output=True, text=True, check=True, timeout=60).stdout
    assert told.strip() == str([False, *here])


@pytest.mark.parametrize(
    ("status", "held"),
    [
        ("Name:\tx\nCapEff:\t0000000000000001\n", [True, False, False]),
        ("CapEff:\t0000000001004000\n", [False, True, True]),
        ("CapPrm:\t000001ffffffffff\nCapEff:\t0000000000000000\n", [False, False, False]),
        ("Name:\tan old kernel\n", [False, False, False]),
        (None, [False, False, False]),
    ],
)
def test_only_what_is_effective_counts_and_silence_is_no(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str | None, held: list[bool]
) -> None:
    file = tmp_path / "status"
    if status is not None:
        file.write_text(status)
    monkeypatch.setattr(capabilities, "STATUS", file)
    assert [has_capability(number) for number in (CAP_CHOWN, CAP_IPC_LOCK, CAP_SYS_RESOURCE)] == held
