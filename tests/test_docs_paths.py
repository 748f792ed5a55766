"""Docs that a reader finishes: a path of a quarter of an hour for each kind of reader, and no dead link."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
WORDS = 3300  # that are read in 15 minutes
PATHS = {
    "somebody who judges it": ["README.md", "docs/performance.md"],
    "a user of vLLM": ["docs/vllm.md"],
    "a user of FastDeploy": ["docs/fastdeploy.md"],
    "a user of SGLang": ["docs/sglang.md"],
    "a user of LMCache": ["docs/lmcache.md"],
    "an operator": ["docs/operations.md"],
    "an operator of a pool": ["docs/mooncake.md"],
    "an author of an adapter": ["docs/adapters.md", "docs/restarts.md"],
    "a contributor": ["CONTRIBUTING.md", "docs/architecture.md"],
}
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *ROOT.glob("CHANGELOG*.md"),
    *DOCS.rglob("*.md"),
]
GENERATED = re.compile(r"^<!-- \w+ -->$.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)  # tables of figures


@pytest.mark.parametrize("reader", PATHS)
def test_each_reader_has_a_path_of_a_quarter_of_an_hour(reader: str) -> None:
    pages = {page: GENERATED.sub("", (ROOT / page).read_text(encoding="utf-8")) for page in PATHS[reader]}
    words = {page: len(text.split()) for page, text in pages.items()}
    assert sum(words.values()) <= WORDS, f"move what is for looking up to a page of its own: {words}"


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    texts = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head) for head in heads]
    return {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in texts}


def dead(page: Path) -> Iterator[str]:
    """The links of a page that lead nowhere."""
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if re.match(r"[a-z]+:", link):
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_link_leads_nowhere(page: Path) -> None:
    assert list(dead(page)) == []


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS.glob("*.md")], ids=lambda page: page.name)
def test_no_page_installs_transferd_from_an_index(page: Path) -> None:
    """No index has it: the name may be anybody's there."""
    commands = re.findall(r"pip install[^`\n]*", page.read_text(encoding="utf-8"))
    assert [one for one in commands if re.search(r"(?<![\w./-])transferd(?!-)", one)] == []


def test_the_index_of_decisions_has_each_of_them() -> None:
    listed = re.findall(r"^\* \d+\. \[.*\]\((.*)\)$", (DOCS / "adr" / "README.md").read_text(), re.MULTILINE)
    assert listed == sorted(page.name for page in (DOCS / "adr").glob("0*.md"))
