"""`transferd verify`: read every object of a file store and list the damaged ones, without its daemon.

Objects are checked against their own names (storage/examine.py), so the store may hold objects of any number of
models, layouts and generations, and verify needs no configuration for them. A daemon may use the store meanwhile:
objects are immutable and appear atomically, and one that disappears while it is read is not counted. Setting
damaged objects aside changes the store, so it requires that no daemon is using it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from transferd.errors import ConfigError, StorageError, one_line
from transferd.runtime.clock import SYSTEM_CLOCK
from transferd.storage.directory import ObjectDirectory
from transferd.storage.examine import PIECE_BYTES, Examination

MOST_LISTED = 1000  # the most damaged objects that a report lists; it counts all


class Bad(NamedTuple):
    """A damaged object. file: its path now, which is in the quarantine if it was set aside."""

    name: str
    file: str
    damage: str


@dataclass
class VerifyReport:
    """What a store holds."""

    path: str
    objects: int = 0
    bytes: int = 0
    unsealed: int = 0  # objects that contain nothing to check against
    errors: list[str] = field(default_factory=list)  # files that could not be read
    damage: Counter[str] = field(default_factory=Counter)  # how many there are of each kind
    bad: list[Bad] = field(default_factory=list)  # the first MOST_LISTED damaged objects
    quarantined: int = 0
    seconds: float = 0.0
    interrupted: bool = False  # whether Ctrl-C ended the check before it had seen every object

    @property
    def damaged(self) -> int:
        return sum(self.damage.values())

    @property
    def good(self) -> bool:
        return not self.damage and not self.errors and not self.interrupted

    def tree(self) -> dict[str, Any]:
        plain = {"damaged": self.damaged, "damage": dict(self.damage), "bad": [bad._asdict() for bad in self.bad]}
        return asdict(self) | plain

    def print(self, console: Console) -> None:
        for name, file, damage in self.bad:
            console.print(f"[red]{damage}[/] {escape(one_line(name))}", soft_wrap=True, highlight=False)
            console.print(f"    {escape(one_line(file))}", soft_wrap=True, highlight=False)
        if self.damaged > len(self.bad):
            console.print(f"… and {self.damaged - len(self.bad)} more")
        for error in self.errors:
            console.print(f"[red]error[/] {escape(one_line(error))}", soft_wrap=True, highlight=False)
        if self.interrupted:
            console.print("[bold red]interrupted[/]: there are more objects")
        kinds = ", ".join(f"{kind} {count}" for kind, count in self.damage.most_common())
        verdict = f"[red]{self.damaged} damaged[/] ({kinds})" if self.damage else "[green]none damaged[/]"
        aside = f", {self.quarantined} set aside" if self.quarantined else ""
        unsealed = f", {self.unsealed} that cannot be checked" if self.unsealed else ""
        console.print(
            f"{escape(one_line(self.path))}: {self.objects} objects, {self.bytes} bytes, {verdict}{aside}{unsealed}, "
            f"{self.seconds:.1f} s",
            soft_wrap=True,
            highlight=False,
        )


def verify(*paths: str, quarantine: bool = False, progress: Callable[[int], None] = lambda _: None) -> VerifyReport:
    """Check every object below the paths. progress: called with the bytes of each piece.

    Raises ConfigError if there is no store, and with `quarantine` if a daemon is using it.
    """
    report, began = VerifyReport(", ".join(paths)), SYSTEM_CLOCK.monotonic()
    try:
        for path in paths:
            _verify(report, path, progress, quarantine=quarantine)
    except KeyboardInterrupt:
        report.interrupted = True
    report.seconds = SYSTEM_CLOCK.monotonic() - began
    return report


def _verify(report: VerifyReport, path: str, progress: Callable[[int], None], *, quarantine: bool) -> None:
    if not (Path(path) / "objects").is_dir():
        raise ConfigError("storage.file.path", "the directory contains no store", path)
    directory = ObjectDirectory(Path(path), fsync=False, clock=SYSTEM_CLOCK)
    if quarantine:
        directory.open()
    try:
        buffer = memoryview(bytearray(PIECE_BYTES))
        for name, _ in directory.objects(lambda error: report.errors.append(str(error))):
            examination = directory.examination(name)
            try:
                for nbytes in examination.pieces(buffer):
                    progress(nbytes)
            except OSError as error:
                report.errors.append(str(error))
            else:
                where = examination.path
                if examination.damage is not None and quarantine:
                    try:
                        where = directory.set_aside(name)
                        report.quarantined += 1
                    except StorageError as error:
                        report.errors.append(str(error))
                _count(report, examination, where)
    except OSError as error:
        report.errors.append(str(error))
    finally:
        directory.close()


def verify_with_progress(*paths: str, console: Console, quarantine: bool = False) -> VerifyReport:
    """`verify`, with a progress bar on a terminal."""
    if not console.is_terminal:
        return verify(*paths, quarantine=quarantine)
    stores = [ObjectDirectory(Path(path), fsync=False, clock=SYSTEM_CLOCK) for path in paths]
    total = sum(status.st_size for store in stores for _, status in store.objects(str))
    columns = TextColumn("verify"), BarColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("verify", total=total)
        return verify(*paths, quarantine=quarantine, progress=lambda nbytes: bar.advance(task, nbytes))


def _count(report: VerifyReport, examination: Examination, where: str) -> None:
    if examination.gone:
        return
    report.objects += 1
    report.bytes += examination.nbytes
    report.unsealed += examination.unsealed
    if examination.damage is not None:
        report.damage[str(examination.damage)] += 1
        if len(report.bad) < MOST_LISTED:
            report.bad.append(Bad(examination.name, where, str(examination.damage)))
