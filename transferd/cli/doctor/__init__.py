"""`transferd doctor`: what on this machine stands in the daemon's way, and what to do about each thing."""
