"""What travels between an engine and the daemon, and the sockets that carry it: both ends use this folder."""
