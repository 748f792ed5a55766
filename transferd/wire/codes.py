"""Every status and error code that a client can see, and what the client has to do.

docs/protocol.md prints both tables. A test compares them with that page and with the codes that the source raises.
"""

from __future__ import annotations

from typing import NamedTuple

from transferd.tasks import Status

STATUSES: dict[Status, tuple[str, str]] = {
    Status.OK: ("every block moved on every rank", "use the blocks"),
    Status.PARTIAL: (
        "only `block_ids` moved, on every rank; `error` says why, if something failed",
        "read: use this prefix and compute the rest. write: the other blocks are not stored",
    ),
    Status.MISS: ("a read found none of its blocks; nothing failed", "compute them"),
    Status.FAILED: ("no block moved; `error` says why", "see its code; assume nothing of the target blocks' contents"),
    Status.EXPIRED: (
        "no block moved within `timeout`",
        "compute the blocks, or push again under a new id. If `error` names a rank that is still working, the daemon "
        "gives these blocks to no other task until that rank has finished; do not use them before: `settled` is false",
    ),
    Status.CANCELLED: ("the task was cancelled; `block_ids` had moved by then", "use `block_ids` alone, or nothing"),
    Status.REJECTED: (
        "the task cannot work as it is, or not in the daemon's current state; nothing was touched",
        "see its code; do not push it again unchanged",
    ),
    Status.BUSY: ("not admitted now; nothing was touched", "push it again after `retry_after` seconds"),
}


class Code(NamedTuple):
    """One error code. answer: the status of a task's result, `refused`, or `client` for what our own client raises."""

    answer: str
    meaning: str
    action: str


_CORRECT = "correct the request"
_COMPUTE = "compute the blocks; later tasks may work"
_CONFIGURE = "correct the configuration of the engine or the daemon"
_REPORT = "report it, with the daemon's log"
_LATER = "ask again later"

