"""The version of a build of this tree (PEP 440), which setup.py and scripts/deb ask for.

    the commit "release: 0.4.0"          0.4.0+gCOMMIT
    a commit before it                   0.4.0.devTIME+gCOMMIT
    one after it, until RELEASE changes  0.4.0.postTIME+gCOMMIT

TIME is the commit's, in UTC (20261129081500), so it needs neither tags nor history. Files that are not the commit's
add a digest of all that is shipped, and where nothing knows the commit that digest stands alone: two builds never have
one name.

The commit is what TRANSFERD_COMMIT says, as `git log -1 --format='%H %ct %s'`, or git, or an archive that git made.
"""

from __future__ import annotations

import hashlib
import os
import runpy
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("transferd", "systemd", "deploy", "setup.py", "pyproject.toml")


def build_name(release: str, *, released: bool, commit: str, digest: str = "") -> str:
    """The name of a build.

    commit: its hash, time and subject, separated by blanks; "" if nothing knows it.
    digest: of the shipped files, where the commit does not say what they are.
    """
    number, seconds, subject = [*commit.split(" ", 2), "", "", ""][:3]
    local = ".".join(filter(None, (number and f"g{number[:12]}", digest and f"s{digest[:12]}")))
    if released and subject == f"release: {release}" and not digest:
        return f"{release}+{local}"
    stamp = time.strftime("%Y%m%d%H%M%S", time.gmtime(int(seconds))) if seconds else "0"
    return f"{release}.{'post' if released else 'dev'}{stamp}+{local}"


def of_this_tree() -> str:
    """The name of a build of the files here."""
    constants = runpy.run_path(str(ROOT / "transferd" / "runtime" / "version.py"))
    commit, changed = os.environ.get("TRANSFERD_COMMIT", ""), False
    if not commit and (ROOT / ".git").exists():
        commit = _git("log", "-1", "--format=%H %ct %s")
        changed = bool(_git("status", "--porcelain", "--", *SHIPPED))
    if not commit:
        archived = (ROOT / ".commit").read_text(encoding="utf-8").strip()
        commit = "" if archived.startswith("$") else archived
    digest = _digest() if changed or not commit else ""
    return build_name(constants["RELEASE"], released=constants["RELEASED"], commit=commit, digest=digest)


def _git(*arguments: str) -> str:
    """What git says of this tree; "" if there is no git. Whoever builds a tree runs its code, whoever owns it."""
    command = ["git", "-c", "safe.directory=*", *arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def _digest() -> str:
    """Of the names and contents of the shipped files."""
    found = [path for name in SHIPPED for path in (ROOT / name, *(ROOT / name).rglob("*")) if path.is_file()]
    whole = hashlib.sha256()
    for path in sorted(one for one in found if one.suffix not in (".so", ".pyc")):
        content = path.read_bytes()
        whole.update(f"{path.relative_to(ROOT)} {len(content)}\n".encode() + content)
    return whole.hexdigest()


if __name__ == "__main__":
    print(of_this_tree())
