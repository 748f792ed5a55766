"""`transferd top`: what a daemon does now, drawn again every second."""
