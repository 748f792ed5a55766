"""Which generation an engine serves after a restart: the table of docs/adr/0068, every row and column."""

from __future__ import annotations

import itertools

import pytest

from transferd.daemon.weights import MISMATCH, Origin, adopted
from transferd.errors import RequestError
from transferd.wire.protocol import Hello

BOOT = "this daemon"
SAID = [None, "now", "other"]
BOOTS = ["", BOOT, "the one before"]
CONFIGURED = [None, "now", "another file"]


def asked(said: str | None, boot: str, configured: str | None, origin: Origin) -> tuple[str | None, bool]:
    """The refusal's code, if there is one, and whether the engine takes the client's generation."""
    hello = Hello(engine="e", generation=said, boot_id=boot, configured=configured)
    try:
        taken = adopted("e", hello, boot_id=BOOT, generation="now", configured="now", origin=origin)
    except RequestError as error:
        return error.reason, False
    return None, taken == "other"


@pytest.mark.parametrize(
    ("said", "boot", "configured", "origin"), list(itertools.product(SAID, BOOTS, CONFIGURED, Origin))
)
def test_only_another_generation_from_before_the_restart_is_adopted_or_refused(
    said: str | None, boot: str, configured: str | None, origin: Origin
) -> None:
    news = said == "other" and boot != BOOT and origin is not Origin.SET
    same_file = configured in (None, "now")
    adopted = news and origin is Origin.CONFIGURED and same_file
    assert asked(said, boot, configured, origin) == (MISMATCH if news and not adopted else None, adopted)


def test_a_refusal_names_both_generations_and_what_to_do() -> None:
    hello = Hello(engine="llama", generation="RL-7", boot_id="before", configured="RL-1")
    with pytest.raises(RequestError) as refused:
        adopted("llama", hello, boot_id=BOOT, generation="RL-2", configured="RL-2", origin=Origin.CONFIGURED)
    for part in ("'RL-7'", "'RL-2'", "'llama'", "its configuration was 'RL-1'", "transferd generation set"):
        assert part in str(refused.value)
    with pytest.raises(RequestError, match="another client serves it"):
        adopted("llama", hello, boot_id=BOOT, generation="RL-2", configured="RL-2", origin=Origin.SAID)
