"""A standing adversary: honest engines of several users work on one daemon, and everybody else attacks it.

    python -m tests.machine.hostile.campaign [--minutes 30 | --rounds 1] [--seed N] [--group NAME] [--keys | --no-keys]

A round is every action once, in an order that the seed draws, by two throw-away users at a time; honest engines are
stopped and killed between them. It prints the seed, each action and what it was told; `wrong:` and exit code 1 if a
promise was broken. Needs root: it makes users, and runs in a mount namespace with a small /dev/shm of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import zmq

from tests.machine.hostile.accounts import Account, accounts
from tests.machine.hostile.actions import ACTIONS, GROUPS, Place
from tests.machine.hostile.honest_engine import Spec
from tests.machine.hostile.honest_handover import Spec as HandoverSpec
from tests.machine.hostile.neighbours import NEIGHBOURS, Neighbours, transfers_obstacle
from tests.machine.hostile.oracle import LOOK_S, Oracle
from transferd.cli.pool.master import free_port
from transferd.client import launch
from transferd.runtime.compat import timeout

ROOT = Path(__file__).parents[3]
ENGINE, HANDOVER = "tests.machine.hostile.honest_engine", "tests.machine.hostile.honest_handover"
HONEST, HOSTILE = ("alice", "bob", "carol"), ("mallory", "trudy")
KEEPER = "keeper"  # of the daemon whose memory adversaries may map, because they are in its group
SHM_SIZE = "64m"
READY_S, END_S, ACTION_S = 60.0, 60.0, 90.0
BREATH_S = 0.05  # between two actions of one adversary
CLONE_NEWNS, MS_REC_PRIVATE = 0x00020000, 0x44000


def config(directory: Path, port: int, tcp: str, curve: dict[str, str] | None) -> dict[str, dict[str, Any]]:
    """A daemon with every kind of socket, open to all users; the one on the network with CURVE's keys or without."""
    return {
        "server": ({} if curve is None else {"curve": curve})
        | {
            "endpoint": [f"ipc://{directory}/door", tcp],
            "socket_mode": "0666",
            "observer_endpoint": f"ipc://{directory}/window",
            "observer_mode": "0666",
            "client_timeout": 10.0,
            "max_message": "1MiB",
            "max_queued_tasks": 256,
        },
        "host": {"staging": "256KiB"},
        "storage": {"backend": "memory", "memory": {"capacity": "32MiB"}},
        "events": {"endpoint": f"ipc://{directory}/pub", "replay_endpoint": f"ipc://{directory}/replay"},
        "metrics": {"listen": f"127.0.0.1:{port}"},
    }


