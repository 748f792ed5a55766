"""What any daemon needs from its process: clock, threads, signals, limits. It knows no block and no task."""
