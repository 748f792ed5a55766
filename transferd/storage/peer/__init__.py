"""Blocks straight from one daemon to another: the receiver posts memory, the sender writes into it.

Theory of operation
-------------------
Two channels join two daemons. Control messages go over a TCP connection that the receiver opens
(messages.py, connection.py). Bytes go through a carrier (carrier.py): Mooncake's TransferEngine, which
writes local memory into the registered memory of a peer, over TCP or RDMA, without the peer's help.

For one transfer and rank:

    receiver                                sender
    Want(transfer, rank, names, engine) ──▶   … until its own task for the transfer runs …
                                        ◀── Begin              both name the same objects
    Post(slots)                         ──▶                    memory for some of the objects
                                              gather, seal, write into the slots
                                        ◀── Landed(names)
    verify, copy to the device
    Done                                ──▶                    the sender's task ends well

Either may come first, and either may end it: Refused from the sender, Withdraw from the receiver. Each message
carries the number of the receiver's attempt, so what is left of an attempt that was given up disturbs no later
one. What is written is a sealed object as in storage (footer.py), so what was damaged, or is of another key,
layout, generation or number of tokens, is found before it reaches a device.

**No deadlock.** A sender takes staging only for objects whose memory is posted, so its slots are always on
their way to come free; a receiver holds slots only after Begin. Neither waits for what the other waits for.

**Memory that a peer may still write to.** A receiver lets go of posted memory only when the sender cannot
write to it any more: it said Landed, Refused or Withdrawn, each of which it sends when no write is under way.
After a write that failed, or when the connection has ended (its sender may live, and be in a write), it waits
HOLD_S longer: for what is on the wire, and for that write to end or to stall for as long as the carrier allows.
A peer that hangs with its connection open keeps its slots posted. They are slots of a staging of their own, so
that only direct transfers can run short of them, and keep-alives end the connection of a host that has gone.
"""
