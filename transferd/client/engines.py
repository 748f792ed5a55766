"""An engine that a client registers with the daemon, and what the client remembers of it (docs/adr/0040)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from transferd.blocks.fingerprint import Facts, refusal
from transferd.client.calls import CONTROL_TIMEOUT_S, Calls
from transferd.client.offers import QUIET_TIMEOUT_S, Attachments, Holds, Offers
from transferd.client.pending import changed_nothing
from transferd.client.session import Conversation
from transferd.client.weights import Repeating
from transferd.config.names import GENERATION, MODEL
from transferd.errors import RequestError
from transferd.wire import protocol as wire

UNREGISTERED = "unregistered"  # how a registration ended: by a client of its own, for all of them
REGISTER_TIMEOUT_S = 600.0  # to allocate host blocks: pinning hundreds of GiB takes minutes


class Layout(Protocol):
    """A description of blocks that can be expressed in the keys of [cache]."""

    def as_cache(self) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A group of ranks with one geometry, as it registers with a daemon.

    ranks: those on this node; the group may have more (group_ranks, first_rank).
    model, generation: of the weights; they are part of every stored object's name.
    layout: `Pages`, or a mapping with keys of [cache] (attention, layers, kv_heads, head_dim, block_size, dtype,
        device_blocks, device, …).
    host_blocks: the size of each rank's host tier, which the daemon allocates.
    dp_rank: data-parallel rank, for KV events.
    fingerprint: facts that change a block's bytes, in words, such as {"rope theta": 10000.0, "weights": "step 7"};
        blocks/fingerprint.py has their bounds.
    storage_share: the part of the store, 0 to 1, that is kept for this engine: below it, its blocks are not evicted for
        other engines. At most `engines.storage_share` of the daemon's configuration, which is what None gets.

    Engines read each other's blocks if they have the same model, generation, group size and facts, and layouts that
    agree in what a block is; others never do.
    """

    ranks: int
    model: str
    layout: Layout | Mapping[str, Any]
    generation: str = ""
    host_blocks: int = 0
    first_rank: int = 0
    group_ranks: int = 0
    dp_rank: int = 0
    storage_share: float | None = None
    fingerprint: Facts = field(default_factory=dict)

    def said(self, token: str) -> wire.Register:
        """The request that registers this engine. Raises RequestError for an invalid layout or fingerprint."""
        for named, value in ((MODEL, self.model), (GENERATION, self.generation)):
            if problem := named.wrong(value):
                raise RequestError(f"{problem}, not {value!r:.80}", code="bad_value")
        layout = self.layout
        if not isinstance(layout, Mapping):
            if not hasattr(layout, "as_cache"):
                what = f"a layout is Pages, or a mapping with keys of [cache], not {type(layout).__name__}"
                raise RequestError(what, code="bad_value")
            layout = layout.as_cache()
        if self.fingerprint:
            if why := refusal(self.fingerprint):
                raise RequestError(f"the engine's fingerprint {why}", code="bad_value")
            # A key of [cache]: a daemon that does not know it refuses the engine, and so never drops it.
            layout = {**layout, "fingerprint": dict(self.fingerprint)}
        of_group = (self.host_blocks, self.first_rank, self.group_ranks, self.dp_rank, self.storage_share)
        return wire.Register(token, self.ranks, self.model, dict(layout), self.generation, *of_group)


