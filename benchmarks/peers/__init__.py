"""Other movers of KV caches beside transferd, in one run (`make bench-peers`)."""
