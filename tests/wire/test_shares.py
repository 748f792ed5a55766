"""The room for large messages, by itself. On connections: test_acceptor.py."""

from __future__ import annotations

from transferd.wire.shares import Room

TOTAL = 100_000


class Peer:
    user, closed = 1, False

    def __init__(self) -> None:
        self.found = False

    def room_found(self) -> None:
        self.found = True


async def test_a_frame_larger_than_all_of_the_room_gets_it_and_others_their_turn() -> None:
    """An encrypted frame may be larger than the largest message."""
    room = Room[Peer](TOTAL, lambda _: None)
    large, other = Peer(), Peer()
    assert room.take(large, TOTAL + 33)
    assert not room.take(other, 20_000)
    room.give_back(large)
    assert (other.found, room.taken) == (True, 20_000)
    assert not room.take(large, TOTAL + 33)
    room.give_back(other)
    assert (large.found, room.taken) == (True, TOTAL)
    room.give_back(large)
    assert room.taken == 0
    room.close()
