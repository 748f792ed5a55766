"""Sealed objects under the names that they were sealed for, and damage to their files."""

from __future__ import annotations

import random
from pathlib import Path

from transferd.blocks.formats import FOOTER_BYTES, ObjectNamer, key_digest, seal, stamp_of_name

NAMER = ObjectNamer("demo", "0123456789abcdef")


def name(number: int) -> str:
    return NAMER.names("RL-1", [key_digest(f"key {number}")], 0)[0]


def sealed(number: int, payload_bytes: int = 1000) -> bytes:
    slot = bytearray(random.Random(number).randbytes(payload_bytes) + bytes(FOOTER_BYTES))
    seal(memoryview(slot), payload_bytes, stamp_of_name(name(number)))
    return bytes(slot)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)