class Honest:
    """One honest engine's process, and the next one after it was killed. module: what it runs."""

    def __init__(self, spec: Spec | HandoverSpec, oracle: Oracle, module: str = ENGINE) -> None:
        self._module = module
        self.spec = spec
        self._oracle = oracle
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self.tasks = 0

    async def start(self) -> None:
        arguments = [sys.executable, "-m", self._module, json.dumps(asdict(self.spec))]
        self._ready = asyncio.Event()
        self._process = await asyncio.create_subprocess_exec(*arguments, stdin=PIPE, stdout=PIPE, cwd=ROOT)
        self._reading = asyncio.create_task(self._read(self._process))

    async def ready(self) -> None:
        try:
            async with timeout(READY_S):
                await self._ready.wait()
        except TimeoutError:
            self._oracle.wrong(f"{self.spec.name} was not ready within {READY_S:g} s")

    async def _read(self, process: Process) -> None:
        assert process.stdout is not None
        async for raw in process.stdout:
            line = raw.decode().rstrip()
            if line == "ready":
                self._ready.set()
            elif line.startswith("done "):
                self.tasks += int(line.removeprefix("done "))
            else:
                self._oracle.wrong(f"{self.spec.name}: {line.removeprefix('wrong: ')}")
        await process.wait()
        self._ready.set()

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def restart(self) -> None:
        """Kill it and start another one under its name."""
        self.send(signal.SIGKILL)
        if self._reading is not None:
            await self._reading
        await self.start()
        await self.ready()

    async def end(self) -> None:
        """Let it end by itself. It must have done something."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._reading is not None
        self._process.stdin.close()
        try:
            async with timeout(END_S):
                await self._reading
        except TimeoutError:
            self._oracle.wrong(f"{self.spec.name} did not end within {END_S:g} s")
            self.send(signal.SIGKILL)
            await self._reading
        if self._process.returncode != 0:
            self._oracle.wrong(f"{self.spec.name} ended with exit code {self._process.returncode}")
        if not self.tasks:
            self._oracle.wrong(f"{self.spec.name} did nothing")


class Campaign:
    """One daemon with its neighbours, their honest engines and their adversaries."""

    def __init__(
        self, daemon: launch.DaemonProcess, place: Place, users: dict[str, Account], seed: int, neighbours: Neighbours
    ) -> None:
        self._dice = random.Random(seed)
        self._place = place
        self._daemon = daemon
        self.oracle = Oracle(daemon)
        self._neighbours = neighbours
        self._others = [Oracle(one, name) for name, one in neighbours.daemons.items()]
        self.actions = 0
        self._floods = asyncio.Lock()  # at `pd.listen`, one at a time: all may use the same memory
        self.honest = [
            Honest(
                Spec(
                    endpoint=place.door,
                    name=name,
                    uid=users[name].uid,
                    gid=users[name].gid,
                    signature=signature,
                    secret=self._dice.randbytes(12).hex(),
                    named=number % 2 == 1,
                    seed=self._dice.getrandbits(32),
                ),
                self.oracle,
            )
            for number, (name, signature) in enumerate(zip(place.honest, place.signatures, strict=True))
        ]
        self._handovers = [Honest(spec, self.oracle, HANDOVER) for spec in neighbours.handovers]
        self._on_files = [Honest(spec, self.oracle) for spec in neighbours.engines]

    @property
    def all_honest(self) -> list[Honest]:
        return [*self.honest, *self._handovers, *self._on_files]

    @property
    def oracles(self) -> list[Oracle]:
        return [self.oracle, *self._others]

    @property
    def _alive(self) -> bool:
        return all(oracle.lives for oracle in self.oracles)

    async def run(self, rounds: Iterator[int], names: list[str]) -> None:
        watching = [asyncio.create_task(oracle.watch()) for oracle in self.oracles]
        for engine in self.all_honest:
            await engine.start()
        for engine in self.all_honest:
            await engine.ready()
        async with self._adversary() as one, self._adversary() as other:
            for _ in rounds:
                order = self._dice.sample(names, len(names))
                seeds = [self._dice.getrandbits(32) for _ in order]
                disturbed = self._dice.choice(self.honest)
                todo = iter(list(zip(order, seeds, strict=True)))
                await asyncio.gather(
                    self._attack(one, 0, todo),
                    self._attack(other, 1, todo),
                    self._disturb(disturbed, self._dice.random() < 0.5),
                )
                if not self._alive:
                    break
        await self._end(watching)

    async def _end(self, watching: list[asyncio.Task[None]]) -> None:
        if not self._alive:
            await asyncio.sleep(2 * LOOK_S)  # until the watching one has seen it
            for engine in self.all_honest:
                engine.send(signal.SIGKILL)
            return
        for engine in self.all_honest:
            await engine.end()
        for oracle in self.oracles:
            await oracle.at_rest()
        for task in watching:
            task.cancel()
        for oracle in reversed(self.oracles):  # the first one looks at what all have left
            await oracle.stop()

    @contextlib.asynccontextmanager
    async def _adversary(self) -> AsyncIterator[Process]:
        arguments = [sys.executable, "-m", "tests.machine.hostile.adversary", json.dumps(asdict(self._place))]
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # it forks
        process = await asyncio.create_subprocess_exec(*arguments, stdin=PIPE, stdout=PIPE, cwd=ROOT, env=environment)
        assert process.stdout is not None
        await process.stdout.readline()  # it has imported everything
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            await process.communicate()

    async def _attack(self, process: Process, user: int, todo: Iterator[tuple[str, int]]) -> None:
        for name, seed in todo:
            if not self._alive:
                return
            async with self._floods if name.endswith("_at_transfers") else contextlib.nullcontext():
                if not await self._act(process, user, name, seed):
                    return

    async def _act(self, process: Process, user: int, name: str, seed: int) -> bool:
        """One action; whether it has ended."""
        assert process.stdin is not None
        assert process.stdout is not None
        for oracle in self.oracles:
            oracle.doing.add(name)
        process.stdin.write(f"{name} {seed} {user}\n".encode())
        try:
            async with timeout(ACTION_S):
                answer = json.loads(await process.stdout.readline())
        except TimeoutError:
            self.oracle.wrong(f"{name} {seed} did not end within {ACTION_S:g} s")
            return False
        self.actions += 1
        print(f"{name} {seed}: {'; '.join(answer['told']) or 'ended'}"[:300], flush=True)
        for problem in answer["wrong"]:
            self.oracle.wrong(f"{name}: {problem}")
        await asyncio.sleep(BREATH_S)
        self._neighbours.refuse(self._dice)
        for oracle in self.oracles:
            oracle.doing.discard(name)
        return True

    async def _disturb(self, engine: Honest, kill: bool) -> None:
        """Kill an honest engine, or stop it for a while: what happens to it must be its own doing."""
        await asyncio.sleep(0.5)
        if kill:
            await engine.restart()
        else:
            engine.send(signal.SIGSTOP)
            await asyncio.sleep(1.0)
            engine.send(signal.SIGCONT)


# --- the whole ------------------------------------------------------------------------------------


def obstacle() -> str:
    """Why no campaign can run here; "" if one can."""
    if os.geteuid() != 0:
        return "only root can make users, become them, and mount"
    missing = [tool for tool in ("useradd", "userdel") if shutil.which(tool) is None]
    return f"{missing[0]} is not installed" if missing else ""


def shared_memory_obstacle() -> str:
    """Why this process cannot have a /dev/shm of its own; "" if it can. Tried in a child."""
    command = [
        sys.executable,
        "-c",
        "from tests.machine.hostile.campaign import own_shared_memory; own_shared_memory()",
    ]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    return f"no mount namespace can be had here: {tried.stderr.strip()[-200:]}" if tried.returncode else ""


def own_shared_memory() -> None:
    """Give this process, and those that it starts, a small /dev/shm of its own. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    steps: tuple[Callable[[], int], ...] = (
        lambda: libc.unshare(CLONE_NEWNS),
        lambda: libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None),
        lambda: libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, f"mode=1777,size={SHM_SIZE}".encode()),
    )
    for step in steps:
        if step() != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def rounds_for(seconds: float, rounds: int) -> Iterator[int]:
    """The numbers of the rounds: so many, or until the time is over."""
    end = time.monotonic() + seconds
    for number in itertools.count():
        if (rounds and number == rounds) or (not rounds and time.monotonic() > end):
            return
        yield number


