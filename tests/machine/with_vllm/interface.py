"""What the adapter and its tests need of vLLM's classes, as the real ones have it.

`python -m tests.machine.with_vllm.interface` writes interface.json, in an environment that has vLLM. There
test_interface.py compares it with the real thing; where there is no vLLM, tests/adapters holds the adapter and its
fakes against it.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("interface.json")

CLASSES = {
    "vllm.distributed.kv_transfer.kv_connector.v1.base": ("KVConnectorBase_V1", "SupportsHMA"),
    "vllm.v1.kv_offload.tiering.base": ("SecondaryTierManager", "TransferJob", "JobResult"),
    "vllm.v1.core.block_pool": ("BlockPool",),
    "vllm.v1.core.kv_cache_utils": ("KVCacheBlock",),
    "vllm.v1.core.kv_cache_manager": ("KVCacheManager", "KVCacheBlocks"),
    "vllm.v1.core.sched.output": ("SchedulerOutput", "NewRequestData", "CachedRequestData"),
    "vllm.v1.request": ("Request",),
}


# What newer versions of vLLM than the recorded one have added to the classes that we derive from or are given, and what
# we do about it.
DUTIES: dict[str, dict[str, str]] = {
    "KVConnectorBase_V1": {
        "supports_sleep_mode": "False: no other process can map what the sleeping allocator makes (ADR 93)",
        "unregister_kv_caches": "called for sleep only",
        "restore_kv_caches": "called for sleep only",
    },
    "SupportsHMA": {},
    "SecondaryTierManager": {
        "config_info": "done",
        "config_info_keys": "done",
        "tolerates_off_thread_polling": "False: jobs end in another thread, and are taken in the scheduler's",
    },
    "SchedulerOutput": {
        "encoder_input_updates": "of encoders, whose inputs are in vLLM's block hashes",
        "skip_drafts": "nothing: the draft model still computes the step's tokens, and proposes none behind them",
    },
}


def recorded() -> dict[str, Any]:
    """Version, and for each class its methods' parameters, its fields, and what is abstract."""
    vllm = importlib.import_module("vllm")
    classes = {}
    for module, names in CLASSES.items():
        for name in names:
            classes[name] = _facts(getattr(importlib.import_module(module), name))
    return {"vllm": vllm.__version__, "classes": classes}


def _facts(cls: type) -> dict[str, Any]:
    methods: dict[str, list[str]] = {}
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    for name, value in inspect.getmembers(cls):
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(value, property) or not callable(value):
            fields.add(name)
        else:
            methods[name] = _parameters(value)
    if hasattr(cls, "__init__") and not dataclasses.is_dataclass(cls):
        fields |= _assigned(cls)
    return {
        "methods": dict(sorted(methods.items())),
        "fields": sorted(fields),
        "abstract": sorted(getattr(cls, "__abstractmethods__", ())),
    }


def _parameters(function: Any) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [("*" * (p.kind == p.VAR_POSITIONAL) + "**" * (p.kind == p.VAR_KEYWORD)) + p.name for p in parameters]


def _assigned(cls: type) -> set[str]:
    """The public attributes that `__init__` sets."""
    try:
        lines = inspect.getsource(cls.__init__).splitlines()  # type: ignore[misc]
    except (OSError, TypeError):
        return set()
    names = (line.strip().removeprefix("self.") for line in lines if line.strip().startswith("self."))
    found = {name.split("=")[0].split(":")[0].strip() for name in names}
    return {name for name in found if name.isidentifier() and not name.startswith("_")}


def main() -> None:
    found = recorded()
    lines = [f"  {json.dumps(name)}: {json.dumps(facts)}" for name, facts in found["classes"].items()]
    text = f'{{\n "vllm": {json.dumps(found["vllm"])},\n "classes": {{\n' + ",\n".join(lines) + "\n }\n}\n"
    FILE.write_text(text, encoding="ascii")


if __name__ == "__main__":
    main()
