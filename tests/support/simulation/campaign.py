"""Many seeds, over all cores: `python -m tests.support.simulation.campaign --seeds 2000`.

Exit 0: every story went well. Exit 1: the first failure (by seed) is made smaller and printed: its seed,
its plan (the weather, the deeds that were needed), what was broken, what the flight recorder knows of
the task, and the last steps. `--replay SEED` lives one seed alone and prints its whole plan.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field

import structlog

from tests.support.orphans import die_with_parent
from tests.support.simulation.plan import draw_plan
from tests.support.simulation.shrink import Failure, attempt, shrink
from tests.support.simulation.story import live

SHARE = 25  # seeds that a process takes at a time
TOLD_EVERY_S = 60.0


@dataclass
class Report:
    """What came of a range of seeds. ran: how many. seen: how often what happened in them."""

    ran: int = 0
    seconds: float = 0.0
    seen: Counter[str] = field(default_factory=Counter)
    failed: list[int] = field(default_factory=list)


def campaign(
    seeds: range,
    jobs: int,
    *,
    limit_s: float | None = None,
    progress: Callable[[Report], None] = lambda _: None,
    live_one: Live | None = None,
) -> Report:
    """Live every seed, in `jobs` processes. Stops at the first failure, when the time is over, and at a signal.

    live_one: the story of a seed; a function that another process can import. Default: that of the seed's plan.
    """
    report, began = Report(), time.monotonic()
    shares = (seeds[start : start + SHARE] for start in range(0, len(seeds), SHARE))
    with ProcessPoolExecutor(jobs, initializer=_quiet) as pool:
        try:
            for ran, seen, failed in _results(pool, shares, jobs, live_one or live_planned):
                report.ran += ran
                report.seen.update(seen)
                report.failed += failed
                report.seconds = time.monotonic() - began
                progress(report)
                if failed or (limit_s is not None and report.seconds > limit_s):
                    break
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
        pool.shutdown(cancel_futures=True)
    report.failed.sort()
    return report


def _told_now_and_then(seeds: int) -> Callable[[Report], None]:
    """A line on stderr: over itself where somebody is looking, else every TOLD_EVERY_S."""
    terminal, next_at = sys.stderr.isatty(), 0.0 if sys.stderr.isatty() else TOLD_EVERY_S

    def tell(report: Report) -> None:
        nonlocal next_at
        if report.seconds >= next_at:
            next_at = report.seconds + (0.2 if terminal else TOLD_EVERY_S)
            line = f"{report.ran} of {seeds} seeds, {report.seconds:.0f} s"
            print(f"\r{line} " if terminal else line, end="" if terminal else "\n", file=sys.stderr, flush=True)

    return tell


_Answer = tuple[int, Counter[str], list[int]]
Live = Callable[[int], Counter[str]]


def live_planned(seed: int) -> Counter[str]:
    """The story of a seed's plan."""
    return live(draw_plan(seed))


def _results(pool: ProcessPoolExecutor, shares: Iterator[range], jobs: int, live_one: Live) -> Iterator[_Answer]:
    """Answers as they come, with no more shares handed out than are needed to keep everybody busy."""
    first = itertools.islice(shares, 2 * jobs)
    under_way: set[Future[_Answer]] = {pool.submit(_live_all, live_one, share) for share in first}
    while under_way:
        done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
        under_way |= {pool.submit(_live_all, live_one, share) for share in itertools.islice(shares, len(done))}
        for future in done:
            yield future.result()


def _live_all(live_one: Live, seeds: range) -> _Answer:
    seen: Counter[str] = Counter()
    for done, seed in enumerate(seeds, start=1):
        try:
            seen += live_one(seed)
        except Exception:  # noqa: BLE001 - told by whoever asked, from the seed
            return done, seen, [seed]
    return len(seeds), seen, []


def _quiet() -> None:
    """The daemon logs every fault; thousands of stories of them help nobody. And Ctrl-C is the parent's to hear."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    gc.collect()
    gc.freeze()  # modules live as long as we do: a daemon that closes collects what is left of its failed copies
    if multiprocessing.parent_process() is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        die_with_parent()  # a parent that is killed leaves nobody waiting


def _tell(seed: int) -> None:
    failure = attempt(draw_plan(seed))
    if failure is None:
        print(f"seed {seed} went well this time: the run was not a function of its seed, which is a fault by itself")
        return
    smallest = shrink(failure)
    print(f"seed {seed} failed: {failure.kind}\n\nthe smallest story that fails in this way:\n\n{smallest}\n")
    print(f"again: python -m tests.support.simulation.campaign --replay {seed}")


def _replay(seed: int) -> int:
    plan = draw_plan(seed)
    failure: Failure | None = attempt(plan)
    print(plan if failure is None else failure)
    return 0 if failure is None else 1


def command(module: str, about: str | None, live_one: Live) -> int:
    """The command of a campaign of other stories than the planned ones: `python -m module --seeds 500`."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("--seeds", type=int, default=500, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--limit", type=float, default=None, help="stop after so many seconds, and say how many ran")
    parser.add_argument("--brief", action="store_true", help="on failure, only the seed and what was found")
    options = parser.parse_args()
    _quiet()
    seeds = range(options.first, options.first + options.seeds)
    report = campaign(seeds, options.jobs, limit_s=options.limit, live_one=live_one)
    print(f"{report.ran} seeds in {report.seconds:.1f} s")
    print(", ".join(f"{what} {count}" for what, count in report.seen.most_common()))
    if not report.failed:
        return 0
    seed = report.failed[0]
    try:
        live_one(seed)
    except Exception as error:  # noqa: BLE001 - reported with the seed
        story = "" if options.brief else "\n" + "\n".join(getattr(error, "__notes__", ()))
        print(f"seed {seed}: {type(error).__name__}: {error}{story}", file=sys.stderr)
    else:
        print(f"seed {seed}: went well the second time", file=sys.stderr)
    return 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.simulation.campaign", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--limit", type=float, default=None, help="stop after so many seconds, and say how many ran")
    parser.add_argument("--replay", type=int, default=None, metavar="SEED", help="live this one and show its plan")
    parser.add_argument("--brief", action="store_true", help="on failure, only the seed and the kind")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    options = parser.parse_args(arguments)
    _quiet()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    if options.replay is not None:
        return _replay(options.replay)
    seeds = range(options.first, options.first + options.seeds)
    report = campaign(seeds, options.jobs, limit_s=options.limit, progress=_told_now_and_then(len(seeds)))
    if options.format == "json":
        print(json.dumps({"ran": report.ran, "seconds": report.seconds, "seen": report.seen, "failed": report.failed}))
    else:
        print(f"{report.ran} seeds in {report.seconds:.1f} s, {options.jobs} processes")
        print(", ".join(f"{what} {count}" for what, count in report.seen.most_common()))
    if report.failed:
        if options.brief:
            failure = attempt(draw_plan(report.failed[0]))
            print(
                f"seed {report.failed[0]}: {failure.kind if failure else 'went well the second time'}", file=sys.stderr
            )
        elif options.format == "text":
            _tell(report.failed[0])
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
