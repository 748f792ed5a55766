"""The messages between an engine and the daemon, and the sockets that carry them. Both ends use this folder."""
