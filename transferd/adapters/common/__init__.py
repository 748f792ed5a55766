"""What the adapters of all engines have in common.

program      which program an adapter serves: its name in messages, its logger, its directories
settings     the settings that every adapter has, and how they are checked
link         an engine process's client, in a thread of its own; it reconnects after a lost daemon
companion    finds a running daemon, or starts one with defaults that ends with the last engine
packaged, directories   whether the packaged daemon is used; the directories of a daemon that an engine starts
slots, copied  the adapter's own memory, for engines whose memory is private; blocks that are copied to it and from it
memory       finds the file in shared memory that an address belongs to
entry        what an engine process registers and offers
fingerprint  what an adapter can see of the weights behind an engine

Nothing here knows an engine. An adapter may import all of it; nothing here is imported where no adapter runs.
"""
