"""The daemon's half of a canary check (wire/canary.py): does the handle point at the engine's blocks?"""

from __future__ import annotations

from transferd.blocks.copyplan import plan_copy
from transferd.errors import RequestError
from transferd.runtime.threads import Direction
from transferd.wire.canary import Canary, digest
from transferd.workers.context import RankContext


async def check_canary(context: RankContext, canary: Canary) -> None:
    """Read the canary's block from the mapped device, like any other block, and compare each of its arrays.

    Reads the device and writes to staging only. Raises RequestError with code `canary_mismatch` (the message names
    the first array that differs), `bad_value` or `id_out_of_range`; TierError if the block cannot be read.
    """
    staging, segments = context.staging, context.layout.segments
    expected = {(plane, layer): said for plane, layers in canary.sums.items() for layer, said in enumerate(layers)}
    if expected.keys() != {(part.plane.name, part.layer) for part in segments}:
        what = f"the canary has {len(expected)} checksums; send one for each of the layout's {len(segments)} arrays"
        raise RequestError(what, code="bad_value")
    lease = await staging.acquire("read", 1, "canary")
    try:
        slot = lease.slots[0]
        plan = plan_copy(context.device.arena.geometry, [canary.block], staging.packed, [slot])
        await context.device.copy_out(plan, staging.memory)
        starts = staging.packed.offsets + slot * staging.packed.strides

        def differing() -> list[str]:
            return [
                f"{part.plane.name} of layer {part.layer}"
                for part, start in zip(segments, starts.tolist(), strict=True)
                if digest(staging.memory.view[start : start + part.nbytes]) != expected[part.plane.name, part.layer]
            ]

        # A block may have gigabytes, and thousands of arrays.
        wrong = await context.threads.run(Direction.SETUP, differing, f"checking the canary of rank {context.rank}")
    finally:
        lease.release()
    if wrong:
        raise RequestError(
            f"block {canary.block} of {wrong[0]} does not hold what the engine wrote there ({len(wrong)} of "
            f"{len(segments)} arrays differ): check the handle's offsets and shapes, and that it belongs to this rank",
            code="canary_mismatch",
        )
