"""The ledger of costs: what peers and engines can make the daemon spend, with the bound of each and a user's share.

    python scripts/costs_ledger.py [--check]

Writes the table "Bounds" of docs/security.md. --check writes nothing, and exits 1 if the table differs, or if the code
has a bound (a constant MOST_…, MAX_…, FEW_…) that no row names: a resource without a row. What bounds no peer is in
NO_COST, with the reason.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PAGE = ROOT / "docs" / "security.md"
BEGIN, END = "<!-- bounds: python scripts/costs_ledger.py -->", "<!-- end of bounds -->"
FOLDERS = ("wire", "daemon", "control", "observability", "tiers", "runtime", "storage/peer", "workers")
BOUNDS = ("MOST", "MAX_", "FEW_", "FEWEST")
IN_BYTES = (  # whose names do not say so
    "MOST_RECEIVED", "MOST_UNREAD", "MOST_UNREAD_OF_ALL", "MOST_COMMAND", "MAX_HANDLE", "MAX_SUBSCRIPTION", "MAX_BATCH",
    "MAX_FRAME", "MAX_UNSENT", "MAX_UNSENT_OF_ALL", "MAX_ARRIVING",
)  # fmt: skip
FIRST_COME, NO_USER = "first come, first served", "–"


class Row(NamedTuple):
    """One resource. bound, user, beyond: {0}, {1}, … stand for the constants, as "module:NAME"."""

    of: str
    bound: str
    user: str  # the share of a user, or of whoever else must not take all of it
    beyond: str
    constants: tuple[str, ...] = ()


LEDGER = [
    Row("queued tasks", "`server.max_queued_tasks`", "an engine that registers: a quarter", "`busy`"),
    Row(
        "memory of admitted tasks, token_ids included",
        "`tuning.server.max_queued_bytes`",
        "an engine that registers: a quarter",
        "`busy`",
    ),
    Row(
        "bytes in flight, per lane",
        "`tuning.server.max_inflight_bytes`",
        "an engine that registers: a quarter",
        "`busy`",
    ),
    Row(
        "pushes that join one task; ids in one request", "{0}; {1}", NO_USER, "`busy`; refused",
        ("control.dispatcher:MAX_WAITERS", "wire.protocol:MOST_IDS"),
    ),
    Row("a message", "`tuning.server.max_message`; of an observer 64 KiB", NO_USER, "`too_large`, then cut off"),
    Row(
        "time of the event loop: messages of all peers, requests over HTTP",
        "4 ms in a turn",
        "{0} messages of a peer at a time, {1} of one that has more; who has cost least goes first; HTTP counts as one "
        "peer",
        "they wait; the daemon reads no more from a peer that waits: at most 16 KiB, the rest stays in its own process",
        ("runtime.loop_turns:FRAMES", "runtime.loop_turns:SHARE"),
    ),
    Row(
        "time of the event loop: look-ups of many keys; keys of one of them",
        "a piece of {0} keys in each turn, of all clients; {1}",
        "a look-up of {0} keys or fewer waits for no turn",
        "they wait; `too_many_keys`",
        ("daemon.lookup:PIECE", "daemon.lookup:MAX_MATCH_KEYS"),
    ),
    Row(
        "time of the event loop: reports (`stats`, `/metrics`, `/status`, the page)",
        "a new one for each viewer while each costs less than 5 ms, and all a tenth of a core; then one a second",
        "the same for all",
        "all get the same one, at most a second old",
    ),
    Row(
        "requests of observers", "`tuning.server.observer_rate` per second, together", FIRST_COME, "`too_often`"
    ),
    Row(
        "messages above 16 KiB that are arriving, of all peers",
        "{0}, or one message if that is larger",
        "the next is of the user who has taken least",
        "they wait; if one that others wait for has not arrived after 10 s, its connection ends (`stalled_message`)",
        ("wire.shares:MOST_RECEIVED",),
    ),
    Row(
        "unread answers for one client; for all",
        "{0}, a single answer may be larger; {1}",
        "who has most unread goes first",
        "dropped, and a new session makes the client ask again; the connection of the client with most ends "
        "(`unread_answers`)",
        ("wire.connection:MOST_UNREAD", "wire.connection:MOST_UNREAD_OF_ALL"),
    ),
    Row(
        "requests that wait: match, pause, drain and others; their arguments",
        "{0}, {1} of a client; {2}",
        "{3}; {4}",
        "`too_many_requests`",
        ("daemon.server:MAX_WAITING_REQUESTS", "daemon.server:MAX_WAITING_PER_CLIENT",
         "daemon.server:MAX_WAITING_BYTES", "daemon.server:FEW_WAITING", "daemon.server:FEW_BYTES"),
    ),
    Row(
        "descriptors: connections of clients",
        "`server.max_connections`, or 7/16 of the descriptors (`LimitNOFILE=`) if that is less",
        "a user with fewer gets the newest place of the user with most; before that goes the oldest handshake that is "
        "unfinished after 0.25 s",
        "closed as soon as they are accepted (`too_many_connections`)",
    ),
    Row(
        "a handshake", "{0}, 5 s", NO_USER, "its connection ends (`handshake_failed`)", ("wire.zmtp:MOST_COMMAND",)
    ),
    Row(
        "descriptors: HTTP",
        "{0} connections (an eighth of the descriptors if that is less), {1} of headers, 5 s",
        NO_USER,
        "431 for headers; the oldest silent connection goes, never the newest",
        ("observability.http:MAX_CONNECTIONS", "observability.http:MAX_HEADER_BYTES"),
    ),
    Row(
        "memory and time of the event loop: answers over HTTP that wait to be read",
        "{0} of each in a turn, {1} s; all who get the same report share one text",
        NO_USER,
        "its connection ends",
        ("observability.http:ANSWER_BYTES", "observability.http:ANSWER_S"),
    ),
    Row(
        "descriptors and maps: memories that engines have mapped; of one handle",
        "a quarter of the descriptors, or a sixth of `vm.max_map_count` if that is less; {0}",
        "half of that, and {1} in any case",
        "`no_room`; refused",
        ("tiers.shm:MOST_MEMORIES", "daemon.memories:FEWEST"),
    ),
    Row(
        "descriptors: passed, and not mapped yet; of one message",
        "{0}; {1}; for {2} s",
        "half of that",
        "closed, and the offer is refused (`tier_error`)",
        ("wire.passing:MOST_HELD", "wire.passing:MOST_PASSED", "wire.passing:WAIT_S"),
    ),
    Row(
        "descriptors: watched processes of clients",
        "{0}, one for each process",
        "a user with fewer gets a place of the user with most",
        "its end is noticed as silence is, after `server.client_timeout`",
        ("daemon.liveness:MOST_PROCESSES",),
    ),
    Row(
        "memory: what an engine offers and registers, host blocks, staging",
        "what the machine and each control group of the daemon have left (`MemoryMax=`)",
        "`engines.host_memory_each`",
        "`memory_unusable`, `no_room`",
    ),
    Row("staging", "`host.staging` per rank", "the engine's own", "tasks queue"),
    Row(
        "engines that register",
        "`engines.max_engines`",
        "when all are taken, one more for each user who has none, a quarter more at most",
        "`too_many_engines`",
    ),
    Row(
        "registrations that have ended and are remembered", "{0}", NO_USER, "the oldest are forgotten",
        ("daemon.engines:MOST_ENDED",),
    ),
    Row(
        "pauses and drains that an engine holds", "{0}", "the engine's own", "`too_many_requests`",
        ("control.gate:MOST_HOLDS",),
    ),
    Row(
        "generations that clears have closed, of an engine; of one request",
        "{0}; {1}",
        "the engine's own",
        "the oldest are forgotten; refused",
        ("daemon.cache_memory:MOST_CLOSED", "wire.protocol:MOST_CLOSED"),
    ),
    Row(
        "bytes of the store that an engine pins", "`engines.pin_share`; all together half of the store",
        "the engine's own", "`share_exceeded`",
    ),
    Row(
        "prefetches of an engine that last; their keys",
        "{0}; {1}; a quarter of a level",
        "the engine's own",
        "`too_many_requests`; the rest is not brought (`storage_full`)",
        ("daemon.prefetches:MOST", "daemon.prefetches:MOST_BYTES"),
    ),
    Row(
        "kept results",
        "`tuning.server.max_results`, `tuning.server.max_result_bytes`, `tuning.server.result_ttl`",
        NO_USER,
        "forgotten",
    ),
    Row(
        "names: a task_id; a salt; a generation; a deadline",
        "{0} characters; {1}; 256; a day",
        NO_USER,
        "`rejected`; refused",
        ("control.admission:MAX_TASK_ID", "control.admission:MAX_SALT", "control.admission:MAX_TIMEOUT_S"),
    ),
    Row(
        "an offer's handle; overlaps that are looked for in one", "{0}; {1} pairs", NO_USER, "refused",
        ("daemon.requests:MAX_HANDLE", "tiers.extents:MOST_PAIRS"),
    ),
    Row(
        "KV events: a subscription; those of one subscriber",
        "{0}; only beginnings of the daemon's topic are kept",
        NO_USER,
        "its connection ends (`protocol_error`); others take no memory",
        ("daemon.kv_events.sockets:MAX_SUBSCRIPTION",),
    ),
    Row(
        "KV events: unread batches for one subscriber, for all", "16 MiB; 256 MiB", "who has most unread goes first",
        "batches are dropped; the connection of the subscriber with most ends",
    ),
    Row(
        "KV events: replays",
        "{0} peers, {1} each; {2} of a request; 1 MiB unread",
        FIRST_COME,
        "ignored; a peer that reads nothing for 10 s loses its connection (`unread_answers`)",
        ("daemon.kv_events.sockets:MAX_PEERS", "daemon.kv_events.sockets:MAX_REPLAYS_PER_PEER",
         "daemon.kv_events.sockets:MAX_REQUEST_BYTES"),
    ),
    Row(
        "KV events that this daemon follows: a batch; live ones beside a replay", "{0}; {1}", NO_USER,
        "the connection begins anew; the replay does",
        ("daemon.kv_events.subscriber:MAX_BATCH", "daemon.kv_events.following:MAX_ASIDE_BYTES"),
    ),
    Row(
        "`pd.listen`: messages above 16 KiB that are arriving, of all peers; a frame",
        "{0}; {1}",
        "the next is of the peer who has taken least",
        "they wait; if one that others wait for has not arrived after 10 s, its connection ends",
        ("storage.peer.connection:MAX_ARRIVING", "storage.peer.messages:MAX_FRAME"),
    ),
    Row(
        "`pd.listen`: receivers; those that wait for their senders, and their names", "{0}; {1}, {2}", FIRST_COME,
        "`busy`",
        ("storage.peer.transport:MAX_RECEIVERS", "storage.peer.transport:MAX_PARKED",
         "storage.peer.transport:MAX_PARKED_BYTES"),
    ),
    Row(
        "`pd.listen`: what peers have not read", "{0} of one, {1} of all", "who has most unread goes first",
        "the connection of the peer with most ends",
        ("storage.peer.connection:MAX_UNSENT", "storage.peer.connection:MAX_UNSENT_OF_ALL"),
    ),
    Row(
        "traces that wait for a collector", "{0} tasks: what their spans say, a few hundred bytes each", NO_USER,
        "dropped, counted", ("observability.traces:MAX_WAITING",),
    ),
    Row(
        "look-ups that are kept while somebody records", "{0} ids of 512 tokens", "the daemon's user and root record",
        "the oldest are dropped, counted", ("observability.key_trace:MOST_IDS",),
    ),
    Row(
        "keys that the curve of sizes follows, of all engines", "{0}", NO_USER, "a smaller sample",
        ("observability.what_if:MOST",),
    ),
    Row(
        "the flight recorder; a story", "`recorder.tasks`, `recorder.keep` files; {0} notes", NO_USER, "the oldest go",
        ("observability.story:MAX_NOTES",),
    ),
    Row(
        "log lines that wait for a slow reader; kinds of lines that are counted", "{0}; {1}", NO_USER,
        "dropped, counted", ("observability.logs:MAX_WAITING_BYTES", "observability.logs:MOST_KINDS"),
    ),
    Row(
        "series of metrics", "engines that are here, statuses, codes, lanes, levels, disks",
        "names of engines that have left are one row", "counted under another label",
    ),
]  # fmt: skip

# Constants with such names that bound nothing a peer can make us spend.
NO_COST = {
    "daemon.traffic:MOST_OTHERS": "names that one look-up that misses asks an index for",
    "wire.protocol:MOST_COUNTED": "a counter's largest value",
    "wire.connection:MOST_PIECES": "buffers of one system call",
    "wire.connection:MOST_PONG": "the protocol's",
    "wire.credentials:MOST_UIDS": "ranges of a file of the kernel",
    "daemon.stats:MOST_LAYOUT": "characters of a text in a report",
    "daemon.preflight:MOST_BLOCK_BYTES": "a layout that no machine has",
    "observability.dump_thread:MOST_FAILURES": "tries",
    "observability.logs:MOST_ITEMS": "items of a value in a line",
    "tiers.cuda.driver:MAX_PITCH": "the driver's",
    "tiers.cuda.copy_pipeline:MOST_FAILURES": "tries",
    "tiers.cuda.kernel:MAX_BLOCKS": "of a kernel's launch",
    "tiers.arrays:MAX_BYTES": "what numpy can address",
    "workers.cpu_blocks:MOST_PARTS": "of one object",
    "workers.cpu_blocks:FEWEST_BYTES": "when parts are worth it",
    "workers.job:MOST_PLANS": "of a cache",
    "workers.write:MOST_TRIES": "tries",
}


def constants() -> Iterator[str]:
    """Every bound in the code, as "module:NAME"."""
    for folder in FOLDERS:
        for path in sorted((ROOT / "transferd" / folder).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT / "transferd").with_suffix("").parts)
            for node in ast.parse(path.read_text()).body:
                for target in node.targets if isinstance(node, ast.Assign) else ():
                    if isinstance(target, ast.Name) and target.id.startswith(BOUNDS):
                        yield f"{module}:{target.id}"


def value_of(constant: str) -> str:
    module, name = constant.split(":")
    value = getattr(importlib.import_module(f"transferd.{module}"), name)
    if not isinstance(value, int | float):
        return str(value)
    if name in IN_BYTES or "BYTES" in name:
        for unit, size in (("MiB", 1024**2), ("KiB", 1024)):
            if not value % size:
                return f"{value // size} {unit}"
        return f"{value} bytes"
    return f"{value:,}"


def table() -> str:
    rows = ["| of what | bound | a user's share | beyond it |", "|---|---|---|---|"]
    for row in LEDGER:
        values = list(map(value_of, row.constants))
        cells = [row.of, *(text.format(*values) for text in (row.bound, row.user, row.beyond))]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def without_a_row() -> list[str]:
    """Bounds that neither a row nor NO_COST names, and names there that the code has not."""
    named = {one for row in LEDGER for one in row.constants} | NO_COST.keys()
    found = set(constants())
    return sorted(found - named) + sorted(f"{one} (is gone)" for one in NO_COST.keys() - found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    if missing := without_a_row():
        print(f"these bounds have no row in LEDGER: {', '.join(missing)}")
        return 1
    before, _, rest = PAGE.read_text().partition(f"{BEGIN}\n")
    old, _, after = rest.partition(f"\n{END}")
    if check:
        return int(old != table())
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