def keys(directory: Path) -> tuple[dict[str, str], list[str]]:
    """Keys of a daemon and of one client: [server.curve], and [the server's public, a client's public and secret]."""
    server, client = zmq.curve_keypair(), zmq.curve_keypair()
    (directory / "secret").write_bytes(server[1])
    (directory / "secret").chmod(0o600)
    (directory / "clients").mkdir()
    (directory / "clients" / "adversary").write_bytes(client[0])
    section = {"secret_key_file": f"{directory}/secret", "client_keys_dir": f"{directory}/clients"}
    return section, [key.decode() for key in (server[0], *client)]


def campaign(seed: int, names: list[str], seconds: float, rounds: int, keyed: bool | None) -> list[str]:
    """Run one; returns what was wrong. Raises OSError if this machine forbids a mount namespace.

    keyed: whether the socket on the network asks for keys; None: as the seed says.
    """
    own_shared_memory()
    dice = random.Random(seed)
    wanted = {name for name in NEIGHBOURS if not {one.__name__ for one in GROUPS[name]}.isdisjoint(names)}
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="td-hostile-")))
        directory.chmod(0o755)
        users = stack.enter_context(accounts(KEEPER, *HONEST, *HOSTILE, shared=HOSTILE))
        port, network, *transfers = [free_port() for _ in range(4)]
        tcp, door = f"tcp://127.0.0.1:{network}", f"ipc://{directory}/door"
        curve, pair = keys(directory) if (seed % 2 == 1 if keyed is None else keyed) else (None, [])
        tree = config(directory, port, tcp, curve)
        prefix = ["env", f"PYTHONPATH={ROOT}"]
        daemon = stack.enter_context(launch.running(tree, directory, prefix=prefix))
        neighbours = Neighbours(directory, users[KEEPER], transfers, wanted, stack)
        place = Place(
            door=door,
            tcp=tcp,
            keys=pair,
            window=f"ipc://{directory}/window",
            pub=f"ipc://{directory}/pub",
            replay=f"ipc://{directory}/replay",
            page=f"127.0.0.1:{port}",
            honest=list(HONEST),
            honest_uids=[users[name].uid for name in HONEST],
            signatures=[dice.randbytes(16).hex() for _ in HONEST],
            users=[(users[name].uid, users[name].gid) for name in HOSTILE],
            transfers=neighbours.transfers,
            tokens=neighbours.tokens,
            members=neighbours.members,
            groups=[users[KEEPER].gid],
        )
        one = Campaign(daemon, place, users, seed, neighbours)
        asyncio.run(one.run(rounds_for(seconds, rounds), names))
        done = sum(engine.tasks for engine in one.all_honest)
        peak = ", ".join(str(oracle.peak >> 20) for oracle in one.oracles)
        print(f"{one.actions} actions, {done} tasks of honest engines, daemons at most {peak} MiB")
        found = [(at, problem) for oracle in one.oracles for problem, at in oracle.problems.items()]
        return [f"after {at:.1f} s: {problem}" for at, problem in sorted(found)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=0, help="instead of minutes")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--group", choices=GROUPS, action="append", help="only its actions; may be repeated")
    parser.add_argument("--keys", action=argparse.BooleanOptionalAction, help="on the network; else as the seed says")
    parser.add_argument("--action", choices=ACTIONS, default=None)
    options = parser.parse_args()
    if why := obstacle():
        print(why, file=sys.stderr)
        return 2
    seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    names = [options.action] if options.action else list(ACTIONS)
    if options.group:
        names = [action.__name__ for group in options.group for action in GROUPS[group]]
    elif not options.action and (why := transfers_obstacle()):
        print(f"without the group transfers: {why}", file=sys.stderr)
        names = [name for name in names if ACTIONS[name] not in GROUPS["transfers"]]
    print(f"seed {seed}", flush=True)
    problems = campaign(seed, names, 60 * options.minutes, options.rounds, options.keys)
    for problem in problems[:50]:
        print(f"wrong: {problem}")
    print(f"seed {seed}: {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
