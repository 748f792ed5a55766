"""KV events: the daemon announces which blocks it holds, and follows what other nodes announce."""
