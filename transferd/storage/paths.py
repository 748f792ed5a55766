"""Object names as paths below the objects directory, and back.

    <part>/…/<part>/<fan>/<digest>@<rank>          the object
    <part>/…/<part>/<fan>/<digest>@<rank>~<n>      the same, being written

The last two parts of a name are the digest and the rank. The fan directory is the first FAN_DIGITS
characters of the digest, and every earlier part becomes a directory. A name of one part is `<fan>/@<name>`,
where the fan comes from a hash of the name. Every byte of a part outside
`A-Z a-z 0-9 _ . -` is written %XX, a leading dot too, and an empty part is a lone `%`. So no part is
hidden, `.` or `..`; `/`, `@` and `~` mean only what they mean here; and two names never share a path.

If no name maps to a path, the path is not ours.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from urllib.parse import unquote_to_bytes

from transferd.blocks.keys import encode_text

FAN_DIGITS = 2  # 256 directories: with a hundred thousand objects, a few hundred files in each

_UNSAFE = re.compile(rb"\A\.|[^A-Za-z0-9_.-]")
_PART = re.compile(r"(?!\.)[A-Za-z0-9_.%-]+")
_SET_ASIDE = re.compile(r"(?!\.)[A-Za-z0-9_.%-]*@[A-Za-z0-9_.%-]+~[0-9]+")


def path_of(name: str) -> str:
    """The object's path, relative to the objects directory."""
    if "/" not in name:
        return f"{_fan_of(name)}/@{_quote(name)}"
    head, _, rank = name.rpartition("/")
    space, slash, digest = head.rpartition("/")
    quoted = _quote(digest)
    return f"{_quote_space(space) if slash else ''}{quoted[:FAN_DIGITS]}/{quoted}@{_quote(rank)}"


def quoted(name: str) -> str:
    """The name with each of its parts quoted, for stores that have keys and no directories."""
    return "/".join(_quote(part) for part in name.split("/"))


def unquoted(key: str) -> str | None:
    """The inverse of `quoted`; None if no name has this key."""
    return _name_with(key, key.split("/"), quoted)


def name_of(path: str) -> str | None:
    """The inverse of `path_of`; None if no name has this path."""
    space, _, leaf = path.rpartition("/")
    space = space.rpartition("/")[0]  # without the fan directory
    digest, at, rank = leaf.partition("@")
    parts = [*(space.split("/") if space else []), *([digest] if digest else []), rank]
    if not at or not all(_PART.fullmatch(part) for part in parts):
        return None
    return _name_with(path, parts, path_of)


def names_in(directory: str) -> Callable[[str], str | None]:
    """`name_of` for many files of one directory ("", or it ends with a slash). A plain file name costs no parsing."""
    fan = directory[:-1].rpartition("/")[2]
    prefix: str | None = None

    def name_in(file: str) -> str | None:
        nonlocal prefix
        digest, _, rank = file.partition("@")
        plain = file.isascii() and digest.isalnum() and rank.isalnum() and digest[:FAN_DIGITS] == fan
        if plain and prefix is not None:
            return f"{prefix}{digest}/{rank}"
        name = name_of(directory + file)
        if plain and name is not None:
            prefix = name[: -len(digest) - len(rank) - 1]
        return name

    return name_in


def is_directory_of_ours(name: str) -> bool:
    """Whether a directory of this name, anywhere below the objects directory, could hold objects."""
    return _PART.fullmatch(name) is not None


def temporary_of(path: str, number: int) -> str:
    """The path, in the same directory, where the object is written before it appears under `path`."""
    return f"{path}~{number}"


def is_temporary(path: str) -> bool:
    """Whether `temporary_of` makes this path, which is relative to the objects directory."""
    path, tilde, number = path.rpartition("~")
    return bool(tilde) and number.isascii() and number.isdigit() and name_of(path) is not None


def is_set_aside(name: str) -> bool:
    """Whether a file of this name in the quarantine directory is ours."""
    return _SET_ASIDE.fullmatch(name) is not None


def _name_with(text: str, parts: Sequence[str], text_of: Callable[[str], str]) -> str | None:
    """The name of these quoted parts, if `text_of` makes this text of it."""
    try:
        name = "/".join(map(_unquote, parts))
    except UnicodeDecodeError:
        return None
    return name if text_of(name) == text else None


def _fan_of(name: str) -> str:
    return hashlib.blake2b(encode_text(name), digest_size=FAN_DIGITS // 2).hexdigest()


@functools.lru_cache(maxsize=64)
def _quote_space(space: str) -> str:
    return "".join(f"{_quote(part)}/" for part in space.split("/"))


def _quote(part: str) -> str:
    if part.isascii() and part.isalnum():  # a digest or a rank: nearly every part, thousands of times a second
        return part
    quoted = _UNSAFE.sub(lambda match: b"%%%02X" % match[0][0], encode_text(part)).decode("ascii")
    return quoted or "%"


def _unquote(part: str) -> str:
    return "" if part == "%" else unquote_to_bytes(part).decode("utf-8", "surrogatepass")
