"""FastDeploy over a transferd daemon: its plugin, and a drop-in for its EngineCacheQueue (docs/fastdeploy.md).

plugin        what FastDeploy loads: changes names in its modules, nothing on disk
engine_queue  the queue of an engine that was switched over; group: the state behind it
arguments     FastDeploy's command for a transfer process, as the daemon's configuration
companion     the daemon that runs already, or one that is started (adapters/embedded.py) and ends with the engine
signals, replies, memory   by what FastDeploy's processes wait for each other, answer, and share device blocks
books         its PrefixCacheManager hears of swaps that failed
queue, items, control, retired   the queue itself; needs nothing of FastDeploy
"""

from __future__ import annotations

from transferd.adapters.fastdeploy.queue import EngineCacheQueue

__all__ = ["EngineCacheQueue"]
