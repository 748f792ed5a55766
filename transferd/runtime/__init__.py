"""What any daemon needs from its process: clock, threads, signals, limits.

Nothing here knows what a block or a task is. The crews of threads.py bear the names of what a cache does with them:
they store, load, or make and free memory.
"""
