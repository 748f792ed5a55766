"""What an adapter can see of the weights behind an engine: a model's files, or those of a LoRA adapter.

Different by doubt: a difference costs a miss, sameness costs wrong text. So the files' names, sizes, modification
times, safetensors headers and a few pages of numbers count, and so does the directory. Files of Hugging Face's cache
are named after their contents, so there the repository, the commit and these names count instead, and two nodes agree.
Elsewhere two copies of the same files differ, unless the operator asserts which weights they are.
"""

from __future__ import annotations

import enum
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

NOT_SEEN = "not seen"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".pdparams", ".npz", ".msgpack", ".h5")
# Small files that decide what the weights compute: read whole. Tokens are in the keys, so a tokenizer does not count.
RULES = (".json", ".py")
NO_RULES = re.compile(r"(tokenizer|vocab|merges|special_tokens|added_tokens|generation_config|chat_template).*")
MOST_RULE = 16 * 1024**2  # bytes; of a longer one only size and time count
DEPTH = 2  # directories below the model's: some engines keep a directory for each rank
HEAD = 64 * 1024  # bytes; most safetensors headers need no second read
MOST_HEADER = 100 * 1000**2  # bytes, as the format says
PAGE, PAGES = 4096, 4  # of each file: another set of numbers may have the same header, size and time
UNSEEN = ("_name_or_path", "_commit_hash", "transformers_version")  # of a configuration: not about the blocks
# Kinds of RoPE whose angles do not depend on the longest sequence that the engine allows.
FIXED_ROPES = ("default", "linear", "llama3", "yarn", "mrope")
MOST_WORDS = 300  # characters
_COMMIT = re.compile(r"[0-9a-f]{40}")

Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Files of weights."""

    where: str  # for people
    files: int = 0
    nbytes: int = 0
    digest: str = ""  # of all that counts; "" if none were found
    changed: float = 0.0  # the newest change of a file (its ctime, in seconds), which no copy and no touch can set back

    def __str__(self) -> str:
        return f"{self.where}, {self.files} files, {self.nbytes} bytes, {self.digest}" if self.digest else NOT_SEEN


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    path: str
    status: os.stat_result
    blob: str  # what Hugging Face's cache calls its contents; "" elsewhere


def look(name: str, *, revision: str | None = None, cache: str | None = None, asserted: str = "") -> WeightFiles:
    """Examine the weights behind a name.

    name: a directory, a file, or a repository in Hugging Face's cache.
    revision: of the repository.
    cache: the directory of that cache; None for its usual place.
    asserted: the operator says which weights these are; times, numbers and the place then do not count.
    Reads at most the headers and a few pages of each file. Files that cannot be read count as absent.
    """
    place = located(name, revision, cache)
    files = [] if place is None else sorted(_files(place), key=lambda file: file.name)
    weights = [file for file in files if file.name.endswith(WEIGHTS)]
    if place is None or not weights:
        return WeightFiles(NOT_SEEN)
    named = all(file.blob for file in weights)
    hasher = xxhash.xxh3_128()
    for file in files:
        for part in _parts(file, timed=not asserted, numbers=not asserted and not named):
            hasher.update(len(part).to_bytes(8, "little"))
            hasher.update(part)
    return WeightFiles(
        where=f"{asserted} (asserted)" if asserted else _repository(place) if named else str(place),
        files=len(weights),
        nbytes=sum(file.status.st_size for file in weights),
        digest=hasher.hexdigest()[:16],
        changed=0.0 if asserted or named else max(file.status.st_ctime for file in files),
    )


def located(name: str, revision: str | None = None, cache: str | None = None) -> Path | None:
    """The real path of a directory or file of this name, or of its snapshot in Hugging Face's cache; None if absent."""
    place = Path(name).expanduser()
    try:
        if place.exists():
            return place.resolve()
        if name.count("/") > 1 or not name:
            return None
        repository = Path(cache or _usual_cache()) / f"models--{name.replace('/', '--')}"
        reference = repository / "refs" / (revision or "main")
        commit = revision if revision and _COMMIT.fullmatch(revision) else reference.read_text(encoding="ascii").strip()
        snapshot = repository / "snapshots" / commit
        return snapshot.resolve() if snapshot.is_dir() else None
    except (OSError, ValueError):
        return None


def _usual_cache() -> Path:
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def _repository(snapshot: Path) -> str:
    """`organization/name at commit` of a snapshot."""
    repository = snapshot.parent.parent.name.removeprefix("models--").replace("--", "/")
    return f"{repository} at {snapshot.name}"


def _files(place: Path) -> Iterator[_File]:
    if not place.is_dir():
        yield from _file(place.name, str(place))
        return
    depth = len(place.parts)
    for directory, below, names in os.walk(place):
        deep = len(Path(directory).parts) - depth
        below[:] = [] if deep >= DEPTH else [name for name in below if not name.startswith(".")]
        for name in names:
            counts = name.endswith(WEIGHTS) or (name.endswith(RULES) and not NO_RULES.match(name))
            if counts and not name.startswith("."):
                path = os.path.join(directory, name)
                yield from _file(os.path.relpath(path, place), path)


def _file(name: str, path: str) -> Iterator[_File]:
    try:
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode):
            yield _File(name, path, status, _blob(path, status))
    except OSError:  # a link to nothing
        return


def _blob(path: str, status: os.stat_result) -> str:
    """The name of the contents, if this is a link into Hugging Face's cache to a file that has not changed since."""
    if not os.path.islink(path):
        return ""
    target = Path(os.readlink(path))
    if target.parent.name != "blobs" or status.st_mtime_ns > os.lstat(path).st_mtime_ns:
        return ""
    return target.name


