"""Blocks straight from one daemon to another: the receiver posts memory, the sender writes into it.

Theory of operation
-------------------
Two channels connect two daemons. Control messages use a TCP connection that the receiver opens (messages.py,
connection.py). Bytes go through a carrier (carrier.py): Mooncake's TransferEngine, which writes local memory
into a peer's registered memory, over TCP or RDMA, without the peer's help.

For one transfer and rank:

    receiver                                sender
    Want(transfer, rank, names, engine) ──▶   … until its own task for the transfer runs …
                                        ◀── Begin              both name the same objects
    Post(slots)                         ──▶                    memory for some of the objects
                                              gather, seal, write into the slots
                                        ◀── Landed(names)
    verify, copy to the device
    Done                                ──▶                    the sender's task ends well

Either side may come first, and either may end the transfer: the sender with Refusal, the receiver with Withdraw.
Each message carries the number of the receiver's attempt, so late messages of a failed attempt cannot disturb the
next one. The sender writes sealed objects, as in storage (formats.py). So the receiver finds damage, or an object
of another key, layout, generation or token count, before it reaches a device.

**No deadlock.** A sender takes staging only for objects whose memory is posted, so its slots always become free
again. A receiver holds slots only after Begin. So neither can wait for the other in a circle.

**Memory that a peer may still write to.** A receiver frees posted memory only once the sender cannot write to it
any more: after Landed, Refusal or Withdrawn, which the sender sends when none of its writes runs. After a failed
write or a lost connection (the sender may be alive, and in the middle of a write), the receiver waits HOLD_S
longer: for bytes on the wire, and for that write to end or to stall for as long as the carrier allows. If a peer
hangs with its connection open, its slots stay posted. They belong to a separate staging, so only transfers between
peers can run out of them. Keep-alives close the connection of a host that has gone.
"""
