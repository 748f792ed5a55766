"""The memory of an engine's cache, as its client maps it, offers it, clears it and has it restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transferd.client.calls import Calls
from transferd.client.offers import QUIET_TIMEOUT_S, Attachments, HandleLike, Offers, arrays, timelines
from transferd.client.session import Conversation
from transferd.errors import DaemonLost
from transferd.wire import protocol as wire

RESTORE_TIMEOUT_S = 600.0  # to allocate memory: pinning hundreds of GiB takes minutes


class CacheCalls(Calls):
    """The memory of the engine's ranks, device and host: to map it, to offer it, to clear and restore it."""

    _conversation: Conversation
    _attached: Attachments
    _offers: Offers

    @property
    def outdated(self) -> list[int]:
        """Attached ranks that have lost their memory. Call `reattach`, or `attach` for each of them."""
        return list(self._attached.outdated)

    async def attach(self, rank: int) -> dict[str, list[Any]]:
        """Map a rank's device cache: {plane: [one array per layer]}, zero-copy. The creator of the memory owns it.

        For shared memory these are numpy arrays. Stay connected while you use them: the daemon accepts tasks only while
        every rank is attached. After a clear or a restart, they show old bytes that only you see: call `reattach`.
        For a GPU, the arrays have `__cuda_array_interface__` and DLPack; drop them and `detach` before a clear.
        Raises RequestError, and TierError if the memory cannot be shared.
        """
        return arrays(await self.device_handle(rank))

    async def timelines(self, rank: int) -> Any:
        """Map a rank's timelines; call their `advance(after, stream)` behind its work. None if the rank has none."""
        return timelines(await self.device_handle(rank))

    async def reattach(self, timeout: float | None = None) -> dict[int, dict[str, list[Any]]]:
        """After a restart or a clear, attach every rank that this client had attached: {rank: `attach`'s arrays}.

        Waits until the daemon is ready. All blocks are empty. Raises ConnectTimeout, and what `attach` raises.
        """

        async def attach_again() -> dict[int, dict[str, list[Any]]]:
            await self.wait_ready(timeout)
            return {rank: await self.attach(rank) for rank in self._attached.attached}

        try:
            return await attach_again()
        except DaemonLost:  # only now do we notice the restart
            return await attach_again()

    async def device_handle(self, rank: int) -> dict[str, Any]:
        """Return the handle that `attach` maps, {kind, data, …}. The daemon counts it as mapped until `detach`."""
        handle: dict[str, Any] = await self._ask(wire.Attach(rank))
        self._conversation.uses()
        self._attached.attach(rank, handle)
        return handle

    async def detach(self, rank: int) -> None:
        """Tell the daemon that you have unmapped a rank's memory. On a GPU, `clear_cache` fails until you do."""
        await self._ask(wire.Detach(rank))
        self._attached.detach(rank)

    async def offer(
        self,
        rank: int,
        handle: HandleLike | Mapping[str, Any],
        *,
        caches: Mapping[str, Sequence[Any]] | None = None,
        block: int | None = None,
    ) -> None:
        """Offer a rank's memory to a daemon that does not create it; return once the daemon has mapped it.

        handle: a tier's DeviceHandle, or {kind, data}. The memory stays yours: keep it until the daemon or this client
            is gone, or the cache is cleared. The client repeats the offer to a restarted daemon by itself.
        caches: your own view of that memory, {plane: [one array per layer]}: numpy arrays, or `rows(…)` from
            tiers.cuda.rows or adapters.paddle. With it the daemon first checks that the handle leads to the same bytes:
            during the check, `block` (1 by default) of every array holds random bytes. The client restores the original
            bytes before the offer takes effect. Do not use that block until this returns.

        Raises RequestError (`layout_mismatch`, `canary_mismatch`, `already_attached`, `not_yours`, `not_attachable`,
        `stale_offer`, …), TierError.
        """
        if self._conversation.engine and not self._conversation.session.epoch:
            await self._ask(
                self._conversation.hello()
            )  # another process may have registered the engine since the last Welcome
        self._conversation.uses()
        await self._offers.make(rank, handle, caches, block)

    async def clear_cache(self, *, keep_host: bool = False) -> None:
        """Free all device and host memory of the cache, once every admitted task is answered.

        keep_host: host memory loses its blocks, but stays allocated and pinned: pinning tens of GiB takes seconds.
        From this call until `restore_cache`, tasks are `rejected` with code `cleared`. Memory that clients offered
        is unmapped. Raises RequestError with code `still_mapped`, and changes nothing, if clients must detach first
        (GPU memory).
        """
        await self._change_cache(wire.ClearCache(keep_host), QUIET_TIMEOUT_S)

    async def restore_cache(self, generation: str | None = None, *, same_weights: bool = False) -> None:
        """Re-create the memory of a cleared cache, zeroed, and serve `generation`, which must be a new one.

        generation: None means what the daemon's storage.version_file says now or, without such a file, the current one,
            which `set_generation` must have changed since the clear.
        same_weights: the engine slept and still serves the same weights, so `generation` may be the one that the clear
            closed, and its stored blocks stay valid.

        A daemon that does not create memory then waits for new offers. Raises RequestError (`not_cleared`,
        `closed_generation`), or TierError if there is no room; the cache then stays cleared.
        """
        await self._change_cache(wire.RestoreCache(generation, same_weights), RESTORE_TIMEOUT_S)
        if generation is None:
            await self._ask(self._conversation.hello())  # the Welcome names the generation
        else:
            self._conversation.weights.restored(generation)
            self._conversation.amend(generation=generation)

    async def _change_cache(self, body: wire.ClearCache | wire.RestoreCache, timeout: float) -> None:
        self._attached.changing += 1
        try:
            epoch = int(await self._ask(body, timeout))
        finally:
            self._attached.changing -= 1
        self._conversation.weights.cleared(epoch, self._conversation.session.registered)
        self._conversation.amend(epoch=epoch)
        self._offers.keep(epoch)
        self._attached.epoch_began(epoch)
