"""Every error code that a client can see. docs/protocol.md says of each what answers it, what it means and what to do.

A test compares these names with that page and with the codes that the source raises.
"""

from __future__ import annotations

CODES = frozenset({
    # not admitted now
    "queue_full", "bytes_in_flight", "starting", "task_id_busy",
    # not in this state
    "draining", "not_attached", "empty_block", "cleared", "cache_gone", "engine_gone", "rank_died",
    # cannot work as it is
    "bad_value", "bad_request", "length_mismatch", "id_out_of_range", "duplicate_id", "duplicate_key",
    "too_many_blocks", "token_ids_required", "no_salts", "token_ids_too_short", "task_id_conflict",
    "no_storage_tier", "no_host_tier", "no_direct_mode", "no_timelines", "prefix_only", "identity_mismatch",
    "unregistered", "group_mismatch",
    # the world failed
    "expired", "cancelled", "shutdown", "storage_error", "storage_full", "storage_gone", "not_admitted",
    "storage_unavailable", "storage_denied", "storage_read_only", "storage_io", "tier_error", "device_lost",
    "device_stuck", "out_of_device_memory", "no_cuda", "out_of_memory", "no_descriptors", "no_threads",
    "still_running", "damaged", "internal", "error",
    # direct transfers
    "peer_lost", "peer_refused", "already_sending", "model_mismatch", "layout_mismatch", "generation_mismatch",
    "blocks_mismatch", "version_mismatch",
    # messages and requests
    "malformed", "unsupported_version", "unknown_type", "too_large", "stale_session", "forbidden", "too_often",
    "too_many_requests", "too_many_keys", "unknown_task", "not_token_indexed", "no_token_index",
    # engines
    "unknown_engine", "engine_exists", "not_this_engine", "too_many_engines", "no_room", "not_yours", "user_hidden",
    # stored objects
    "share_exceeded", "backend_cannot", "unknown_level",
    # memory
    "not_ready", "stale_epoch", "stale_offer", "already_attached", "memory_unusable", "not_attachable", "unsealed",
    "canary_mismatch", "wrong_kind", "not_shareable", "wrong_device", "still_mapped", "not_cleared",
    "closed_generation", "fixed_generation",
    # raised by our own client
    "connect_timeout", "daemon_lost", "no_answer", "closed", "unsettled", "wrong_loop", "wrong_thread",
    "handover_failed",
})  # fmt: skip
