"""What any daemon needs from its process: clock, threads, signals, limits. Nothing here knows of blocks or tasks."""
