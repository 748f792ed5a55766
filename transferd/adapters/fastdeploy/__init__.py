"""FastDeploy's cache queue over a transferd daemon: a drop-in for its EngineCacheQueue (docs/fastdeploy.md)."""

from __future__ import annotations

from transferd.adapters.fastdeploy.queue import EngineCacheQueue

__all__ = ["EngineCacheQueue"]
