"""This node's membership in a pool: the arguments of the client's `setup`, from [storage.mooncake].

The section already includes FastDeploy's and Mooncake's own variables (config/environment.py).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from transferd.config import MooncakeStorageSection, Size
from transferd.errors import ConfigError

LEAST_SEGMENT = 16 * 1024**2  # with less, the library's `setup` fails with a meaningless code


@dataclass(frozen=True, kw_only=True)
class Membership:
    """All arguments of the client's `setup`."""

    master_server_addr: str
    metadata_server: str
    local_hostname: str
    protocol: Literal["tcp", "rdma"]
    rdma_devices: str
    global_segment_size: int
    local_buffer_size: int


def membership(section: MooncakeStorageSection) -> Membership:
    """The membership that the section describes. Raises ConfigError that names the wrong key."""
    if not section.master_server_addr:
        raise ConfigError("storage.mooncake.master_server_addr", "is required, for example 127.0.0.1:50051")
    complete = Membership(**{field.name: getattr(section, field.name) for field in fields(Membership)})
    if 0 < complete.global_segment_size < LEAST_SEGMENT:
        what = f"must be 0 or at least {Size(LEAST_SEGMENT)}, the smallest segment that Mooncake accepts"
        raise ConfigError("storage.mooncake.global_segment_size", what, str(complete.global_segment_size))
    return complete
