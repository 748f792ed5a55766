"""The footer: what was sealed is accepted, everything else is refused for its own reason."""

from __future__ import annotations

import random
import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from transferd.blocks.formats import (
    FOOTER_BYTES,
    FORMAT_VERSION,
    Damage,
    Inspection,
    NotSealed,
    ObjectNamer,
    Stamp,
    check,
    key_digest,
    seal,
    stamp_of_name,
)
from transferd.errors import InvariantError

PAYLOAD = 1000


def stamp(
    key: str = "k", *, model: str = "demo", fingerprint: str = "f0", generation: str = "", rank: int = 0
) -> Stamp:
    return ObjectNamer(model, fingerprint).stamps(generation, [key_digest(key)], rank)[0]


def sealed(payload_bytes: int = PAYLOAD, room: int = 0, mark: Stamp | None = None) -> bytearray:
    slot = bytearray(random.Random(payload_bytes).randbytes(payload_bytes) + bytes(FOOTER_BYTES + room))
    seal(memoryview(slot), payload_bytes, mark or stamp())
    return slot


@pytest.mark.parametrize("payload_bytes", [0, 1, 15, 17, 240, 241, 4096, 300_001])
def test_a_sealed_object_is_accepted_at_any_size(payload_bytes: int) -> None:
    assert check(memoryview(sealed(payload_bytes)), payload_bytes, stamp()) is None


def test_sealing_writes_the_footer_and_nothing_else() -> None:
    before = random.Random(1).randbytes(PAYLOAD + FOOTER_BYTES + 50)
    slot = bytearray(before)
    seal(memoryview(slot), PAYLOAD, stamp())
    assert slot[:PAYLOAD] == before[:PAYLOAD]
    assert slot[PAYLOAD + FOOTER_BYTES :] == before[PAYLOAD + FOOTER_BYTES :]
    assert check(memoryview(slot), PAYLOAD, stamp()) is None


def test_the_footer_is_laid_out_as_documented_and_as_it_always_was() -> None:
    slot = sealed(mark=stamp("k1", model="m", fingerprint="f", generation="g", rank=258))
    footer = bytes(slot[PAYLOAD:])
    assert len(footer) == FOOTER_BYTES == 128
    assert footer[:32] == struct.pack(
        "<8sHHIQQ", b"tfdblock", 1, 128, 258, PAYLOAD, xxhash.xxh3_64_intdigest(slot[:PAYLOAD])
    )
    assert footer[32:52].hex() == key_digest("k1")
    assert footer[52:56] == bytes(4)
    assert footer[104:120] == bytes(16)
    assert footer[120:] == struct.pack("<Q", xxhash.xxh3_64_intdigest(footer[:120]))
    assert xxhash.xxh3_64_hexdigest(footer) == "5ba303186d84d7dc"


def sealed_by_parts() -> bytearray:
    """Parts that end at 300, 600 and 1000."""
    slot = bytearray(random.Random(3).randbytes(PAYLOAD) + bytes(FOOTER_BYTES))
    seal(memoryview(slot), PAYLOAD, stamp())  # as workers/_inplace.c does, which alone makes these seals
    slot[PAYLOAD + 52 : PAYLOAD + 56] = struct.pack("<I", 1)
    slot[PAYLOAD + 104 : PAYLOAD + 120] = struct.pack(
        "<QQ", *(xxhash.xxh3_64_intdigest(slot[:end]) for end in (300, 600))
    )
    slot[PAYLOAD + 120 :] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(slot[PAYLOAD : PAYLOAD + 120])))
    return slot


def test_the_seals_of_parts_lie_where_earlier_versions_have_zeros() -> None:
    slot = sealed_by_parts()
    plain = bytearray(slot)
    seal(memoryview(plain), PAYLOAD, stamp())
    footer, usual = bytes(slot[PAYLOAD:]), bytes(plain[PAYLOAD:])
    assert footer[52:56] == struct.pack("<I", 1)
    assert footer[104:120] == struct.pack("<QQ", *(xxhash.xxh3_64_intdigest(slot[:end]) for end in (300, 600)))
    assert footer[:52] + footer[56:104] == usual[:52] + usual[56:104]
    assert check(memoryview(slot), PAYLOAD, stamp()) is None


