"""Storage in several levels, the fastest first: `storage.levels` (docs/levels.md). `stack` is the backend."""

from transferd.storage.levels.stack import LevelsStorage

__all__ = ["LevelsStorage"]
