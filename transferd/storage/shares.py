"""Whose objects a store holds: an account for each owner, and how much of the store is kept for it (docs/adr/0088).

An *owner* is an engine. An object belongs to the engine that stored it. What was found at start, or belongs to an
engine that has left, is taken over by the next engine whose objects lie in the same *space* (model and layout).

A *share* is soft. Below it, an owner loses no object to another one; above it, its objects go like all others, and what
it does not use is everybody's. The share of an engine that has left stays for a while, because engines restart.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

HELD_S = 600.0  # how long the share of an engine that has left is kept


class EngineOwner(NamedTuple):
    """An engine, as an owner of objects: its name, and the user who registered it; None if the socket does not know."""

    engine: str
    uid: int | None = None


def space_of(name: str) -> str:
    """The part of an object's name that says for which model and layout it is; "" for names of another form."""
    parts = name.split("/", 2)
    return f"{parts[0]}/{parts[1]}" if len(parts) == 3 else ""


def nobody(space: str) -> Hashable:
    """Stands for the owner of objects in this space that are nobody's."""
    return "", space


class Account:
    """One owner's objects in one index, in bytes.

    space: "" until it is known. share: of the capacity, 0 to 1. present: its engine is registered now, so no other one
    takes its objects over. used: reserved and present. pinned: of these, how many cannot be evicted.
    """

    __slots__ = ("objects", "owner", "pinned", "present", "share", "space", "used")

    def __init__(self, owner: Hashable, space: str = "") -> None:
        self.owner = owner
        self.space = space
        self.share = 0.0
        self.present = False
        self.used = 0
        self.pinned = 0
        self.objects = 0

    def kept(self, capacity: int) -> int:
        """How many bytes are kept for this owner."""
        return int(self.share * capacity)

    def to_spare(self, capacity: int) -> int:
        """How many bytes it may lose to other owners."""
        return max(0, self.used - self.kept(capacity))

    def below_with(self, nbytes: int, capacity: int) -> bool:
        """Whether it is not above its share with so many bytes more."""
        return self.used + nbytes <= self.kept(capacity)
