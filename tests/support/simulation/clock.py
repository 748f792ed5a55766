"""SimClock: the clock seam on virtual time."""

from __future__ import annotations

from tests.support.simulation.loop import SimLoop
from transferd.runtime.clock import Clock

EPOCH = 1_700_000_000.0  # wall time at virtual time 0; any moment will do


class SimClock(Clock):
    """A Clock that reads its SimLoop, and whose fresh identities come from the loop's seed.

    wall_offset: seconds that the wall clock is off; a simulation may change it at any time, as an
    administrator or NTP does. Monotonic time cannot be touched.
    """

    wall_offset: float

    def __init__(self, loop: SimLoop) -> None:
        identities = loop.stream("identities")
        # The dataclass is frozen for everybody but its own __init__.
        object.__setattr__(self, "wall_offset", 0.0)
        super().__init__(
            monotonic=loop.time,
            wall=lambda: EPOCH + loop.time() + self.wall_offset,
            cpu=lambda: 0.0,  # a run must not depend on the machine
            fresh_id=lambda: f"{identities.getrandbits(128):032x}",
        )

    def jump_wall(self, seconds: float) -> None:
        """The wall clock is set forward, or back."""
        object.__setattr__(self, "wall_offset", self.wall_offset + seconds)
