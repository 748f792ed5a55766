"""Whether tasks are admitted, and whether admitted ones are started: what stands against it, the weightiest first.

    a rank has died       `failed`, for good; nothing is started any more
    draining, shut down   `rejected`; a drain is undone by a resume, a shutdown is not
    no memory             `busy` at the start, since the same task will do later; `rejected` once the memory was
                          taken away, since the blocks that such a task names hold nothing any more

A pause is none of these: tasks are admitted and wait.
"""

from __future__ import annotations

from transferd.tasks import ErrorInfo, Status

STARTING = ErrorInfo("starting", "the daemon is starting; not every rank is ready")
DRAINING = ErrorInfo("draining", "the daemon is draining and admits no new tasks")


class Door:
    """Changed by the dispatcher, as events say."""

    def __init__(self, *, memory: bool) -> None:
        """memory: False while the daemon starts."""
        self.paused = False
        self.alive = True  # no rank has died, and no shutdown was asked for
        self._dead: ErrorInfo | None = None
        self._draining = False
        self._absent: tuple[Status, ErrorInfo] | None = None if memory else (Status.BUSY, STARTING)

    @property
    def refusal(self) -> tuple[Status, ErrorInfo] | None:
        """What a task is answered that would be admitted otherwise."""
        if self._dead is not None:
            return Status.FAILED, self._dead
        return (Status.REJECTED, DRAINING) if self._draining else self._absent

    @property
    def draining(self) -> bool:
        """A drain or a shutdown was asked for."""
        return self._draining

    @property
    def starts(self) -> bool:
        """Admitted tasks are started."""
        return self.alive and not self.paused

    def pause(self) -> None:
        self.paused = True

    def drain(self) -> None:
        self._draining = True

    def resume(self) -> None:
        """Undo pause and drain."""
        self.paused = False
        if self.alive:
            self._draining = False

    def shut(self) -> None:
        """Admit and start nothing any more."""
        self._draining = True
        self.alive = False

    def rank_died(self, error: ErrorInfo) -> None:
        self._dead = error
        self.alive = False

    def memory_gone(self, error: ErrorInfo) -> None:
        self._absent = (Status.REJECTED, error)

    def memory_there(self) -> None:
        self._absent = None
