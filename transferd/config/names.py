"""What the names may be that an engine gives: checked wherever one is read, so that no daemon has to refuse it later.

A client repeats these names in every Hello. A daemon that refused one would never welcome the client.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from transferd.errors import ConfigError

_ENGINE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")


class Named(NamedTuple):
    """One kind of name. longest: in characters."""

    what: str
    longest: int
    pattern: re.Pattern[str] | None = None
    alphabet: str = "printable characters"

    def wrong(self, name: object) -> str:
        """Why this is no such name; "" if it is one."""
        fits = isinstance(name, str) and len(name) <= self.longest
        if fits and (self.pattern.fullmatch(str(name)) if self.pattern else str(name).isprintable()):
            return ""
        return f"{self.what} is text of at most {self.longest} {self.alphabet}"

    def check(self, key: str, name: object, *, secret: bool = False) -> None:
        """Raise ConfigError for anything else. key: where it was read. secret: do not show it."""
        if problem := self.wrong(name):
            raise ConfigError(key, problem, None if secret else name)


_LETTERS = "letters, digits and . _ : / @ -, and begins with a letter or digit"
ENGINE = Named("an engine's name", 64, _ENGINE, _LETTERS)
NAMED_ENGINE = Named("an engine's name", 64)  # as a Hello may name one, registered or not
TOKEN = Named("a token", 64)
MODEL = Named("a model's name", 1024, re.compile(r".*", re.DOTALL), "characters")
SHOWN_MODEL = Named("a model's name", 1024)  # of an engine that registers: it is in names of objects, logs and labels
GENERATION = Named("a generation", 256)
