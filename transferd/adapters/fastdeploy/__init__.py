"""FastDeploy over a transferd daemon: its plugin, and a drop-in for its EngineCacheQueue (docs/fastdeploy.md).

plugin        what FastDeploy loads: changes names in its modules, nothing on disk
engine_queue  the queue of an engine that was switched over; group: the state behind it
arguments     derives the daemon's configuration from FastDeploy's command for a transfer process
companion     finds a running daemon, or starts one that ends with the last engine
control       carries out pause, sleep, new weights …, in both of FastDeploy's protocols
signals, replies, memory   how FastDeploy's processes wait for each other, answer, and share device blocks
books         corrects FastDeploy's PrefixCacheManager after a failed swap
expected      the names of FastDeploy that all of these use, compared at the launch
identity      what two engines must have in common to read each other's blocks
queue, items  the queue itself; needs nothing from FastDeploy
"""

from __future__ import annotations

from transferd.adapters.fastdeploy.queue import EngineCacheQueue

__all__ = ["EngineCacheQueue"]