def _parts(file: _File, *, timed: bool, numbers: bool) -> Iterator[bytes]:
    """What counts of one file, in order."""
    yield file.name.encode("utf-8", "surrogateescape")
    yield file.status.st_size.to_bytes(8, "little")
    if file.blob:
        yield file.blob.encode()
        return
    whole = file.name.endswith(RULES) and file.status.st_size <= MOST_RULE
    if timed and not whole:
        yield file.status.st_mtime_ns.to_bytes(16, "little", signed=True)
    try:
        opened = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if whole:
            yield os.pread(opened, file.status.st_size, 0)
            return
        yield from _header(opened, file)
        if numbers:
            step = max(1, file.status.st_size // (PAGES + 1))
            yield from (os.pread(opened, PAGE, step * (i + 1)) for i in range(PAGES))
    except OSError:
        yield b"unreadable"
    finally:
        os.close(opened)


def _header(opened: int, file: _File) -> Iterator[bytes]:
    """A safetensors file's header: 8 bytes with its length, then JSON. Of other files, the first bytes."""
    head = os.pread(opened, HEAD, 0)
    end = 8 + int.from_bytes(head[:8], "little")
    known = file.name.endswith(".safetensors") and end <= min(8 + MOST_HEADER, file.status.st_size)
    yield head[:end] if known else head
    if known and end > len(head):
        yield os.pread(opened, end - len(head), len(head))


# --- when it changed ------------------------------------------------------------------------------


def process_started() -> float:
    """When this process started, in seconds since the epoch: weights that are in memory were read after that."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    seconds_up = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - seconds_up


def weights_fact(found: WeightFiles, asserted: str, life: str, started: float) -> str:
    """The weights as a fact.

    Files that changed after `started` may not be those in memory: then the fact also names `life`, so that nobody
    else shares these blocks.
    """
    if not found.digest:
        return f"{asserted} (asserted)" if asserted else NOT_SEEN
    return f"{found}, changed after the start {life}" if found.changed > started else str(found)


class Adapters:
    """LoRA adapters, as keys must tell them apart: by their files, which a training may replace under the same name.

    life: of this engine.
    started: when it started.
    asserted: the operator says which adapters these are.
    say: logs.
    """

    def __init__(self, life: str, started: float, asserted: str, say: Callable[[str], None]) -> None:
        self._life, self._started, self._asserted, self._say = life, started, asserted, say
        self._first: dict[str, WeightFiles] = {}  # by path: as it was when this engine first used it
        self._said: set[str] = set()

    def salt(self, path: str) -> str | None:
        """What the keys of an adapter's blocks contain besides the engine's own.

        Returns None if its blocks must be neither stored nor loaded: its files have changed under this engine, so it is
        unknown which version is in memory.
        """
        if self._asserted:
            return f"asserted:{self._asserted}"
        found = look(path)
        first = self._first.setdefault(path, found)
        if found != first:
            self._once(path, "has changed since this engine began to use it: its blocks are neither stored nor loaded")
            return None
        if not first.digest:
            self._once(path, 'has no files to be seen: its blocks serve this engine alone, unless "loras" names it')
        return first.digest if first.digest and first.changed <= self._started else f"{first.digest}:{self._life}"

    def _once(self, path: str, what: str) -> None:
        if path not in self._said:
            self._said.add(path)
            self._say(f"the LoRA adapter {path} {what}")


# --- configurations -------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A configuration as JSON values: equal ones are equal in every process. Objects become their type and fields."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(plain(one)) for one in value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if callable(as_dict := getattr(value, "to_dict", None)):
        return plain(as_dict())
    if fields := getattr(value, "__dict__", None):
        kept = {name: one for name, one in fields.items() if not name.startswith("_")}
        return [type(value).__qualname__, plain(kept)]
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def short(value: Any) -> str:
    """16 hex digits of a configuration."""
    text = json.dumps(plain(value), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def configuration(whole: Mapping[str, Any], text: Mapping[str, Any], longest: int) -> Facts:
    """A model's configuration, after overrides: a digest of all of it, and in words what operators change most.

    whole: as in config.json.
    text: the part for the language model; the same if there is no other part.
    longest: the longest sequence that the engine allows, on which some kinds of RoPE depend.
    """
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    scaling = {name: one for name, one in rope.items() if name != "rope_theta"} if isinstance(rope, dict) else rope
    words = {
        "layers": text.get("num_hidden_layers"),
        "heads": text.get("num_attention_heads"),
        "KV heads": text.get("num_key_value_heads"),
        "head size": text.get("head_dim"),
        "rope theta": text.get("rope_theta") or (rope.get("rope_theta") if isinstance(rope, dict) else None),
        "rope scaling": scaling or None,
        "longest sequence": longest if set(_rope_kinds(rope)) - set(FIXED_ROPES) else None,
        "sliding window": text.get("sliding_window"),
        "weights' quantization": text.get("quantization_config") or whole.get("quantization_config"),
    }
    return {"model configuration": short({name: one for name, one in whole.items() if name not in UNSEEN})} | {
        name: one if isinstance(one, str | bool | int | float) else _in_words(one)
        for name, one in words.items()
        if one is not None
    }


def configured(directory: Path) -> dict[str, Any]:
    """A model's config.json; empty if there is none that can be read."""
    try:
        whole = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return whole if isinstance(whole, dict) else {}


def _in_words(value: Any) -> str:
    text = json.dumps(plain(value), sort_keys=True)
    return text if len(text) <= MOST_WORDS else f"{text[:MOST_WORDS]}…, {short(value)}"


def _rope_kinds(rope: Any) -> Iterator[str]:
    """The kinds of RoPE in a configuration, which some models nest: one for each kind of layer."""
    for name, value in rope.items() if isinstance(rope, dict) else ():
        if name in ("rope_type", "type"):
            yield str(value)
        yield from _rope_kinds(value)
