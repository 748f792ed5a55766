"""The daemon's half of a canary (wire/canary.py): is the engine's block where the handle says?"""

from __future__ import annotations

from transferd.blocks.copyplan import plan_copy
from transferd.errors import RequestError
from transferd.wire.canary import Canary, digest
from transferd.workers.context import RankContext


async def check_canary(context: RankContext, canary: Canary) -> None:
    """Read the canary's block from the mapped device by the way that all blocks go, and compare every array of it.

    Reads the device and writes staging only. Raises RequestError with code `canary_mismatch` that names the first
    array that differs; `bad_value`, `id_out_of_range`; TierError when the block cannot be read.
    """
    staging, segments = context.staging, context.layout.segments
    expected = {(plane, layer): said for plane, layers in canary.sums.items() for layer, said in enumerate(layers)}
    if expected.keys() != {(part.plane.name, part.layer) for part in segments}:
        what = f"the canary has {len(expected)} arrays; a checksum for each of the layout's {len(segments)} is needed"
        raise RequestError(what, code="bad_value")
    lease = await staging.acquire("read", 1, "canary")
    try:
        slot = lease.slots[0]
        plan = plan_copy(context.device.arena.geometry, [canary.block], staging.packed, [slot])
        await context.device.copy_out(plan, staging.memory)
        starts = staging.packed.offsets + slot * staging.packed.strides
        wrong = [
            f"{part.plane.name} of layer {part.layer}"
            for part, start in zip(segments, starts.tolist(), strict=True)
            if digest(staging.memory.view[start : start + part.nbytes]) != expected[part.plane.name, part.layer]
        ]
    finally:
        lease.release()
    if wrong:
        raise RequestError(
            f"block {canary.block} of {wrong[0]} does not hold what the engine wrote there ({len(wrong)} of "
            f"{len(segments)} arrays): check offsets and shapes of the handle, and whether it is this rank's",
            code="canary_mismatch",
        )
