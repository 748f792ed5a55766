"""The house rules that a machine can check: who may import whom, how large things get, what is never used."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "transferd"

# A folder or file of transferd/ imports only from itself and from those before it in this line.
ORDER = [
    "errors", "runtime", "tasks", "barrier", "config", "blocks", "observability", "control", "wire", "tiers", "storage",
    "client", "workers", "daemon", "adapters", "cli",
]  # fmt: skip
ABOVE_ALL = ["__init__", "__main__"]  # the public names, and `python -m transferd`

# A client is imported into the engine's process: it may know the wire and the shared memory, nothing else.
CLIENT_MAY_IMPORT = {
    "client", "wire", "errors", "tasks", "config", "runtime.clock", "runtime.compat", "blocks.keys",
    "blocks.fingerprint", "tiers.segment", "tiers.owner", "tiers.offered", "tiers.cuda.engine",
    "observability.recorder",
}  # fmt: skip

LONGEST_FILE = 600
LONG_FILES: dict[str, str] = {
    "dispatcher.py": "one state machine; its parts are files of their own beside it",
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


def test_the_order_names_what_is_there() -> None:
    entries = {path.stem if path.is_file() else path.name for path in PACKAGE.iterdir() if path.name[0] not in "_."}
    assert entries - {"py"} == set(ORDER), "ORDER and transferd/ differ (docs/architecture.md has the same line)"
    assert " ".join(ORDER) in (ROOT / "docs" / "architecture.md").read_text()
    assert len(ORDER) <= 16


def test_the_picture_of_the_tree_is_what_the_tree_says() -> None:
    script = ROOT / "scripts" / "draw_architecture.py"
    done = subprocess.run([sys.executable, script, "--check"], check=False, timeout=60)
    assert done.returncode == 0, "run: python scripts/draw_architecture.py"


def test_a_folder_imports_only_from_those_before_it() -> None:
    order = {name: position for position, name in enumerate(ORDER + ABOVE_ALL)}
    wrong = [
        f"{name} imports {imported}"
        for path, name in modules()
        for imported in imports(path)
        if order[top(imported)] > order[top(name)]
    ]
    assert not wrong, "\n".join(wrong)


def test_every_folder_says_what_may_live_there() -> None:
    for folder in sorted(path for path in PACKAGE.rglob("*") if path.is_dir() and list(path.glob("*.py"))):
        docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        assert docstring, folder


def test_the_client_knows_the_wire_and_nothing_else() -> None:
    for path in sorted((PACKAGE / "client").glob("*.py")):
        for imported in imports(path) if path.stem != "launch" else ():  # which starts daemons, for tests
            assert {imported, top(imported)} & CLIENT_MAY_IMPORT, f"{path.stem} imports {imported}"


def test_importing_the_client_loads_nothing_heavy() -> None:
    code = "import sys, transferd.client; print(*sorted({m.split('.')[0] for m in sys.modules}))"
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


def test_a_class_name_means_one_thing() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, name in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(name)
    assert not {name: where for name, where in places.items() if len(where) > 1}


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


@pytest.fixture
def tracked() -> list[Path]:
    """The files that git tracks, without those that were just removed."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).exists()]


def test_no_machine_path_is_in_the_tree(tracked: list[Path]) -> None:
    for path in tracked:
        if path.suffix in {".py", ".md", ".toml", ".service", ".json", ".c", ".h"} and path != Path(__file__):
            assert not re.search(r"/work/|/root/", path.read_text(errors="replace")), path


def test_nothing_compiled_is_in_the_tree(tracked: list[Path]) -> None:
    binary = {str(path.relative_to(ROOT)) for path in tracked if b"\0" in path.read_bytes()}
    assert binary == {"docs/page.png"}, "built here, or one more picture?"
