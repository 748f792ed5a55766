"""vLLM's own MooncakeStoreConnector, unchanged, over a transferd daemon: `mooncake.store` is transferd's here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.machine.with_vllm.engine import Engine, witnessed
from tests.machine.with_vllm.test_engine import plain, prompts, tokens

pytestmark = pytest.mark.timeout(900)


def test_a_restarted_engine_loads_what_the_last_one_stored(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = place / "mooncake.json"
    said = {"metadata_server": "P2PHANDSHAKE", "master_server_address": "nobody:50051", "protocol": "tcp"}
    config.write_text(json.dumps(said), encoding="ascii")
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(config))
    monkeypatch.setenv("TRANSFERD_MOONCAKE_STORE", '{"buffer": "8MiB"}')
    asked = prompts(1, 200, 300, 170)
    (cold,) = Engine(place, "mooncake", [asked], forget=[]).result()
    (warm,) = Engine(place, "mooncake", [asked], forget=[]).result()
    assert tokens(cold) == tokens(warm) == tokens(plain(place, [asked])[0])
    assert [answer["cached"] for answer in cold] == [0, 0, 0]
    assert [answer["cached"] for answer in warm] == [192, 288, 160]
    stored, loaded = witnessed(place)
    assert stored >= 20
    assert loaded == 20
