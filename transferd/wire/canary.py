"""The canary of an offer: random bytes that an engine writes into one block, and that the daemon looks for.

A handle contains the places of arrays, and a wrong handle looks valid: offsets of another layer, the shape of another
model and the handle of another rank all map without an error. So an engine may write random bytes into one block of
every array and send their checksums with the handle:

    data["canary"] = {"block": 1, "sums": {"key": ["<xxh3-64 of layer 0's block, 16 hex digits>", …], "value": […]}}

The daemon maps the memory, reads that block like any other, compares the checksums, and unmaps the memory. The engine
then restores the block's original bytes and makes the actual offer. client/offers.py is the engine's half,
workers/canary.py the daemon's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import xxhash

from transferd.runtime.compat import converted

KEY = "canary"
CHECKED = "checked"  # the value that answers an offer with a canary
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]


class Canary(msgspec.Struct, frozen=True):
    """The engine's claim about one block.

    block: the block id, the same in every array.
    sums: {plane: [digest of that block's bytes, one per layer]}.
    """

    block: int
    sums: dict[str, list[Digest]]


def digest(data: bytes | memoryview) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def taken_from(data: Mapping[str, Any]) -> tuple[dict[str, Any], Canary | None]:
    """Split a handle's data into the rest and the canary, if there is one. Raises RequestError if it is invalid."""
    rest = dict(data)
    said = rest.pop(KEY, None)
    if said is None:
        return rest, None
    return rest, converted(said, Canary, "the handle's canary is invalid")
