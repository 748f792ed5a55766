"""Blocks: their layout, their keys and names, where their bytes lie, and the formats they are stored in.

Pure: nothing here waits, allocates device memory or touches a file.
"""