CODES: dict[str, Code] = {
    # not admitted now
    "queue_full": Code(
        "busy", "`server.max_queued_tasks` or `tuning.server.max_queued_bytes` is reached", "wait `retry_after`"
    ),
    "bytes_in_flight": Code("busy", "`tuning.server.max_inflight_bytes` of this lane is reached", "wait `retry_after`"),
    "starting": Code("busy, refused", "the daemon is not ready yet", "wait for a `welcome` that says `ready`"),
    "task_id_busy": Code(
        "busy", "a rank still works on the earlier task of this id, or too many wait for it", "wait `retry_after`"
    ),
    # not in this state
    "draining": Code("rejected", "the daemon is drained or stopping", "push it after the `resume`, or to a new daemon"),
    "not_attached": Code(
        "rejected",
        "the task names device memory that this client, or no client, has mapped",
        "attach every rank, push again",
    ),
    "empty_block": Code("rejected", "a swap-in names a host block that no swap-out has filled", "compute the block"),
    "cleared": Code("rejected", "the cache was cleared", "wait for `restore_cache`; then attach again"),
    "cache_gone": Code(
        "rejected", "the task had ended, and the memory of its result is gone", "attach again, and push under a new id"
    ),
    "engine_gone": Code(
        "rejected, failed, refused",
        "the process that owns the device memory has ended",
        "wait until an engine has offered memory",
    ),
    "rank_died": Code("rejected, failed", "a rank's device is lost", "wait for a restarted daemon; compute the blocks"),
    # cannot work as it is
    "bad_value": Code("rejected, refused", "a field is missing, of the wrong type, or out of its range", _CORRECT),
    "bad_request": Code("rejected, refused", "the request cannot be carried out", _CORRECT),
    "length_mismatch": Code("rejected", "lists that belong together differ in length", _CORRECT),
    "id_out_of_range": Code("rejected", "a block id is not of this cache", _CORRECT),
    "duplicate_id": Code(
        "rejected", "a list names one target block twice, or two that share bytes (windows)", _CORRECT
    ),
    "duplicate_key": Code("rejected", "a write names one key twice", _CORRECT),
    "too_many_blocks": Code("rejected", "a write has more blocks than the device", "split the task"),
    "token_ids_required": Code("rejected, refused", "storage is token-indexed", "send `token_ids`"),
    "no_salts": Code(
        "rejected, refused", "AttentionStore's SDK cannot keep paths with other salts apart", "use the open driver"
    ),
    "token_ids_too_short": Code("rejected", "`token_ids` end before the last block does", "send the whole path"),
    "task_id_conflict": Code("rejected", "another task was pushed under this id", "push it under a new id"),
    "no_storage_tier": Code("rejected, refused", "the daemon has no storage", _CONFIGURE),
    "no_host_tier": Code("rejected", "the daemon has no host blocks", _CONFIGURE),
    "no_direct_mode": Code("rejected", 'the daemon has `pd.mode = "storage"`', _CONFIGURE),
    "no_timelines": Code("failed", "the device tier cannot wait for a timeline (`after`)", _CONFIGURE),
    "prefix_only": Code("rejected", "a sparse read, but storage can only find or move leading blocks", "set `prefix`"),
    "identity_mismatch": Code(
        "client",
        "the daemon came back as another engine than the client has used: another model, layout or place of its group",
        "start it as it was, or connect anew",
    ),
    "unregistered": Code(
        "refused", "the engine was unregistered, which ends its token for all of its processes", "register it anew"
    ),
    "group_mismatch": Code("client, failed", "the nodes of a group do not match, or one has changed", _CONFIGURE),
    # the world failed
    "expired": Code("expired, partial", "the deadline passed", "as for the status"),
    "cancelled": Code("cancelled, failed", "the task was cancelled, here or by the peer", "as for the status"),
    "shutdown": Code("failed, refused", "the daemon stopped before the task began", "push it to the next daemon"),
    "storage_error": Code("failed, partial, refused", "the pool failed for these objects", _COMPUTE),
    "storage_full": Code("failed, partial", "the pool has no room", "the blocks are not stored; later ones may be"),
    "storage_gone": Code(
        "failed, partial",
        "the store's directory is gone, or another one is in its place",
        "compute the blocks; the operator mounts it again and restarts the daemon",
    ),
    "not_admitted": Code(
        "partial",
        'no second task has asked to store these blocks (`storage.admit = "second use"`); nothing failed',
        "none: a later task may store them",
    ),
    "storage_unavailable": Code("failed, partial, refused", "the pool does not answer", _COMPUTE),
    "storage_denied": Code("failed, partial, refused", "the disk or the bucket refuses the daemon access", _COMPUTE),
    "storage_read_only": Code("failed, partial", "the file system of the store is read-only", _COMPUTE),
    "storage_io": Code("failed, partial", "the disk of the store failed to read or write", _COMPUTE),
    "tier_error": Code("failed, partial, refused", "a copy failed", "compute the blocks: their contents are unknown"),
    "device_lost": Code(
        "failed, rejected, refused",
        "the GPU context is lost, or shared memory has vanished",
        "compute blocks; offer other memory, attach again, or wait for a restarted daemon (GPU)",
    ),
    "device_stuck": Code("failed, refused", "a copy on the device does not end", "wait for a restarted daemon"),
    "out_of_device_memory": Code("failed, refused", "the GPU has no memory left", "free some, then try again"),
    "no_cuda": Code("failed, refused", "no CUDA driver, device or compiler can be used", _CONFIGURE),
    "out_of_memory": Code("failed, refused", "the daemon's host has no memory left", "try again later, with less"),
    "no_descriptors": Code("client", "the engine's process may open no more files", "raise its limit (ulimit -n)"),
    "no_threads": Code("failed", "the daemon's host cannot start more threads", "try again later"),
    "still_running": Code("failed, refused", "a storage call or a copy does not end", "wait for a restarted daemon"),
    "damaged": Code("failed, partial", "a block that a peer sent does not match its checksum", _COMPUTE),
    "internal": Code("failed, rejected, refused", "a bug in transferd", _REPORT),
    "error": Code("failed, refused", "an error without a more precise code", "read the message"),
    # direct transfers
    "peer_lost": Code("failed, partial", "the other daemon is gone", _COMPUTE),
    "peer_refused": Code("failed", "the other daemon refused or cancelled the transfer", _COMPUTE),
    "already_sending": Code("failed", "this transfer_id is already being sent", "use a new transfer_id"),
    "model_mismatch": Code("failed", "the daemons serve different models", _CONFIGURE),
    "layout_mismatch": Code("failed, refused", "memory, ranks or a registration do not match the layout", _CONFIGURE),
    "generation_mismatch": Code(
        "failed, rejected, refused",
        "two daemons have different weight generations, or a restarted daemon another one than the client has served",
        "set the right generation",
    ),
    "blocks_mismatch": Code("failed", "sender and receiver name different blocks", "name the same keys on both sides"),
    "version_mismatch": Code("failed", "the daemons speak different versions", "upgrade the older daemon"),
    # messages and requests
    "malformed": Code(
        "rejected, refused, failed", "the bytes are not a message of this protocol", "correct the client"
    ),
    "unsupported_version": Code(
        "rejected, refused", "the first byte names another version", "speak the daemon's version"
    ),
    "unknown_type": Code(
        "rejected, refused", "the daemon does not know the `type`", "correct it or upgrade the daemon"
    ),
    "too_large": Code(
        "rejected, refused, failed", "the message is longer than `max_message`", "send several smaller tasks"
    ),
    "stale_session": Code(
        "refused",
        "the message is from a session of another connection, and nothing was done; with seq 0: something has changed",
        "say `hello`; if the session is another, repeat what is pending",
    ),
    "forbidden": Code("rejected, refused", "an observer may not ask this", "use an endpoint for engines"),
    "too_often": Code("refused", "`tuning.server.observer_rate` is reached", _LATER),
    "too_many_requests": Code("refused", "too many requests already wait, or pauses and drains are held", _LATER),
    "too_many_keys": Code("refused", "the request has more keys than one `match` or `exists` takes", "ask in parts"),
    "unknown_task": Code("refused", "the flight recorder does not have this task (any more)", "look into a dump"),
    "not_token_indexed": Code("refused", "storage is indexed by keys, not by tokens", "match `keys`"),
    "no_token_index": Code("refused", "the daemon keeps no open token index", _CONFIGURE),
    # engines
    "unknown_engine": Code("rejected, refused", "no engine of this name is registered, or it has left", "register it"),
    "engine_exists": Code("refused", "a live engine has this name", "take another name, or wait until it has left"),
    "not_this_engine": Code(
        "rejected, refused",
        "the client has not shown the token of the engine's registration",
        "pass the token that `register` returned, or take another name",
    ),
    "too_many_engines": Code("refused", "`engines.max_engines` is reached", _LATER),
    "no_room": Code(
        "refused",
        "the engine needs more memory, or more memories, than it may have",
        "ask for fewer of them",
    ),
    "not_yours": Code(
        "rejected, refused",
        "the engine, its stored objects or the offered memory belong to another user, or the daemon cannot know which "
        "user asks",
        "run as that user, and connect over a unix socket",
    ),
    "user_hidden": Code(
        "refused",
        "the daemon's user namespace does not map the client's user, so it can own no engine",
        "run daemon and engine in one user namespace",
    ),
    # stored objects
    "share_exceeded": Code(
        "refused",
        "the engine asks for a larger share of the store, or pins more of it, than it may",
        "ask for less, or unpin blocks",
    ),
    "backend_cannot": Code(
        "refused", "the storage backend does not know its own objects, so it cannot do this", _CONFIGURE
    ),
    "unknown_level": Code("refused", "the store has no level of this name", "name one of `storage.levels`"),
    # memory
    "not_ready": Code("refused", "the rank has no memory now", "wait for `ready`, then ask again"),
    "stale_epoch": Code(
        "rejected, refused",
        "the mapped memory is from an earlier epoch",
        "attach again, with epoch 0",
    ),
    "stale_offer": Code("refused", "the offer was made before a clear", "offer again after `restore_cache`"),
    "already_attached": Code(
        "refused",
        "the rank has memory from another process, or a byte is another rank's, of whichever engine; only windows of "
        "one user's engines may share bytes",
        "offer each byte once",
    ),
    "memory_unusable": Code(
        "refused",
        "the offered memory is shorter than the offer says, or a part of it does not exist and cannot be allocated",
        "allocate it before the offer",
    ),
    "not_attachable": Code(
        "refused",
        "the daemon allocates this memory itself, or cannot map such a descriptor",
        "attach instead of offering, or offer memory with a name",
    ),
    "unsealed": Code(
        "refused",
        "the memory of a descriptor could shrink while the daemon has it mapped",
        "seal it with F_SEAL_SHRINK",
    ),
    "canary_mismatch": Code("refused", "the daemon did not find the canary that the client wrote", _CORRECT),
    "wrong_kind": Code("refused", "the handle is not for the daemon's device tier", _CONFIGURE),
    "not_shareable": Code("client", "this GPU memory cannot be shared with another process", "the message says how"),
    "wrong_device": Code("refused", "the memory is on another GPU than the rank", _CONFIGURE),
    "still_mapped": Code("refused", "clients have the memory mapped", "let them detach, then ask again"),
    "not_cleared": Code("refused", "nothing was cleared", "none: the cache is there"),
    "closed_generation": Code("refused", "a clear has closed this generation", "name a new one, or `same_weights`"),
    "fixed_generation": Code("refused", "AttentionStore's SDK cannot change its generation", "restart the daemon"),
    # raised by our own client
    "connect_timeout": Code("client", "no daemon answered, or it was not ready in time", "the message says which"),
    "daemon_lost": Code(
        "client",
        "the daemon went silent or was restarted",
        "attach again; the task's outcome is unknown, and its blocks are free once it is settled",
    ),
    "no_answer": Code("client", "the daemon lives and did not answer in time", "ask `explain`; report it"),
    "closed": Code("client", "the client was closed", "make a new one"),
    "unsettled": Code(
        "client",
        "in the time that the caller allowed, it did not become known whether the daemon still touches the blocks",
        "do not use the blocks; wait for `settled`, or end the daemon",
    ),
    "wrong_loop": Code(
        "client", "a client was used on another event loop than its own", "use SyncClient, or a client for each loop"
    ),
    "wrong_thread": Code("client", "a SyncClient was called from its own thread", "call it from another one"),
    "handover_failed": Code("client", "a sequence was not handed over whole", "compute it; see the result"),
}
