"""The story of one task, from the flight recorder's notes: as data, and as text for people.

A task_id may have several lives (pushed again after its result was forgotten), so the story has a list of lives.
Each begins with its admission, and times are seconds since then. Earlier events of the id (a `busy`, a refusal)
belong to the life that followed, with negative times. `events` has the events of the whole task, and `ranks` those
of each rank.

    {"engine", "task_id", "lives": [{"kind", "blocks", "status", "seconds", "began", "complete",
                                     "events": [{"t", "what", …}], "ranks": [{"rank", "events": […]}]}],
     "omitted", "also"}

also: other engines that have had a task of this id.
identity: what the task's engine shares with the engines that read its blocks; added by callers that have it.
status, seconds: None while the task is not answered. A refused task has seconds None and the status `rejected` or
    `busy`.
began: time since the epoch.
complete: whether the notes still include the admission; if not, times count from the first remaining note.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from transferd.config import DEFAULT_ENGINE
from transferd.errors import RequestError, one_line
from transferd.observability.recorder import REFUSED, Note
from transferd.runtime.compat import UTC

MAX_NOTES = 1000  # of one task: bounds an answer
_FIRST = 100  # of these, when there are more, are the oldest


def task_story(
    task_id: str, notes: Sequence[Note], engine: str = "", asker: str = "", *, wall: float, monotonic: float
) -> dict[str, Any]:
    """Build the story of a task from the notes of its id, of all engines, oldest first.

    engine: only of this engine; "" for any. Several engines may have had a task of this id: then that of the
    `asker` counts, else the newest.
    wall, monotonic: one moment on both clocks.

    Raises RequestError, code `unknown_task`, if there are no notes.
    """
    known = list(dict.fromkeys(note.engine for note in reversed(notes)))
    chosen = engine or (asker if asker in known else next(iter(known), asker or DEFAULT_ENGINE))
    notes = [note for note in notes if note.engine == chosen]
    if not notes:
        what = f"unknown task {task_id[:80]!r}: it was never pushed here, or the flight recorder has forgotten it"
        raise RequestError(what, code="unknown_task")
    omitted = max(0, len(notes) - MAX_NOTES)
    if omitted:
        notes = [*notes[:_FIRST], *notes[_FIRST - MAX_NOTES :]]
    return {
        "engine": chosen,
        "task_id": task_id,
        "lives": [_life(life, wall - monotonic) for life in _lives(notes)],
        "omitted": omitted,
        "also": [one for one in known if one != chosen],
    }


def _lives(notes: Iterable[Note]) -> list[list[Note]]:
    """Split notes into lives. A life lasts until a push under the same id that follows its answer."""
    lives: list[list[Note]] = [[]]
    attempts: list[Note] = []  # pushes since the last answer: they belong to the next life, if there is one
    for note in notes:
        life = lives[-1]
        if note.what == "admitted" and _ended(life):
            lives.append([*attempts, note])
            attempts = []
        elif note.what in REFUSED and _ended(life):
            attempts.append(note)
        else:
            life.append(note)
    lives[-1].extend(attempts)
    return lives


def _ended(life: Sequence[Note]) -> bool:
    return any(note.what == "done" for note in life)


def _life(notes: Sequence[Note], offset: float) -> dict[str, Any]:
    """One life as data. offset: wall time minus monotonic time."""
    admitted = next((note for note in notes if note.what == "admitted"), None)
    done = next((note for note in notes if note.what == "done"), None)
    refused = [note.what for note in notes if note.what in REFUSED] if admitted is done is None else []
    zero = (admitted or notes[0]).at
    about = admitted.detail if admitted is not None else {}
    events: list[dict[str, Any]] = []
    ranks: dict[int, list[dict[str, Any]]] = {}
    for note in notes:
        detail = note.plain()
        rank = detail.pop("rank", None)
        event = {"t": note.at - zero, "what": note.what, **detail}
        (events if rank is None else ranks.setdefault(rank, [])).append(event)
    return {
        "kind": about.get("kind"),
        "blocks": about.get("blocks"),
        "status": done.detail.get("status") if done is not None else refused[-1] if refused else None,
        "seconds": None if done is None else done.at - zero,
        "began": zero + offset,
        "complete": admitted is not None,
        "events": events,
        "ranks": [{"rank": rank, "events": ranks[rank]} for rank in sorted(ranks)],
    }


def as_text(story: Mapping[str, Any]) -> str:
    """The story as lines, each beginning with the milliseconds since admission."""
    lines: list[str] = []
    if identity := story.get("identity"):
        lines.append("engine " + ", ".join(f"{one_line(k)} {_shown(v)}" for k, v in identity.items() if v != ""))
    if others := story.get("also"):
        whose = f"this is the task of engine {_shown(story['engine'])}"
        lines.append(f"{whose}; {', '.join(map(_shown, others))} had one of this id, too: see --engine")
    for life in story["lives"]:
        lines.append(_heading(story["task_id"], story.get("engine", DEFAULT_ENGINE), life))
        lines += [_line(event, 2) for event in life["events"]]
        for rank in life["ranks"]:
            lines.append(f"  rank {_shown(rank['rank'])}")
            lines += [_line(event, 4) for event in rank["events"]]
    if story["omitted"]:
        lines.append(f"({story['omitted']} notes in the middle are left out)")
    return "\n".join(lines)


def _heading(task_id: str, engine: str, life: Mapping[str, Any]) -> str:
    began = datetime.fromtimestamp(life["began"], UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    what = f" ({_shown(life['kind'])}, {_shown(life['blocks'])} blocks)" if life["kind"] else ""
    first = "first note kept" if life["status"] is None or life["seconds"] is not None else "refused"
    born = f"{'admitted' if life['complete'] else first} {began} UTC"
    ended = "not answered yet" if life["status"] is None else _shown(life["status"])
    if life["seconds"] is not None:
        ended += f" after {life['seconds'] * 1000:.3f} ms"
    whose = "" if engine == DEFAULT_ENGINE else f" of engine {_shown(engine)}"
    return f"task {_shown(task_id)}{whose}{what}: {born}, {ended}"


def _line(event: Mapping[str, Any], indent: int) -> str:
    detail = " ".join(
        f"{one_line(key)}={_shown(value)}"
        for key, value in event.items()
        if key not in ("t", "what") and value is not None
    )
    return f"{'':{indent}}{event['t'] * 1000:12.3f} ms  {one_line(event['what']):<14} {detail}".rstrip()


def _shown(value: Any) -> str:
    """A value on one line, escaped: text from outside must not begin lines of its own."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if text.isprintable() and " " not in text and text else repr(text)
