"""Memory that holds blocks: device memory, the pinned host pool, and staging.

One contract (base.py), and one file or folder for each kind of device. A device has two ends: the daemon's is its tier;
the engine's (page_handles.py, cuda/engine.py) makes handles of memory and maps those of the daemon.
"""
