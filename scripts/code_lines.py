"""How much code there is in transferd/: lines with a token of code, so without blank lines, comments and docstrings.

    python scripts/code_lines.py [REVISION]     # of the tree, or of a revision

The core is everything but the adapters, the command line and the GPU tier.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOT_CORE = ("transferd/adapters/", "transferd/cli/", "transferd/tiers/cuda/")
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(text: str) -> int:
    """Lines of Python that have a token of code. A text that is a statement of its own is a docstring, and is none."""
    lines: set[int] = set()
    begins = True  # a statement
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in NO_CODE:
            begins = begins or token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
            continue
        if not (begins and token.type == tokenize.STRING):
            lines.update(range(token.start[0], token.end[0] + 1))
        begins = False
    return len(lines)


def texts(revision: str) -> dict[str, str]:
    """The Python files of the package by their paths, of the tree or of a revision."""
    if not revision:
        return {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "transferd").rglob("*.py")}

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    names = git("ls-tree", "-r", "--name-only", revision, "transferd").splitlines()
    return {name: git("show", f"{revision}:{name}") for name in names if name.endswith(".py")}


def main(revision: str = "") -> None:
    folders: Counter[str] = Counter()
    core = 0
    for name, text in texts(revision).items():
        count = code_lines(text)
        folders["/".join(name.split("/")[:-1])] += count
        core += 0 if name.startswith(NOT_CORE) else count
    for folder, count in sorted(folders.items()):
        print(f"{count:7,} {folder}")
    print(f"{folders.total():7,} all\n{core:7,} core: without adapters, cli and tiers/cuda")


if __name__ == "__main__":
    main(*sys.argv[1:])
