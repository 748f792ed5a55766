"""What any program of this kind needs of its process: clock, threads, signals, limits. Knows no block and no task."""
