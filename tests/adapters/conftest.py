"""What the tests of all adapters share: patience."""

from __future__ import annotations

import pytest

from transferd.adapters.common import link, read_leases
from transferd.adapters.fastdeploy import companion

PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def patient_questions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that answers a look-up late, on a machine that is busy with other tests, has not missed the blocks.

    A daemon that is lost ends its look-ups as ever. Tests of how long a look-up waits have the adapters' own limits.
    """
    if "answers_in_time" not in request.node.name:
        monkeypatch.setattr(link, "LOOKUP_TIMEOUT_S", PATIENCE_S)
        monkeypatch.setattr(link, "ANSWER_S", 2 * PATIENCE_S)
        monkeypatch.setattr(read_leases, "ANSWER_S", 2 * PATIENCE_S)
        monkeypatch.setattr(companion, "ANSWER_TIMEOUT_S", PATIENCE_S)
