"""Which generation an engine serves when its weights change in place (docs/adr/0111). Pure decisions.

vLLM names the version of its weights (`finish_weight_update(weight_version=…)`), and engines that have synced to one
version can share blocks. But vLLM's own caches may still hold KV of older weights then, which would be stored under the
new version. So a version counts only if the connector was reset, with vLLM's caches, and nothing was computed between
that and the change. Otherwise the engine serves a unique generation, as after a reset without a version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transferd.adapters.vllm.settings import calls

FIRST = "default"  # vLLM's name for the version of the weights that it has loaded at its start


class Versions:
    """For the scheduler's thread only.

    base: the operator's generation.
    version: returns the version that vLLM names now.
    """

    def __init__(self, base: str, version: Callable[[], str]) -> None:
        self._base, self._version = base, version
        self._seen = version()
        self._empty = False  # whether vLLM has computed nothing since its caches were emptied

    def computed(self) -> None:
        """Note that vLLM computes something."""
        self._empty = False

    def reset(self) -> str:
        """Note that vLLM has emptied its caches. Returns the generation to serve; "" for a unique one."""
        self._empty = True
        return self._follow()

    def changed(self) -> str | None:
        """The generation to serve because vLLM's version has changed, "" for a unique one; None if it has not."""
        return None if self._version() == self._seen else self._follow()

    def _follow(self) -> str:
        now, before = self._version(), self._seen
        self._seen = now
        if now == before or not self._empty:  # the weights may have changed with no version, or KV of others is left
            return ""
        return "-".join(part for part in (self._base, now) if part)


def version_of_the_engine() -> Callable[[], str]:
    """Returns the version of the engine that is creating a connector; always the first one if vLLM has none.

    vLLM does not pass it on. The engine's core is an argument of the calls that are creating the connector, as the
    configuration is for a tier (docs/adr/0070).
    """
    for variables in calls():
        core: Any = variables.get("self")
        if hasattr(type(core), "get_weight_version") and hasattr(core, "_weight_version"):
            return lambda: str(core.get_weight_version())
    return lambda: FIRST
