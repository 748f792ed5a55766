"""How engines really run and allocate: other users, other namespaces, other allocators."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import sys
from typing import Any

from tests.machine.gpu import descriptor
from tests.machine.gpu.machine import LAYOUTS, Failed, Found, Machine, Verdict, open_rig
from tests.machine.gpu.processes import peer

PRIVATE_SHM = 'mount -t tmpfs none /dev/shm && exec "$@"'
NAMESPACES: dict[str, tuple[str, ...]] = {
    "another user": ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
    "a private /dev/shm": ("unshare", "--mount", "--ipc", "sh", "-c", PRIVATE_SHM, "sh"),
    "its own PID namespace": ("unshare", "--pid", "--fork", "--mount-proc"),
}
TOLD = ("one user for both", "PID namespace", "has ended", "share it")  # what a refusal has to name, one of these


NOT_ALLOWED = "not allowed on this machine"


def explained(text: str) -> bool:
    """Whether it was mapped, or the refusal says what to change."""
    mapped = text.partition(" ")[2].startswith("arrays mapped")
    return mapped or text == NOT_ALLOWED or any(word in text for word in TOLD)


async def _allowed(before: tuple[str, ...]) -> bool:
    """Whether this machine lets us run an engine in that place, and the engine read our files."""
    null, engine = asyncio.subprocess.DEVNULL, (sys.executable, "-c", "import tests.machine.gpu.peer")
    process = await asyncio.create_subprocess_exec(*before, *engine, stdout=null, stderr=null)
    return await process.wait() == 0


async def engines_in_other_places(machine: Machine) -> Found:
    """Whether the cache can be mapped by another user and from other namespaces, or what the refusal says."""
    if machine.fake or os.geteuid() != 0 or shutil.which("unshare") is None:
        return Found("needs a GPU, root and util-linux", "skipped")
    told: dict[str, Any] = {}
    for name, before in NAMESPACES.items():
        if not await _allowed(before):
            told[name] = NOT_ALLOWED
            continue
        async with open_rig(machine, LAYOUTS["gqa"]) as rig:
            try:
                async with peer(machine, before=before) as engine:
                    arrays = await engine.ask("attach", data=rig.tier.handle().data)
                    ready = await engine.ask("shares")
                    told[name] = f"{arrays} arrays mapped, {ready}"
            except Failed as error:
                told[name] = str(error).splitlines()[0]
    bad = [name for name, text in told.items() if not explained(text)]
    note = "; ".join(f"{name}: {text}" for name, text in told.items())
    verdict: Verdict = "wrong" if bad else "skipped" if set(told.values()) == {NOT_ALLOWED} else "right"
    return Found(note, verdict, told)


async def memory_that_cannot_be_shared_is_refused(machine: Machine) -> Found:
    """What allocators of frameworks are made of: memory from cuMemCreate, from a pool, and from cudaMalloc."""
    if machine.fake:
        return Found("needs a GPU", "skipped")
    told: dict[str, str] = {}
    async with peer(machine) as engine:
        for kind in ("cuMemAlloc", "cuMemCreate", "cuMemAllocAsync"):
            told[kind] = await engine.ask("odd_memory", kind=kind)
    refused = [kind for kind, text in told.items() if text.startswith("not_shareable")]
    good = told["cuMemAlloc"] == "shared" and refused == ["cuMemCreate", "cuMemAllocAsync"]
    return Found("; ".join(f"{kind}: {text}" for kind, text in told.items()), "right" if good else "wrong", told)


async def memory_may_be_shared_by_a_descriptor(machine: Machine) -> Found:
    """Whether this machine could take memory from cuMemCreate by a descriptor, which we do not (docs/adr/0039)."""
    if machine.fake:
        return Found("needs a GPU", "skipped")
    told: dict[str, str] = {}
    places: dict[str, tuple[str, ...]] = {"as this user": ()}
    if os.geteuid() == 0 and shutil.which("unshare"):
        places |= NAMESPACES
    for name, before in places.items():
        if before and not await _allowed(before):
            told[name] = NOT_ALLOWED
            continue
        try:
            async with peer(machine, before=before) as engine:
                made = await engine.ask("by_descriptor", value=0x5A)
                told[name] = await asyncio.to_thread(descriptor.read, machine, engine.process.pid, made)
        except Failed as error:
            told[name] = str(error).splitlines()[0]
    return Found("; ".join(f"{name}: {text}" for name, text in told.items()), figures=told)


async def allocators_are_taken_or_named(machine: Machine) -> Found:
    """torch with each of its allocators: its memory is shared, or refused with the setting to change."""
    if importlib.util.find_spec("torch") is None or machine.fake:
        return Found("needs a GPU and torch", "skipped")
    told: dict[str, Any] = {}
    for setting in ("", "expandable_segments:True", "backend:cudaMallocAsync"):
        env = {"PYTORCH_CUDA_ALLOC_CONF": setting}
        async with peer(machine, env=env) as engine:
            try:
                await engine.ask("torch_own", cache=LAYOUTS["gqa"])
                told[setting or "native"] = "shared"
            except Failed as error:
                told[setting or "native"] = str(error).splitlines()[0]
    bad = [name for name, text in told.items() if text != "shared" and name.split(":")[-1] not in text]
    return Found("; ".join(f"{name}: {text}" for name, text in told.items()), "wrong" if bad else "right", told)


CHECKS = (
    engines_in_other_places,
    memory_that_cannot_be_shared_is_refused,
    memory_may_be_shared_by_a_descriptor,
    allocators_are_taken_or_named,
)
