"""A handle in which anything at all stands in the place of anything: mapped, or refused with an error of ours."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transferd.blocks.layout import build_layout
from transferd.config import CacheSection
from transferd.errors import TransferError
from transferd.tiers.arrays import Region, describe, locate
from transferd.tiers.base import DeviceHandle
from transferd.tiers.cuda import ipc
from transferd.tiers.offered import PEER
from transferd.tiers.owner import as_data, check_owner, this_process
from transferd.tiers.paddle import names_of
from transferd.tiers.segment import PREFIX, SharedSegment
from transferd.tiers.shm import KIND, created_handle, map_offered
from transferd.wire.canary import taken_from

LAYOUT = build_layout(CacheSection(layers=1, device_blocks=2, block_size=4, kv_heads=1, head_dim=8))
PAGES = build_layout(CacheSection(attention="pages", layers=2, page_bytes=[16, 5], device_blocks=3, identity="i"))
Data = dict[str, Any]

# What msgpack can say, and what system calls trip over.
texts = st.one_of(
    st.text(max_size=20), st.sampled_from(["\0", "a\0b", "..", ".", "", "/", "../x", "x" * 300, "\x1b[2J", "é" * 200])
)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), texts, st.binary(max_size=8)
)
anything = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a handle's data that something else can be put in."""
    if path:
        yield path
    if isinstance(data, dict | list):
        for key in data if isinstance(data, dict) else range(len(data)):
            yield from places(data[key], (*path, key))


def spoilt(data: Data, path: tuple[Any, ...], value: Any) -> Data:
    copied = copy.deepcopy(data)
    inner: Any = copied
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return copied


@pytest.fixture(scope="module")
def segment() -> Iterator[SharedSegment]:
    made = SharedSegment(f"{PREFIX}test.{os.getpid()}.spoilt", LAYOUT.device.extent, create=True)
    yield made
    made.close()


def shm(data: Data) -> None:
    (mapped,), _ = map_offered(LAYOUT, DeviceHandle(KIND, data | {PEER: (os.getuid(), os.getpid())}))
    mapped.close()


def pages(data: Data) -> None:
    (mapped,), _ = map_offered(PAGES, DeviceHandle(KIND, data | {PEER: (os.getuid(), os.getpid())}))
    mapped.close()


def descriptor(data: Data) -> None:
    """As the daemon's server passes it on."""
    (mapped,), _ = map_offered(PAGES, DeviceHandle(KIND, data | {PEER: (os.getuid(), os.getpid())}))
    mapped.close()


def cuda(data: Data) -> None:
    handle = ipc.read(data)
    locate(LAYOUT, data.get("arrays"), [Region(4096, region.nbytes) for region in handle.regions])


def paddle(data: Data) -> None:
    names_of(LAYOUT, DeviceHandle("fastdeploy_ops", data))


def good(kind: str, segment: SharedSegment) -> Data:
    arrays, owner = describe(LAYOUT), as_data(this_process())
    if kind == "shm":
        return dict(created_handle(LAYOUT, segment).data)
    if kind in ("pages", "descriptor"):
        whole = {"nbytes": segment.nbytes, "segments": [[0, 16], [100, 7, 0]], "owner": owner}
        return whole | ({"name": segment.name} if kind == "pages" else {"fd": segment.descriptor})
    if kind == "cuda":
        region = ipc.ExportedRegion(handle="ab" * 64, nbytes=LAYOUT.device.extent)
        return ipc.as_data(ipc.CudaHandle(device="0" * 32, owner=owner, regions=[region], arrays=arrays, event=""))
    apart = [place | {"offset": 0, "region": number} for number, place in enumerate(arrays)]
    return {"place": "gpu:0", "names": ["a", "b"], "arrays": apart, "owner": owner}


READERS: dict[str, Callable[[Data], None]] = {
    "shm": shm, "pages": pages, "descriptor": descriptor, "cuda": cuda, "paddle": paddle,
}  # fmt: skip


def refusal(kind: str, data: Data) -> str:
    """Why it is refused, "" if it is not. Raises what is no error of ours."""
    try:
        rest, _ = taken_from(data)
        check_owner(rest.get("owner"))
        READERS[kind](rest)
    except TransferError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", READERS)
@settings(max_examples=300)
@given(draw=st.data())
def test_anything_in_the_place_of_anything_is_mapped_or_a_typed_refusal(
    kind: str, segment: SharedSegment, draw: st.DataObject
) -> None:
    data = good(kind, segment) | {"canary": {"block": 1, "sums": {"key": ["0" * 16], "value": ["f" * 16]}}}
    wrong = spoilt(data, draw.draw(st.sampled_from(list(places(data)))), draw.draw(anything))
    said = refusal(kind, wrong)
    assert said.isprintable(), "what a client sends reaches no terminal raw"


@pytest.mark.parametrize("kind", READERS)
def test_the_unmodified_handle_attaches(kind: str, segment: SharedSegment) -> None:
    READERS[kind](good(kind, segment))
