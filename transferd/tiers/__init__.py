"""Memory that holds blocks: device memory, the pinned host pool, and staging.

One contract (base.py), and one file or folder for each kind of device.
"""