def test_a_footer_with_seals_of_parts_is_checked_and_those_of_a_later_version_are_ignored() -> None:
    slot = sealed_by_parts()
    inspection = Inspection(stamp(), len(slot))
    assert inspection.footer(bytes(slot[PAYLOAD:])) is None
    for at in range(FOOTER_BYTES):  # the same object goes on to another footer
        damaged = bytearray(slot[PAYLOAD:])
        damaged[at] ^= 1
        assert inspection.footer(bytes(damaged)) is not None
    later = bytearray(slot[PAYLOAD:])  # of a version that divides payloads otherwise
    later[52] = 2
    later[120:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(later[:120])))
    assert inspection.footer(bytes(later)) is None


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (stamp("another"), Damage.KEY),
        (stamp("k:partial:3"), Damage.KEY),
        (stamp(generation="RL-1"), Damage.GENERATION),
        (stamp(fingerprint="f1"), Damage.LAYOUT),
        (stamp(model="demo2"), Damage.MODEL),
        (stamp(rank=1), Damage.RANK),
    ],
    ids=lambda value: str(value) if isinstance(value, Damage) else "",
)
def test_another_objects_identity_is_refused_by_the_part_that_differs(other: Stamp, reason: Damage) -> None:
    assert check(memoryview(sealed()), PAYLOAD, other) is reason


def test_the_token_count_of_a_partial_block_is_part_of_its_identity() -> None:
    slot = memoryview(sealed(mark=stamp("k:partial:3")))
    assert check(slot, PAYLOAD, stamp("k:partial:3")) is None
    assert check(slot, PAYLOAD, stamp("k:partial:4")) is Damage.KEY


def test_identity_is_reported_before_damage_of_the_payload() -> None:
    slot = sealed()
    slot[0] ^= 1
    assert check(memoryview(slot), PAYLOAD, stamp("another")) is Damage.KEY


