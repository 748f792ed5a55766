"""Makes TransferdConnector and TransferdTier known to vLLM by name, so that no module path is needed.

vLLM calls `register` in each of its processes, by the entry point `vllm.general_plugins`, unless VLLM_PLUGINS leaves
it out. It may call it several times. MultiConnector needs it: it looks for its connectors' statistics by name.
"""

from __future__ import annotations

import contextlib
import importlib
import operator

PACKAGE = "transferd.adapters.vllm"
FACTORIES = (
    (
        "vllm.distributed.kv_transfer.kv_connector.factory",
        "KVConnectorFactory.register_connector",
        "TransferdConnector",
    ),
    ("vllm.v1.kv_offload.tiering.factory", "SecondaryTierFactory.register_tier", "TransferdTier"),
)


def register() -> None:
    """Register both classes with vLLM's factories, which import them on first use. Idempotent.

    A vLLM that lacks a factory is left as it is: it refuses the class by name, and says so.
    """
    for module, method, name in FACTORIES:
        with contextlib.suppress(ImportError, AttributeError, ValueError):  # ValueError: it is registered already
            operator.attrgetter(method)(importlib.import_module(module))(name, PACKAGE, name)
