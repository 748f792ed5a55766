"""Does a handle point at the engine's blocks? Random bytes in one block tell, and each array counts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.workers.rig import LAYOUT, Rig
from transferd.errors import RequestError, TierError
from transferd.wire.canary import Canary, digest
from transferd.workers.canary import check_canary

BLOCK = 11


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = await Rig().open()
    yield made
    await made.close()


def canary(rig: Rig, number: int = BLOCK) -> Canary:
    """What an engine says that knows its own arrays."""
    sums: dict[str, list[Any]] = {plane.name: [None] * LAYOUT.layers for plane in LAYOUT.planes}
    geometry = LAYOUT.device
    for i, segment in enumerate(LAYOUT.segments):
        at = int(geometry.offsets[i] + geometry.strides[i] * number)
        sums[segment.plane.name][segment.layer] = digest(rig.memory[at : at + int(geometry.nbytes[i])].tobytes())
    return Canary(number, sums)


async def test_the_right_bytes_pass_and_nothing_is_changed_or_kept(rig: Rig) -> None:
    before = rig.memory.tobytes()
    for others in (0, 1, 3):  # slots that reads have: so it gets another one each time, the last one too
        lease = await rig.staging.acquire("read", others, "a read")
        await check_canary(rig.context, canary(rig))
        lease.release()
    assert rig.memory.tobytes() == before
    assert rig.slots_used == 0


@pytest.mark.parametrize("segment", range(len(LAYOUT.segments)))
async def test_one_byte_of_one_array_is_enough_to_differ(rig: Rig, segment: int) -> None:
    said, geometry, part = canary(rig), LAYOUT.device, LAYOUT.segments[segment]
    last = int(geometry.offsets[segment] + geometry.strides[segment] * BLOCK + geometry.nbytes[segment] - 1)
    rig.memory[last] ^= 1
    with pytest.raises(RequestError, match=f"block {BLOCK} of {part.plane.name} of layer {part.layer} ") as caught:
        await check_canary(rig.context, said)
    assert caught.value.reason == "canary_mismatch"
    assert f"1 of {len(LAYOUT.segments)} arrays differ" in str(caught.value)
    assert rig.slots_used == 0


async def test_bytes_of_another_block_do_not_count(rig: Rig) -> None:
    said = canary(rig)
    for number in range(LAYOUT.device_blocks):
        for at, step, nbytes in zip(LAYOUT.device.offsets, LAYOUT.device.strides, LAYOUT.device.nbytes, strict=True):
            if number != BLOCK:
                rig.memory[at + step * number : at + step * number + nbytes] = 0
    await check_canary(rig.context, said)
    every, first = len(LAYOUT.segments), LAYOUT.segments[0]
    names = f"of {first.plane.name} of layer {first.layer} .*{every} of {every} arrays differ"
    with pytest.raises(RequestError, match=names):
        await check_canary(rig.context, Canary(BLOCK - 1, said.sums))


@pytest.mark.parametrize("wrong", ["a plane too few", "a layer too few", "a layer too many", "another plane"])
async def test_checksums_of_other_arrays_are_refused_before_anything_is_read(rig: Rig, wrong: str) -> None:
    sums = {plane: list(layers) for plane, layers in canary(rig).sums.items()}
    first = next(iter(sums))
    if wrong == "a plane too few":
        del sums[first]
    elif wrong == "a layer too few":
        del sums[first][-1]
    elif wrong == "a layer too many":
        sums[first].append(sums[first][-1])
    else:
        sums["scale"] = sums.pop(first)
    with pytest.raises(
        RequestError, match=f"send one for each of the layout's {len(LAYOUT.segments)} arrays"
    ) as caught:
        await check_canary(rig.context, Canary(BLOCK, sums))
    assert caught.value.reason == "bad_value"
    assert rig.sim_device.counts["copy_out"] == 0


@pytest.mark.parametrize("number", [-1, LAYOUT.device_blocks])
async def test_an_invalid_block_is_refused_and_takes_no_slot(rig: Rig, number: int) -> None:
    with pytest.raises(RequestError) as caught:
        await check_canary(rig.context, Canary(number, canary(rig).sums))
    assert caught.value.reason == "id_out_of_range"
    assert rig.slots_used == 0


async def test_a_device_that_fails_is_its_error_and_gives_the_slot_back(rig: Rig) -> None:
    rig.sim_device.dice.script("copy_out", "fail")
    with pytest.raises(TierError):
        await check_canary(rig.context, canary(rig))
    assert rig.slots_used == 0
