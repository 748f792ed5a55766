"""Which objects of LMCache share an engine, and what two servers must have in common to read each other's objects.

An object is a chunk of one object group of one rank. Groups differ in size, and one server has objects of several
models. A block of transferd has one size, so each model and layout is a separate engine.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
from dataclasses import dataclass
from typing import Any

from transferd.adapters.common import fingerprint
from transferd.adapters.common.fingerprint import Facts
from transferd.adapters.lmcache.settings import LMCACHE, SECTION, L2Settings


@dataclass(frozen=True, slots=True)
class ObjectKind:
    """What all objects of one model and layout have in common."""

    model: str  # LMCache's name of the model
    layout: str  # shapes and element types, in words
    nbytes: int  # of an object


def kind_of_object(key: Any, one: Any) -> ObjectKind | None:
    """The kind of an object in LMCache's memory, or None if its bytes are not on the host or do not fill its layout.

    LMCache's `serde` writes fewer bytes than a layout has.
    """
    found = _kind(key.model_name, tuple(map(tuple, one.get_shapes())), tuple(one.get_dtypes()))
    return found if found.nbytes == one.get_size() > 0 and _on_host(one) else None


def kind_of_layout(key: Any, layout: Any) -> ObjectKind:
    """The kind of an object that a lookup asks for, by LMCache's MemoryLayoutDesc of its group."""
    return _kind(key.model_name, tuple(map(tuple, layout.shapes)), tuple(layout.dtypes))


def key_of(key: Any) -> str:
    """The key of a block, without the model: chunk hash, rank, object group and LMCache's salt of the user."""
    return f"{key.chunk_hash.hex()}@{key.kv_rank:08x}@{key.object_group_id}@{key.cache_salt}"


@functools.lru_cache(maxsize=64)  # asked for each object
def _kind(model: str, shapes: tuple[tuple[int, ...], ...], types: tuple[Any, ...]) -> ObjectKind:
    parts = [(list(map(int, shape)), kind) for shape, kind in zip(shapes, types, strict=True)]
    layout = ", ".join(f"{'×'.join(map(str, shape))} {str(kind).removeprefix('torch.')}" for shape, kind in parts)
    return ObjectKind(model, layout, sum(math.prod(shape) * kind.itemsize for shape, kind in parts))


def _on_host(one: Any) -> bool:
    try:
        return bool(one.data_ptr)
    except (NotImplementedError, RuntimeError):  # an L1 on a GPU's disk has objects without an address
        return False


def facts(kind: ObjectKind, chosen: L2Settings, life: str) -> Facts:
    """The facts about an object of this kind. Logs what cannot be seen."""
    return {
        "engine": f"lmcache {_version()}",
        "layout of an object": kind.layout,
        "bytes of an object": kind.nbytes,
        "weights": _weights(kind.model, chosen, life),
    }


def _weights(model: str, chosen: L2Settings, life: str) -> str:
    found = fingerprint.look(model, asserted=chosen.weights)
    if not found.digest and not chosen.weights:
        what = f'transferd: the weights of %s are not seen from here: set "weights" in {SECTION}, and change it with '
        LMCACHE.log.warning(f"{what}them, or engines with other weights share objects", model)
    return fingerprint.weights_fact(found, chosen.weights, life, fingerprint.process_started())


def _version() -> str:
    """LMCache's major and minor version: it may arrange keys and values differently in each release."""
    try:
        return ".".join(importlib.metadata.version("lmcache").split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
