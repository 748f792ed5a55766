"""TransferdConnector's metrics, in the form in which vLLM collects, logs and exports them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from transferd.adapters.vllm.saving import UNREACHABLE
from transferd.tasks import NOT_STORED

READY = "ready"
REASON = "/"  # separates a count's name from its reason
LABELS = {"blocks_not_saved": (*NOT_STORED, UNREACHABLE)}
HELP = {
    "blocks_loaded": "Blocks that transferd loaded.",
    "blocks_not_loaded": "Blocks that transferd did not load, so vLLM recomputed them.",
    "blocks_saved": "Blocks that transferd stored, or had stored already.",
    "blocks_not_saved": "Blocks that transferd did not store; reason: not_ready (no daemon answered), no_room "
    "(too many saves at once), failed, not_admitted, or unreachable (of a window, where no later request can go on).",
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
        labels = {name: [*labelnames, "reason"] if name in LABELS else labelnames for name in HELP}
        made = {n: self._counter_cls(f"vllm:transferd_{n}", text, labels[n]) for n, text in HELP.items()}
        ready = self._gauge_cls("vllm:transferd_ready", "1 while a daemon serves this engine.", labelnames)
        self._metrics = {
            engine: {READY: ready.labels(*values)} | _of_an_engine(made, values)
            for engine, values in per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            metric = self._metrics[engine_idx].get(name)
            if metric is not None:
                (metric.set if name == READY else metric.inc)(value)


def _of_an_engine(made: dict[str, Any], values: list[object]) -> dict[str, Any]:
    """An engine's counters, by the names under which it counts."""
    found: dict[str, Any] = {}
    for name, metric in made.items():
        if name in LABELS:
            found |= {f"{name}{REASON}{reason}": metric.labels(*values, reason) for reason in LABELS[name]}
        else:
            found[name] = metric.labels(*values)
    return found
