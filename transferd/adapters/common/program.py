"""The program that an adapter serves: what common code needs to know of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Program:
    """An inference engine's software, or a cache manager's."""

    title: str  # its name in messages
    logger: str  # the name of a logger whose lines it shows; many programs show only their own
    store: str = ""  # where a daemon that it starts keeps blocks, below `~/.cache/transferd`

    @property
    def log(self) -> logging.Logger:
        return logging.getLogger(self.logger)

    @property
    def folder(self) -> str:
        """Part of the name of its private directory: `transferd-FOLDER-UID`."""
        return self.title.lower()
