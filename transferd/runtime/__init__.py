"""What any daemon needs from its process: clock, threads, signals, limits.

Nothing here depends on blocks or tasks, but for the crews of threads.py: they are named after a cache's work, which is
to store, to load, or to make and free memory.
"""