@pytest.mark.parametrize("at", [0, 1, PAYLOAD // 2, PAYLOAD - 1])
def test_one_flipped_bit_of_the_payload_is_found(at: int) -> None:
    slot = sealed()
    slot[at] ^= 0x10
    assert check(memoryview(slot), PAYLOAD, stamp()) is Damage.CHECKSUM


def test_one_flipped_bit_anywhere_in_the_footer_is_found() -> None:
    for bit in range(FOOTER_BYTES * 8):
        slot = sealed()
        slot[PAYLOAD + bit // 8] ^= 1 << bit % 8
        reason = check(memoryview(slot), PAYLOAD, stamp())
        expected = Damage.MAGIC if bit < 64 else Damage.VERSION if bit < 96 else Damage.FOOTER
        assert reason is expected, f"bit {bit}"


@given(st.integers(0, PAYLOAD + FOOTER_BYTES - 1), st.binary(min_size=1, max_size=64))
def test_an_object_with_any_changed_byte_is_refused(at: int, junk: bytes) -> None:
    whole = sealed()
    slot = bytearray(whole)
    junk = junk[: len(slot) - at]
    slot[at : at + len(junk)] = junk
    assert (check(memoryview(slot), PAYLOAD, stamp()) is None) == (slot == whole)


@pytest.mark.parametrize("content", [b"\0", b"\xff", b"\xaa"])
def test_a_slot_of_one_repeated_byte_is_no_object(content: bytes) -> None:
    """What a lost write leaves behind: zeros, or whatever the slot held."""
    assert check(memoryview(content * (PAYLOAD + FOOTER_BYTES)), PAYLOAD, stamp()) is Damage.MAGIC


def test_an_object_of_another_length_is_refused() -> None:
    longer = memoryview(sealed(PAYLOAD + 8))
    assert check(longer, PAYLOAD, stamp()) is Damage.MAGIC, "no footer where one is expected"
    forged = bytearray(sealed())
    body = bytearray(forged[PAYLOAD:-8])
    body[16:24] = struct.pack("<Q", PAYLOAD + 1)
    forged[PAYLOAD:] = body + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(body)))
    assert check(memoryview(forged), PAYLOAD, stamp()) is Damage.LENGTH


def test_another_format_version_is_refused_whatever_its_footer_means() -> None:
    slot = sealed()
    slot[PAYLOAD + 8 : PAYLOAD + 10] = struct.pack("<H", FORMAT_VERSION + 1)
    assert check(memoryview(slot), PAYLOAD, stamp()) is Damage.VERSION


def test_texts_of_any_length_and_characters_make_stamps() -> None:
    for text in ("", "x" * 100_000, "\ud800", "模型/../\0"):
        mark = stamp(generation=text, model=text, fingerprint=text)
        assert check(memoryview(sealed(mark=mark)), PAYLOAD, mark) is None
        assert check(memoryview(sealed(mark=mark)), PAYLOAD, stamp(generation=text + "x", model=text, fingerprint=text))


def test_the_same_text_in_another_field_is_another_identity() -> None:
    assert check(memoryview(sealed(mark=stamp(generation="a", model="b"))), PAYLOAD, stamp(generation="b", model="a"))


@pytest.mark.parametrize("slot_bytes", [0, PAYLOAD, PAYLOAD + FOOTER_BYTES - 1])
def test_a_slot_without_room_for_the_footer_is_a_bug(slot_bytes: int) -> None:
    with pytest.raises(InvariantError, match="cannot hold"):
        seal(memoryview(bytearray(slot_bytes)), PAYLOAD, stamp())
    with pytest.raises(InvariantError, match="cannot hold"):
        check(memoryview(bytearray(slot_bytes)), PAYLOAD, stamp())


def test_a_payload_of_less_than_nothing_is_a_bug() -> None:
    slot = memoryview(bytearray(PAYLOAD))
    for act in (seal, check):
        with pytest.raises(InvariantError, match="cannot hold -1 bytes and a footer"):
            act(slot, -1, stamp())


def test_reasons_are_plain_text_for_metrics() -> None:
    assert [str(reason) for reason in Damage] == [reason.value for reason in Damage]
    assert f"{Damage.CHECKSUM}" == "checksum"


# --- by its own name --------------------------------------------------------------------------------


def inspected(name: str, data: bytes, piece: int = 97) -> Damage | None:
    inspection = Inspection(stamp_of_name(name), len(data))
    damage = inspection.footer(data[max(0, len(data) - FOOTER_BYTES) :])
    if damage is not None:
        return damage
    payload = memoryview(data)[: inspection.payload_bytes]
    for start in range(0, len(payload), piece):
        inspection.payload(payload[start : start + piece])
    return inspection.damage()


@given(st.text(), st.text(max_size=200), st.text(max_size=200), st.integers(0, 999), st.integers(1, 600))
def test_an_object_is_checked_by_its_own_name_alone(
    key: str, model: str, generation: str, rank: int, payload_bytes: int
) -> None:
    namer = ObjectNamer(model, "f0")
    mark = stamp(key, model=model, generation=generation, rank=rank)
    name = namer.names(generation, [key_digest(key)], rank)[0]
    whole = bytes(sealed(payload_bytes, mark=mark))
    assert inspected(name, whole) is None
    assert inspected(name, whole[:-1]) is not None
    flipped = bytearray(whole)
    flipped[payload_bytes // 2] ^= 1
    assert inspected(name, bytes(flipped)) is Damage.CHECKSUM
    assert inspected(namer.names(generation, [key_digest(key + "x")], rank)[0], whole) is Damage.KEY
    assert inspected(namer.names(generation, [key_digest(key)], rank + 1)[0], whole) is Damage.RANK


def test_every_field_of_a_name_is_compared_unless_it_was_too_long_for_it() -> None:
    whole = bytes(sealed(mark=stamp("k", model="m", fingerprint="f", generation="g")))
    digest = key_digest("k")
    assert inspected(f"m/f/g/{digest}/0", whole) is None
    assert inspected(f"n/f/g/{digest}/0", whole) is Damage.MODEL
    assert inspected(f"m/e/g/{digest}/0", whole) is Damage.LAYOUT
    assert inspected(f"m/f/h/{digest}/0", whole) is Damage.GENERATION
    long = "g" * 500
    whole = bytes(sealed(mark=stamp("k", generation=long)))
    assert inspected(ObjectNamer("demo", "f0").names(long, [digest], 0)[0], whole) is None


@pytest.mark.parametrize("length", [0, 1, FOOTER_BYTES - 1])
def test_bytes_shorter_than_a_footer_are_no_object(length: int) -> None:
    assert inspected(f"m/f/g/{key_digest('k')}/0", bytes(length)) is Damage.MAGIC


@pytest.mark.parametrize("name", ["", "prefix_abc_0_key", "a/b/c/d/0", f"a/b/{'0' * 40}/0", f"a/b/c/{'0' * 40}/x"])
def test_a_name_that_is_not_ours_cannot_be_checked(name: str) -> None:
    with pytest.raises(NotSealed):
        Inspection(stamp_of_name(name), 1000)
