"""The library's error codes: the one place that names and groups them.

The values are those of Mooncake's `ErrorCode` (mooncake-store/include/types.h, 0.3.13). A code that is not listed
is an error of its object and is reported by number.
"""

from __future__ import annotations

from transferd.errors import StorageError, StorageUnavailable

OK = 0
INTERNAL_ERROR = -1
NO_AVAILABLE_HANDLE = -200  # no segment has room; also for a second after a master's restart
INVALID_PARAMS = -600  # of a get: the object is longer than the buffer
ILLEGAL_CLIENT = -601
INVALID_WRITE = -700
REPLICA_IS_NOT_READY = -703  # the object is being written
OBJECT_NOT_FOUND = -704
OBJECT_ALREADY_EXISTS = -705
LEASE_EXPIRED = -707
REPLICA_NOT_FOUND = -710
REPLICA_IS_GONE = -712
OBJECT_REPLICA_BUSY = -714
TRANSFER_FAIL = -800
RPC_FAIL = -900
RPC_TIMEOUT = -901
ETCD_OPERATION_ERROR = -1000
ETCD_KEY_NOT_EXIST = -1001
ETCD_TRANSACTION_FAIL = -1002
ETCD_CTX_CANCELLED = -1003
UNAVAILABLE_IN_CURRENT_STATUS = -1010
UNAVAILABLE_IN_CURRENT_MODE = -1011
NAMES = {code: name for name, code in list(globals().items()) if isinstance(code, int)}
# Codes that we only name.
NAMES |= {
    -10: "BUFFER_OVERFLOW", -101: "SEGMENT_NOT_FOUND", -102: "SEGMENT_ALREADY_EXISTS", -103: "CLIENT_NOT_FOUND",
    -300: "INVALID_VERSION", -400: "INVALID_KEY", -500: "WRITE_FAIL", -701: "INVALID_READ", -702: "INVALID_REPLICA",
    -706: "OBJECT_HAS_LEASE", -708: "OBJECT_HAS_REPLICATION_TASK", -709: "OBJECT_NO_REPLICATION_TASK",
    -711: "REPLICA_ALREADY_EXISTS", -801: "CHECKSUM_MISMATCH", -1700: "TENANT_QUOTA_EXCEEDED",
    -1701: "TENANT_NOT_REGISTERED",
}  # fmt: skip

UNSEEN = 2  # our own: the library reports the object as stored, but a get would not find it

# The whole pool is unavailable: the master is gone, hangs, or is not the leader (yet).
NO_ANSWER = frozenset(
    {
        *(RPC_FAIL, RPC_TIMEOUT, ETCD_OPERATION_ERROR, ETCD_KEY_NOT_EXIST, ETCD_TRANSACTION_FAIL, ETCD_CTX_CANCELLED),
        *(UNAVAILABLE_IN_CURRENT_STATUS, UNAVAILABLE_IN_CURRENT_MODE),
    }
)

# A get that misses, with nothing wrong.
NOT_THERE = frozenset({OBJECT_NOT_FOUND, REPLICA_IS_NOT_READY, REPLICA_NOT_FOUND, REPLICA_IS_GONE})

# A put that collided with another client's write of the same key.
OVERTAKEN = frozenset({OBJECT_ALREADY_EXISTS, ILLEGAL_CLIENT, INVALID_WRITE, OBJECT_NOT_FOUND, OBJECT_REPLICA_BUSY})

# Failures that leave no transfer behind: none began, or it ended and only its result was dropped. After any
# other failure, a call that ran into the library's own limit may leave bytes in flight (store.py).
SETTLED = NO_ANSWER | NOT_THERE | {NO_AVAILABLE_HANDLE, INVALID_PARAMS, OBJECT_ALREADY_EXISTS, LEASE_EXPIRED}


def describe(code: int) -> str:
    """A code as readable text, such as `OBJECT_NOT_FOUND, -704`."""
    name = NAMES.get(code)
    return f"code {code}" if name is None else f"{name}, {code}"


def error(verb: str, key: str, code: int) -> StorageError:
    """The error of an object with this code. verb: what was to be done with it."""
    kind = StorageUnavailable if code in NO_ANSWER else StorageError
    return kind(f"Mooncake could not {verb} {key} ({describe(code)})")