class Registration:
    """The engine that this client has registered, if any. Each new session registers it again, under the same token."""

    def __init__(self, conversation: Conversation, fresh_id: Callable[[], str]) -> None:
        self._conversation = conversation
        self._fresh_id = fresh_id
        self._made: wire.Register | None = None
        self._repeating = Repeating()

    async def register(self, engine: Engine) -> int:
        """Register the engine. Returns its epoch, new or continued."""
        body = said = engine.said(self._conversation.token or self._fresh_id())
        served = self._conversation.weights.generation
        if said == self._made and served is not None:  # the same engine again, which may have new weights since
            body = msgspec.structs.replace(said, generation=served)
        known, self._conversation.token = self._conversation.token, said.token
        try:
            value: dict[str, int] = await self._conversation.request(body, REGISTER_TIMEOUT_S)
        except RequestError:  # refused; after any other error it may have been registered, so the token stays
            self._conversation.token = known
            raise
        self._made = said
        session = self._conversation.session
        self._conversation.weights.registered(session, body.generation)
        self._conversation.served.forget()
        self._repeating = Repeating((session.boot_id, session.session))
        self._conversation.amend(
            epoch=value["epoch"],
            registration=body.token,
            registered=value["registered"],
            ready=False,
            identity=None,
        )
        return value["epoch"]

    async def unregister(self, ended: Callable[[], object]) -> None:
        """ended: called unless the engine is still there for certain."""
        made, self._made = self._made, None  # a new daemon must not get it meanwhile
        try:
            await self._conversation.request(wire.Unregister(), QUIET_TIMEOUT_S)
        except BaseException as error:
            if changed_nothing(error) and (not isinstance(error, RequestError) or error.reason != "unknown_engine"):
                self._made = self._made or made
            else:
                self._forget()
                ended()
            raise
        self._forget()
        ended()
        self._conversation.amend(epoch=0, registration="", registered=0, ready=False, identity=None)

    def _forget(self) -> None:
        self._conversation.weights.unregistered()
        self._conversation.served.forget()
        self._conversation.token = ""  # a later registration is another engine, unknown to the other clients

    def again(self) -> list[wire.ControlRequest]:
        """The requests to repeat after a Welcome: in a new session, and while the engine is not there."""
        now, served = self._conversation.session, self._conversation.weights.generation
        life = now.boot_id, now.session
        if self._made is None or not self._repeating.due(life, self._conversation.now, known=now.epoch > 0):
            return []
        return [self._made if served is None else msgspec.structs.replace(self._made, generation=served)]

    def clear(self) -> None:
        self._made = None


class ControlCalls(Calls):
    """The client's engine: its registration, its pauses, and the generation of its weights."""

    _registration: Registration
    _conversation: Conversation
    _attached: Attachments
    _offers: Offers
    _holds: Holds

    @property
    def token(self) -> str:
        """What proves that a client belongs to this client's engine; "" for none. A secret of the engine."""
        return self._conversation.token

    async def register(self, engine: Engine) -> str:
        """Register the engine that this client names; return its token when its ranks can `offer` their memory.

        Give the token to the engine's other processes, and to nobody else: only clients with it (`Client(token=)`)
        belong to this engine. A client made with a token registers that one; otherwise the token is new and random.

        The engine stays as long as at least one of its clients lives. If the daemon restarts, or considers all of the
        engine's clients gone, this client registers it again by itself, and each client repeats its offers.

        Raises RequestError (`engine_exists`, `too_many_engines`, `layout_mismatch`, `not_yours`, `no_room`, …).
        """
        self._attached.epoch_began(await self._registration.register(engine))
        return self._conversation.token

    async def unregister(self) -> None:
        """End this client's engine; return when its tasks have ended and the daemon has unmapped its memory.

        Its other clients lose it as well. Raises RequestError, or `too_many_requests`; then nothing has changed.
        """
        await self._registration.unregister(self._offers.clear)

    async def pause(self) -> None:
        """Stop starting tasks; return once no task touches a block. New tasks are still admitted, and wait.

        The pause belongs to this client: it ends with `resume`, with `close`, or when the client dies. It survives a
        broken connection and a restart of the daemon. Cancelling this wait does not end the pause.
        """
        await self._holds.pause()

    async def resume(self) -> None:
        """End this client's pause and drain. A client that holds neither ends everyone's: the operator's override."""
        await self._holds.resume(CONTROL_TIMEOUT_S)

    async def drain(self) -> None:
        """Stop admitting tasks; return once every admitted task is answered. A drain ends like a pause."""
        await self._holds.drain()

    async def set_generation(self, generation: str) -> None:
        """Use this weight version from now on. Objects of every other generation become unreachable.

        Returns once every live client of the engine knows it, so that a restarted daemon hears of it: after a few
        milliseconds, or seconds if a process of the engine is suspended. If this raises because no daemon answers, the
        client asserts the generation to the next one and sets it, since the engine's weights are new; to go back, set
        the earlier one. A refused generation (RequestError) changes nothing.
        """
        await self._conversation.weights.set(generation, self._ask)
        self._conversation.amend(generation=generation)
