"""KV events: every change of where a block is, told to whoever subscribes (docs/events.md).

wire.py says what an event looks like, residency.py when there is one, sockets.py how it travels, and
feed.py joins the three to a daemon.
"""
