"""Who creates a rank's device cache: exactly one side, by a rule that both sides can apply.

When several places decided this, they disagreed: memory was allocated twice, or processes wrote and read the same bytes
(docs/adr/0012 has the remedy). So the rule is one pure function of the configuration. The daemon acts by
it; an engine calls the same function or reads the answer from `stats()`. Its truth table is in docs/memory.md; a test
compares the two.
"""

from __future__ import annotations

from transferd.config import Config
from transferd.runtime.compat import StrEnum


class Creator(StrEnum):
    """The side that allocates the device cache. The other one maps it."""

    ENGINE = "engine"
    DAEMON = "daemon"


def creator(config: Config, *, profiling: bool = False) -> Creator:
    """Who creates the device cache of every rank.

    profiling: the engine is measuring how much memory a forward pass leaves, with its own short-lived cache, which it
    does not offer to the daemon. Meanwhile the daemon creates none.

    `cache.ownership = "auto"` follows FastDeploy's rule since #7471: the daemon creates for a mixed engine with a
    storage tier. With a host tier alone, a worker creates. In prefill and decode engines the cache messager creates,
    which also belongs to the engine. "create" and "attach" name the side directly.
    """
    cache = config.geometry
    if profiling or cache.ownership == "attach":
        return Creator.ENGINE
    if cache.ownership == "create":
        return Creator.DAEMON
    return Creator.DAEMON if cache.role == "mixed" and config.storage.backend != "none" else Creator.ENGINE
