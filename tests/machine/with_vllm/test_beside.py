"""The connector in a MultiConnector, found by its name alone, beside a connector that has a handshake of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from tests.machine.with_vllm.dry import DryEngine, prompts
from tests.machine.with_vllm.test_scheduler import ROOMY, rest, whole
from transferd.adapters.vllm import plugin
from transferd.adapters.vllm.metrics import ConnectorStats
from transferd.errors import ConfigError

pytestmark = pytest.mark.timeout(900)


class OtherMetadata(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """That of another connector."""


def multi(place: Path, policy: str = "recompute") -> dict[str, Any]:
    other = {
        "kv_connector": "ExampleConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(place / "other")},
    }  # fmt: skip
    ours = {
        "kv_connector": "TransferdConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"keep_blocks_on_reset": True},
    }  # fmt: skip
    return {
        "kv_connector": "MultiConnector", "kv_connector_module_path": None, "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"connectors": [ours, other]},
    }  # fmt: skip


@pytest.fixture(autouse=True)
def registered() -> None:
    """As vLLM does in each of its processes, by the entry point; twice, as it may."""
    plugin.register()
    plugin.register()


def test_it_loads_and_stores_and_its_statistics_are_found_by_name(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "ExampleConnector"
    cls = KVConnectorFactory.get_connector_class_by_name(name)
    monkeypatch.setattr(cls, "save_kv_layer", lambda *_, **__: None)  # it needs vLLM's forward context
    monkeypatch.setattr(cls, "start_load_kv", lambda *_, **__: None)
    monkeypatch.setattr(cls, "get_num_new_matched_tokens", lambda *_: (0, False))
    monkeypatch.setattr(cls, "get_handshake_metadata", lambda _: OtherMetadata())
    asked = prompts(1, 300, 200)
    with DryEngine(place, "connector", blocks=ROOMY, transfer=multi(place)) as engine:
        assert isinstance(engine.connector, MultiConnector)
        engine.add(asked[0][:40])
        engine.finish()
        engine.until(lambda: engine.ours._link.ready)
        assert engine.run(asked) == [len(asked[0]) + 1 - 32, whole(asked)[1]]
        stats = engine.connector.get_kv_connector_stats()
        sent = {one: dict(found.data) for one, found in stats.data.items()}
        again = MultiConnector.build_kv_connector_stats(sent)
        assert isinstance(again["TransferdConnector"], ConnectorStats)
        engine.forget()
        assert engine.run(asked) == rest(asked)


def test_the_outer_failure_policy_counts(place: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_load_failure_policy \(of MultiConnector\).*fail"):
        DryEngine(place, "connector", transfer=multi(place, policy="fail"))
