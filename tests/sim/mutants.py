"""Deliberate bugs, one after another, and which seed of the simulation finds each.

    python -m tests.sim.mutants [--only NAME ...] [--seeds 5000] [--jobs 2] [--format text|json]

A mutant is a text in a file of the package and another one in its place. Each is put into a copy of the
package in a temporary directory, where the campaign then runs its seeds until a story fails. Exit 0
if every mutant was found. A text that does not occur exactly once is an error, so a mutant cannot rot
into one that changes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parent.parent.parent / "transferd"
SUPPORT = PACKAGE.parent / "tests" / "support"


@dataclass(frozen=True)
class Mutant:
    """One bug: in `file` below the package, `old` (there exactly once) becomes `new`; so does each pair of `more`.

    finder: the simulation that looks for it, a module of tests/support/simulation.
    """

    name: str
    file: str
    old: str
    new: str
    more: tuple[tuple[str, str], ...] = ()
    finder: str = "campaign"

    def apply(self, package: Path) -> None:
        """Raises AssertionError when the text is not there exactly once."""
        path = package / self.file
        text = path.read_text()
        for old, new in ((self.old, self.new), *self.more):
            assert text.count(old) == 1, f"{self.name}: its text is {text.count(old)} times in {self.file}"
            text = text.replace(old, new)
        path.write_text(text)


MUTANTS = (
    Mutant(
        "the barrier resets a round in place instead of ending it",
        "barrier.py",
        "            del self._rounds[task_id]\n            self._end(round_)\n        return True",
        "            self._end(round_)\n            round_.outcomes.clear()\n        return True",
    ),
    Mutant(
        "a deadline forgets which ranks were missing",
        "barrier.py",
        "            self._owing[round_.task_id] = set(round_.missing)",
        "            round_.missing = ()",
    ),
    Mutant(
        "open rounds do not learn that a rank died",
        "daemon/coordinator.py",
        "        self.barrier.rank_died(rank, cause)",
        "        pass",
    ),
    Mutant(
        "a late arrival is dropped silently",
        "daemon/coordinator.py",
        "        if not self.barrier.arrive(job.task.task_id, outcome):",
        "        if self.barrier.arrive(job.task.task_id, outcome) is None:",
    ),
    Mutant(
        "the result of the last rank is lost",
        "tasks.py",
        'key=operator.attrgetter("rank"))\n        ]\n        nbytes',
        'key=operator.attrgetter("rank"))[: max(1, len(outcomes) - 1)]\n        ]\n        nbytes',
    ),
    Mutant(
        "a read reports the longest prefix of any rank",
        "tasks.py",
        "range(min([_prefix(o.moved) for o in outcomes], default=0))",
        "range(max([_prefix(o.moved) for o in outcomes], default=0))",
    ),
    Mutant(
        "a read counts all loaded blocks, not the leading ones",
        "tasks.py",
        "range(min([_prefix(o.moved) for o in outcomes], default=0))",
        "range(min([len(o.moved) for o in outcomes], default=0))",
    ),
    Mutant(
        "a sparse read ends at the first hole",
        "workers/read.py",
        "        if not share.prefix and prefix < len(stored):",
        "        if False:",
    ),
    Mutant(
        "a write claims what any rank stored",
        "tasks.py",
        "set.intersection(*(set(o.moved) for o in outcomes))",
        "set.union(*(set(o.moved) for o in outcomes))",
    ),
    Mutant(
        "a task counts as complete if one rank completed it",
        "tasks.py",
        '    complete = min(map(len, map(operator.attrgetter("moved"), outcomes)), default=-1) == wanted',
        '    complete = max(map(len, map(operator.attrgetter("moved"), outcomes)), default=-1) == wanted',
    ),
    Mutant(
        "a lease is returned when its put begins",
        "workers/job.py",
        "            self.release_after(begun, lease)",
        "            lease.release()",
    ),
    Mutant(
        "a block is sealed before it is copied",
        "workers/device_blocks.py",
        "            await self._move(Direction.OUT,",
        "            seal()\n            return await self._move(Direction.OUT,",
    ),
    Mutant(
        "a client hears of a refusal although its task comes again",
        "control/dispatcher.py",
        "        if push.again:",
        "        if push.again and self._now < 0:",
    ),
    Mutant(
        "a write arrives before its puts have ended",
        "workers/write.py",
        "            try:\n                await self._wait(share, sink, in_flight, left)",
        "            try:\n                share.done([i for chunk in in_flight for i in chunk.positions], 0)",
    ),
    Mutant(
        "the footer is not checked",
        "blocks/formats.py",
        "        return [check(slot, self.checked_bytes, mark) for slot, mark in zip(slots, marks, strict=True)]",
        "        return [None for _ in slots]",
    ),
    Mutant(
        "an object that is loaded in place is not checked",
        "workers/cpu_blocks.py",
        "            if _inplace.take(self.lent.blocks, i, data):\n",
        "            if _inplace.take(self.lent.blocks, i, data) or True:\n",
    ),
    Mutant(
        "a block is on loan for ever",
        "workers/cpu_blocks.py",
        "        if not self.over:\n",
        "        if self.over:\n",
    ),
    Mutant(
        "a write leaves its blocks lent to storage",
        "workers/cpu_blocks.py",
        "        if (returned := self.loan.end()) is not None:",
        "        if (returned := None) is not None:",
    ),
    Mutant(
        "a block that was taken back counts as written",
        "workers/cpu_blocks.py",
        "            return self._blocks.lost is None and _inplace.fill(self.lent.blocks, i, data, near)\n",
        "            return _inplace.fill(self.lent.blocks, i, data, near) or True\n",
    ),
    Mutant(
        "what was left counts as loaded in place",
        "workers/read.py",
        "                left.append(position)",
        "                good.append(position)",
    ),
    Mutant(
        "a read arrives before its last copies have ended",
        "workers/job.py",
        "            while under_way:\n                await under_way.popleft()\n",
        "            under_way.clear()\n",
    ),
    Mutant(
        "a follower of a load gets no bytes",
        "storage/joined.py",
        "        np.copyto(np.asarray(self._slots[i]), np.asarray(data))\n",
        "        pass\n",
    ),
    Mutant(
        "a swap-in fills one block too many",
        "workers/swap.py",
        "copy_plan(theirs, cpu, ours, gpu)",
        "copy_plan(theirs, [*cpu, cpu[0]], ours, [*gpu, next(b for b in range(48) if b not in gpu)])",
    ),
    Mutant(
        "hazards are ignored",
        "control/order.py",
        "        claim.blockers = len(blockers)\n",
        "        blockers.clear()\n        claim.blockers = len(blockers)\n",
    ),
    Mutant(
        "a write does not wait for readers",
        "control/order.py",
        "                blockers.update(use.readers)",
        "                pass",
    ),
    Mutant(
        "a withdrawn claim lets later ones overtake",
        "control/order.py",
        "            claim.abandoned = True\n            return []",
        "            claim.abandoned = True\n            claim.blockers = 0",
    ),
    Mutant(
        "a straggler's blocks are given to the next task",
        "control/dispatcher.py",
        "        if record.straggling:  # a rank that is late",
        "        if record.straggling and False:  # a rank that is late",
    ),
    Mutant(
        "a deadline is not armed",
        "control/dispatcher.py",
        "        if self.alarms.set(deadline, record):",
        "        if False:",
    ),
    Mutant(
        "the slack after a deadline is not armed",
        "control/dispatcher.py",
        "            if self.alarms.set(record.forsaken_at, record):",
        "            if False:",
    ),
    Mutant(
        "a task runs in the generation of its start",
        "control/dispatcher.py",
        "                self._out.append(do.Start(record.task, record.generation, record.admitted_at))",
        "                self._out.append(do.Start(record.task, self.generation, record.admitted_at))",
    ),
    Mutant(
        "a result is sent twice",
        "control/dispatcher.py",
        "        for client, seq in record.waiters:\n",
        "        for client, seq in record.waiters * 2:\n",
    ),
    Mutant(
        "a joined push is never answered",
        "control/dispatcher.py",
        "            record.waiters.append((push.client, push.seq))",
        "            pass",
    ),
    Mutant(
        "a known task runs again",
        "control/dispatcher.py",
        "        if known is not None or kept is not None:",
        "        if known is not None:",
    ),
    Mutant(
        "the queue has no bound",
        "control/order.py",
        "        if self.queued >= self._server.max_queued_tasks:",
        "        if False:",
    ),
    Mutant(
        "a resume starts nothing",
        "control/dispatcher.py",
        "        self.gate.resume(holder, proof)\n        self._start_ready()",
        "        self.gate.resume(holder, proof)",
    ),
    Mutant(
        "a pause outlives its client",
        "control/gate.py",
        "        ended = [hold for hold in self._held.values() if hold.client == client]",
        "        ended: list[Hold] = []",
    ),
    Mutant(
        "requests that a broken connection lost are not repeated",
        "client/session.py",
        "        self._unsent.extend(waiting)\n",
        "        self._unsent.extend(() if again else waiting)\n",
    ),
    Mutant(
        "tasks may name device memory that nobody has mapped",
        "control/contents.py",
        "        if self._unmapped:\n",
        "        if False:\n",
    ),
    Mutant(
        "a swap-in may name host blocks that are empty",
        "control/contents.py",
        "        if all(map(self._filled.__getitem__, blocks)):",
        "        if True:",
    ),
    Mutant(
        "host blocks count as filled after a clear",
        "control/contents.py",
        "        self._filled = bytearray(len(self._filled))",
        "        pass",
    ),
    Mutant(
        "a client may keep using memory that was cleared",
        "control/contents.py",
        "        if ranks:\n",
        "        if False:\n",
    ),
    Mutant(
        "a client keeps using memory that is gone",
        "client/client.py",
        "        if self._attached.orphaned and len(task.gpu_block_ids) and not self._conversation.served.differs:",
        "        if False:",
    ),
    Mutant(
        "a request of another connection's session is carried out",
        "daemon/server.py",
        "            if not client.first_session <= request.session < client.session:",
        "            if False:",
    ),
    Mutant(  # what CPython's ThreadPoolExecutor does, which this package once used
        "a function is queued before its thread is refused",
        "runtime/threads.py",
        "            while len(self._threads) < self._size:\n",
        "            while False:\n",
        (
            (
                "        return work\n\n    def under_way",
                "        if len(self._threads) < self._size:\n"
                '            self._threads.append(self._start(f"{self.name}-{len(self._threads)}"))\n'
                "        return work\n\n    def under_way",
            ),
        ),
    ),
    Mutant(
        "an effect that raises prevents the others",
        "daemon/coordinator.py",
        "                except Exception as error:  # noqa: BLE001 - whatever it is, the others were decided as well\n"
        "                    self._effect_raised(instruction, error)\n"
        "        finally:\n",
        "                except ArithmeticError as error:\n"
        "                    self._effect_raised(instruction, error)\n"
        "        finally:\n"
        "            self._todo.clear()\n",
    ),
    Mutant(
        "a rank whose start raised never arrives",
        "daemon/coordinator.py",
        "                self.rank_arrived(job, RankOutcome(worker.rank, error=self._effect_raised(start, error)))",
        "                self._effect_raised(start, error)",
    ),
    Mutant(
        "an alarm that could not be set is forgotten",
        "daemon/coordinator.py",
        "            self.hear(self.dispatcher.deadline_reached)  # harmless if early",
        "            pass  # harmless if early",
    ),
    Mutant(
        "an answer that could not be sent is not requested again",
        "daemon/clients.py",
        "            if not there:\n",
        "            if False:\n",
    ),
    Mutant(
        "a log that refuses a line raises in its caller",
        "observability/logs.py",
        "        except Exception:  # noqa: BLE001 - a value whose",
        "        except ArithmeticError:  # a value whose",
    ),
    Mutant(
        "a copy that waits for a thread begins after its task was stopped",
        "workers/job.py",
        "                    work.cancel()",
        "                    pass",
    ),
    Mutant(
        "a name alone makes a client a part of an engine",
        "daemon/belonging.py",
        "    if shows(token, shown):\n",
        "    if True:\n",
        finder="identity",
    ),
    Mutant(
        "a restarted daemon serves the generation of the first registration",
        "client/engines.py",
        "        return [self._made if served is None else msgspec.structs.replace(self._made, generation=served)]",
        "        return [self._made]",
        finder="identity",
    ),
    Mutant(
        "an offer ends with the daemon that took it",
        "client/offers.py",
        "        return 0 < now.registered < now.epoch",
        "        return True",
        finder="identity",
    ),
    Mutant(
        "a result of a lost daemon counts as settled",
        "client/pending.py",
        "            settled=self._known_settled(error),",
        "            settled=True,",
        finder="identity",
    ),
    Mutant(
        "a cancelled handover does not wait for its task",
        "client/pending.py",
        "        if self.withdrawn or self.done():\n",
        "        self.withdrawn = True\n        if True:\n",
        finder="identity",
    ),
    Mutant(
        "a daemon takes the memory of one engine for another",
        "tiers/extents.py",
        "                return next((other for other in others if overlap(claim.extents, other.extents)), None)",
        "                return None",
        finder="identity",
    ),
    Mutant(
        "weights are no part of an object's name",
        "blocks/layout/families.py",
        "    if not cache.fingerprint:\n",
        "    if True:\n",
        finder="identity",
    ),
    Mutant(
        "a restore is answered before other clients know its generation",
        "daemon/engines.py",
        "        await self._make_known(client, engine, engine.coordinator.generation)\n        return epoch",
        "        return epoch",
        finder="identity",
    ),
    Mutant(
        "silent clients are looked for a hundred times as often",
        "daemon/liveness.py",
        "        delay = self.timeout / 2",
        "        delay = self.timeout / 200",
    ),
    Mutant(
        "a level's old answer is taken for proof",
        "storage/levels/proving.py",
        "if hint is None or hint.at < since:",
        "if hint is None:",
        finder="store_world",
    ),
    Mutant(
        "a directory's index is taken for proof",
        "storage/levels/proving.py",
        "            if look is not None:\n                held",
        "            if False:\n                held",
        finder="store_world",
    ),
    Mutant(
        "what a lower level loses is not copied there again",
        "storage/levels/write_back.py",
        "        if what in (STORED, EVICTED) or self._copying.first_with(name, self.level.number) is None:",
        "        if True:",
        finder="store_world",
    ),
    Mutant(
        "a store keeps its slots until the copies below have been made",
        "storage/levels/storing.py",
        "        finally:\n            for back in self._room:",
        "            for back in parts.write_backs:\n"
        "                while back._task is not None:\n"
        "                    await back._change()\n"
        "        finally:\n            for back in self._room:",
        finder="store_world",
    ),
    Mutant(
        "a pin is not recorded on the disks",
        "storage/files_keeper.py",
        "            self.book.pin(owner, pinned, ttl_s)\n            await self.record()",
        "            self.book.pin(owner, pinned, ttl_s)",
        finder="store_world",
    ),
    Mutant(
        "what memory alone has counts as pinned durably",
        "storage/levels/keeping.py",
        "            for name, safe in zip(rest, await lowest.durable(rest), strict=True):",
        "            for name, safe in zip(rest, [True] * len(rest), strict=True):",
        finder="store_world",
    ),
    Mutant(
        "a damaged object is deleted from a bucket",
        "storage/object_store.py",
        '        self._counts["corrupt"] += 1\n        self._suspects.damaged(name)\n        return answered(None)',
        '        self._counts["corrupt"] += 1\n'
        "        return self._in_thread(Direction.OUT, lambda: obstore.delete(self._store, quoted(name)), name)",
        finder="store_world",
    ),
    Mutant(
        "a level that refuses is asked again without a pause",
        "storage/levels/write_back.py",
        "        self._until = self._now() + self._pause_s * random.uniform(1 - JITTER, 1 + JITTER)",
        "        self._until = self._now() + 0.001",
        finder="store_world",
    ),
    Mutant(
        "what began before a purge is committed after it",
        "storage/levels/fences.py",
        "        if born == self.number and not self._running:\n",
        "        if born <= self.number:\n",
        finder="store_world",
    ),
    Mutant(
        "a purge leaves the quarantine alone",
        "storage/files_keeper.py",
        "            await self._while_it_answers(place, place.empty_quarantine(dropped.selection))\n",
        "",
        finder="store_world",
    ),
    Mutant(
        "a store that missed orders that nobody lists any more is believed",
        "storage/orders.py",
        '        return "it was away while orders were given that no disk lists any more"',
        '        return ""',
        finder="store_world",
    ),
    Mutant(
        "a disk that cannot take an order goes on",
        "storage/file.py",
        '                    self.fail(f"its list of orders cannot be written: {error.strerror or error}")\n',
        "                    pass\n",
        finder="store_world",
    ),
    Mutant(
        "a lost disk is scanned while an earlier call writes to it",
        "storage/file.py",
        "        while not await self._traffic.quiet(LOOK_S):\n            pass\n        await self._effects.end()",
        "        pass",
        finder="store_world",
    ),
    Mutant(
        "two effects on one name overlap",
        "storage/indexed.py",
        "        if name in busy:  # two effects on one name must not overlap\n            return [busy[name]]\n",
        "",
        finder="store_world",
    ),
    Mutant(
        "a late answer of an old copy drops the new one",
        "storage/indexed.py",
        "self._index.forget(read.item.name, read.entry, DAMAGED if",
        "self._index.forget(read.item.name, None, DAMAGED if",
        finder="store_world",
    ),
    Mutant(
        "what a level evicted for room is copied there again at once",
        "storage/levels/write_back.py",
        "        if what in (STORED, EVICTED) or self._copying.first_with(",
        "        if what == STORED or self._copying.first_with(",
        finder="store_world",
    ),
    Mutant(
        "what a bucket keeps of a purge is read",
        "storage/levels/loading.py",
        " and self._items[i].name not in level.hidden",
        "",
        finder="store_world",
    ),
    Mutant(
        "what is hidden in a bucket counts as there for a copy",
        "storage/levels/write_back.py",
        "            there = self.level.said(names, await self.level.storage.exists(names), asked)\n",
        "            there = await self.level.storage.exists(names)\n",
        finder="store_world",
    ),
    Mutant(
        "a level that is put back is believed what it once said",
        "storage/levels/leaving.py",
        "        level.forget_hints()\n",
        "",
        finder="store_world",
    ),
    Mutant(
        "a drain counts on copies that it does not ask for",
        "storage/levels/leaving.py",
        "                said = await self._proving.ask(one, open_)",
        "                said = [one.seems_to_have(name) or None for name in open_]",
        finder="store_world",
    ),
    Mutant(
        "a drain counts on what it has proven and was lost since",
        "storage/levels/leaving.py",
        "        return where is not None and not where.out and where.seems_to_have(name)",
        "        return where is not None",
        finder="store_world",
    ),
    Mutant(
        "a level that leaves is still stored to",
        "storage/levels/level.py",
        '"it is being taken out" if self.leaving else ',
        "",
        finder="store_world",
    ),
    Mutant(
        "a level that hangs returns its slots before its reads have ended",
        "storage/levels/loading.py",
        "        self._late.append(parts.late.begin(with_slots_back(loading)))",
        "        parts.late.begin(with_slots_back(loading))",
        finder="store_world",
    ),
    Mutant(
        "what is copied below does not keep its copy above",
        "storage/levels/write_back.py",
        "        nbytes = source.index.hold(name)",
        "        nbytes = source.index.hold(name)\n        source.index.release(name, use)",
        finder="store_world",
    ),
    Mutant(
        "a copy belongs to the engine for which it was made",
        "storage/levels/level.py",
        "item.use.of(self.index.owner_of(item.name))",
        "item.use",
        finder="store_world",
    ),
    Mutant(
        "what vanished below a level that was out is not copied there again",
        "storage/levels/sweep.py",
        "            if lost_some or is_asked:",
        "            if is_asked:",
        finder="store_world",
    ),
    Mutant(
        "a purge removes what a load reads",
        "storage/indexed.py",
        "        return self._stuck.remove(gone, after=unread)",
        "        unread.close()\n        return self._stuck.remove(gone)",
        finder="store_world",
    ),
    Mutant(
        "what was found and is held stays the first engine's",
        "storage/lru.py",
        "            why |= GUESSED\n",
        "            pass\n",
        finder="store_world",
    ),
    Mutant(
        "a disk that has failed keeps its objects in its index",
        "storage/file.py",
        "            self.emptied = asyncio.ensure_future(self._forget_all())\n",
        "            self.emptied = asyncio.ensure_future(asyncio.sleep(0, 0))\n",
        finder="store_world",
    ),
    Mutant(
        "a disk that has failed is stored on",
        "storage/disks.py",
        "            there = next((disk for disk in live if disk.has(name)), None)",
        "            there = next((disk for disk in self._all if disk.has(name)), None)",
        more=(
            (
                "                there = max(live, key=lambda disk: disk.weight_of(block))",
                "                there = max(self._all, key=lambda disk: disk.weight_of(block))",
            ),
        ),
        finder="store_world",
    ),
    Mutant(
        "what a dying disk did not store goes nowhere else",
        "storage/disks.py",
        "                        todo += bad",
        "                        pass",
        finder="store_world",
    ),
    Mutant(
        "a disk that returns has what it had when it failed",
        "storage/file.py",
        "            await self._find_objects(returns=True)\n",
        "",
        finder="store_world",
    ),
    Mutant(
        "a disk that is not mounted is made anew",
        "storage/home.py",
        '                return AWAY if self._device_of(fd) in self._above else ""',
        '                return ""',
        more=(("            if self._device_of(fd) in (self._above or ()):", "            if False:"),),
        finder="store_world",
    ),
    Mutant(
        "a disk that returns applies no order that it has missed",
        "storage/file.py",
        "        overdue = Overdue([*orders, EVERYTHING] if strange else orders)",
        "        overdue = Overdue([EVERYTHING] if strange else [])",
        finder="store_world",
    ),
    Mutant(
        "a write fails because a dying disk cannot be looked at",
        "storage/disks.py",
        "                if error.reason not in SUSPECT or (await self._still_works(disk) and last):",
        "                if error:",
        finder="store_world",
    ),
    Mutant(
        "objects of a disk that is not mounted count as removed",
        "storage/directory.py",
        "            self._check_ours()\n            return GONE",
        "            return GONE",
        finder="store_world",
    ),
)


@dataclass(frozen=True)
class Verdict:
    """seed: the first that failed, None if the mutant survived. how: what failed. seconds: until then."""

    mutant: str
    seed: int | None
    how: str
    seconds: float


def hunt(mutant: Mutant, seeds: int, jobs: int) -> Verdict:
    """Put the bug in and live seeds until one finds it."""
    with tempfile.TemporaryDirectory(prefix="transferd-mutant-") as directory:
        copy = Path(directory) / "transferd"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        mutant.apply(copy)
        shutil.copytree(SUPPORT, Path(directory) / "tests" / "support", ignore=shutil.ignore_patterns("__pycache__"))
        began = time.monotonic()
        command = [sys.executable, "-m", f"tests.support.simulation.{mutant.finder}", "--brief", "--seeds", str(seeds)]
        done = subprocess.run(
            [*command, "--jobs", str(jobs)],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": directory},
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - began
    found = re.search(r"^seed (\d+): (.*)$", done.stderr, re.MULTILINE)
    if found is None:
        assert done.returncode == 0, done.stderr
        return Verdict(mutant.name, None, "survived", seconds)
    return Verdict(mutant.name, int(found[1]), found[2], seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.mutants", description=__doc__)
    parser.add_argument("--only", nargs="*", default=None, help="names, or parts of names")
    parser.add_argument("--seeds", type=int, default=5000, help="at most so many for each")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    options = parser.parse_args(arguments)
    chosen = [m for m in MUTANTS if options.only is None or any(part in m.name for part in options.only)]
    verdicts = []
    for mutant in chosen:
        verdicts.append(verdict := hunt(mutant, options.seeds, options.jobs))
        if options.format == "text":
            where = "SURVIVED" if verdict.seed is None else f"seed {verdict.seed}"
            print(f"| {mutant.name} | `{mutant.file}` | {where} | {verdict.how} |", flush=True)
    if options.format == "json":
        print(json.dumps([vars(verdict) for verdict in verdicts]))
    return 0 if all(verdict.seed is not None for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
