"""TransferdConnector's metrics, in the form in which vLLM collects, logs and exports them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

READY = "ready"
HELP = {
    "blocks_loaded": "Blocks that transferd loaded.",
    "blocks_not_loaded": "Blocks that transferd did not load, so vLLM recomputed them.",
    "blocks_saved": "Blocks that transferd stored, or had stored already.",
    "blocks_not_saved": "Blocks that transferd did not store.",
    "bytes_loaded": "Bytes that transferd loaded, of all ranks.",
    "bytes_saved": "Bytes that transferd stored, of all ranks.",
}


@dataclass
class ConnectorStats(KVConnectorStats):  # type: ignore[misc]
    """Counts since the last collection, and the current READY."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        for name, value in other.data.items():
            self.data[name] = value if name == READY else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"transferd {name}": value for name, value in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class Prometheus(KVConnectorPromMetrics):  # type: ignore[misc]
    """The metrics vllm:transferd_…, one set for each engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        made = {name: self._counter_cls(f"vllm:transferd_{name}", text, labelnames) for name, text in HELP.items()}
        made[READY] = self._gauge_cls("vllm:transferd_ready", "1 while a daemon serves this engine.", labelnames)
        self._metrics = {
            engine: {name: metric.labels(*values) for name, metric in made.items()}
            for engine, values in per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            metric = self._metrics[engine_idx].get(name)
            if metric is not None:
                (metric.set if name == READY else metric.inc)(value)
