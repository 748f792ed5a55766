"""The house rules that a machine can check: who may import whom, how large things get, what is never used."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "transferd"

# Level of each module or package below transferd/: a module imports from its own level or a lower one.
LEVELS: dict[str, int] = {
    # 0: nothing from the package
    "errors": 0, "clock": 0, "trace": 0, "bucket": 0, "version": 0, "toml": 0, "uncancelled": 0,
    # 1: pure data
    "tasks": 1, "config": 1, "events": 1, "layout": 1, "ownership": 1,
    # 2: pure logic
    "keys": 2, "integrity": 2, "copyplan": 2, "hazards": 2, "admission": 2, "alarms": 2, "results": 2, "barrier": 2,
    "dispatch": 2, "protocol": 2, "offload": 2, "residency": 2, "handover": 2, "objects": 2, "generation": 2,
    "record": 2, "lanes": 2, "door": 2,
    "explain": 2,
    # 3: the world: sockets, memory, storage
    "curve": 3, "credentials": 3, "endpoint": 3, "link": 3, "transport": 3, "tiers": 3, "storage": 3, "breaker": 3,
    "direct": 3, "dumps": 3, "descriptors": 3, "doorman": 3,
    # 4: what a rank does
    "workers": 4,
    # 5: the two ends of the wire
    "cache": 5, "coordinator": 5, "server": 5, "http": 5, "metrics": 5, "publisher": 5, "client": 5, "sync_client": 5,
    # 6: where parts are put together
    "report": 6, "signals": 6, "dumper": 6, "notify": 6, "logs": 6, "daemon": 6, "process": 6, "launch": 6, "replay": 6,
    "demo": 6, "bench": 6,
    "pool": 6, "options": 6, "rehearsal": 6, "verify": 6, "adapters": 6, "testing": 6, "cli": 6, "__main__": 6,
    "__init__": 6,
}  # fmt: skip

# What may look upwards, and why.
EXCEPTIONS = {
    ("trace", "clock"): "same level; named for the reader",
    ("report", "daemon"): "under TYPE_CHECKING only",
}

# A client is imported into the engine's process: it may know the wire and the shared memory, nothing else.
CLIENT_MAY_IMPORT = {
    "protocol", "transport", "link", "handover", "keys", "curve", "clock", "config", "errors", "tasks", "tiers.segment",
    "tiers.cuda.engine", "client", "trace", "version",
}  # fmt: skip

LONGEST_FILE = 460
LONG_FILES: dict[str, str] = {
    "dispatch.py": "one state machine; record, lanes, door, hazards, alarms and results are files of their own",
}
LONGEST_FUNCTION = 70

BANNED = {
    r"\bpickle\b": "wire input is never trusted",
    r"shell=True": "no text becomes a command",
    r"os\.system\(": "no text becomes a command",
    r"time\.sleep\(": "nothing waits by sleeping in a thread",
}


def modules() -> Iterator[tuple[Path, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imports(path: Path) -> Iterator[str]:
    """Modules of this package that a file imports anywhere, without the leading package name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("transferd"):
            base = node.module.removeprefix("transferd").lstrip(".")
            if base:
                yield base
            else:
                yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.name.removeprefix("transferd.") for a in node.names if a.name.startswith("transferd."))


def top(module: str) -> str:
    return module.split(".")[0]


def test_every_module_has_a_level() -> None:
    missing = {top(name) for _, name in modules()} - set(LEVELS)
    assert not missing, f"add to LEVELS (and to docs/architecture.md): {sorted(missing)}"


def test_modules_import_from_their_own_level_or_below() -> None:
    wrong = [
        f"{name} (level {LEVELS[top(name)]}) imports {imported} (level {LEVELS[top(imported)]})"
        for path, name in modules()
        for imported in imports(path)
        if LEVELS.get(top(imported), 0) > LEVELS[top(name)] and (top(name), top(imported)) not in EXCEPTIONS
    ]
    assert not wrong, "\n".join(wrong)


def test_the_client_knows_the_wire_and_nothing_else() -> None:
    for name in ("client", "sync_client"):
        path = PACKAGE / f"{name}.py"
        for imported in imports(path):
            assert imported in CLIENT_MAY_IMPORT, f"{name} imports {imported}"


def test_importing_the_client_loads_nothing_heavy() -> None:
    code = "import sys, transferd.client, transferd.sync_client; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    heavy = {"cuda", "mooncake", "paddle", "uvloop", "torch", "cupy"} & set(out.split())
    assert not heavy


@pytest.mark.parametrize(
    ("path", "name"), list(modules()), ids=lambda value: str(value) if isinstance(value, str) else ""
)
def test_a_module_keeps_the_house_rules(path: Path, name: str) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    for pattern, reason in BANNED.items():
        code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
        found = re.search(pattern, _without_docstrings(tree, code))
        assert not found, f"{name}: {found and found[0]!r}: {reason}"
    if name != "testing.__init__":
        assert ast.get_docstring(tree), f"{name} does not say what it is"
    lines = len(text.splitlines())
    assert lines <= LONGEST_FILE or path.name in LONG_FILES, f"{name} has {lines} lines: is it two nouns?"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            assert length <= LONGEST_FUNCTION, f"{name}.{node.name} has {length} lines"
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            small = all(isinstance(item, ast.Pass | ast.AnnAssign | ast.Assign) for item in node.body)
            assert ast.get_docstring(node) or small, f"{name}.{node.name} does not say what it is"


def _without_docstrings(tree: ast.Module, text: str) -> str:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node, clean=False)
            if doc:
                text = text.replace(doc, "")
    return text


def test_the_changelog_keeps_its_shape() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert headings
    assert headings[0] == "Unreleased"
    allowed = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= allowed


def test_the_readme_names_only_commands_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= targets
    help_text = subprocess.run(
        [sys.executable, "-m", "transferd", "--help"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    for verb in re.findall(r"^\s*(?:\.venv/bin/)?transferd ([a-z-]+)", text, re.MULTILINE):
        assert verb in help_text, f"README shows `transferd {verb}`"


def test_no_machine_path_is_in_the_tree() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode != 0:
        pytest.skip("not a git checkout")
    for name in tracked.stdout.split():
        path = ROOT / name
        if (
            path.suffix in {".py", ".md", ".toml", ".service", ".json", ".c"}
            and path.exists()
            and path != Path(__file__)
        ):
            assert not re.search(r"/work/|/root/", path.read_text(errors="replace")), name
