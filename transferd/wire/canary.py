"""The canary of an offer: what an engine has written into one block, for the daemon to find there before it serves.

A handle says where arrays lie, and nothing in it shows that it is wrong: offsets of another layer, the shape of
another model, the handle of another rank map as well as the right ones. So an engine may write something that nobody
can guess into one block of every array, and send checksums of it with the handle:

    data["canary"] = {"block": 1, "sums": {"key": ["<xxh3-64 of layer 0's block, 16 hex digits>", …], "value": […]}}

The daemon maps the memory, reads that block as it reads any other, compares, and unmaps it again; the engine then
puts the block's former bytes back and makes the offer itself. client/canary.py is the engine's half,
workers/canary.py the daemon's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import xxhash

from transferd.errors import RequestError

KEY = "canary"
CHECKED = "checked"  # the value that answers an offer with a canary
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]


class Canary(msgspec.Struct, frozen=True):
    """block: the same in every array. sums: {plane: [digest of that block's bytes, one a layer]}."""

    block: int
    sums: dict[str, list[Digest]]


def digest(data: bytes | memoryview) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def taken_from(data: Mapping[str, Any]) -> tuple[dict[str, Any], Canary | None]:
    """A handle's data without its canary, and the canary if there is one. Raises RequestError for what is none."""
    rest = dict(data)
    said = rest.pop(KEY, None)
    if said is None:
        return rest, None
    try:
        return rest, msgspec.convert(said, Canary)
    except msgspec.ValidationError as error:
        raise RequestError(f"the canary of the handle cannot be read: {error}", code="bad_value") from None
