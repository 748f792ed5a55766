"""`transferd doctor`: what on this machine hinders the daemon, and how to fix it."""
