"""`transferd top`: what a daemon is doing, redrawn every second."""
