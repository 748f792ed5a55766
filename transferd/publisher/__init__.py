"""KV events on their way out (docs/events.md): sockets.py is how they travel, feed.py joins them to a daemon."""
