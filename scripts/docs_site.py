"""A hook of mkdocs (mkdocs.yml): the site has the README as its first page, the changelog, and docs/ as it is.

Links from docs/ to files of the repository that are no pages lead to the repository's own host, at this version.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
GENERATED = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "changelog-0.4.0.md": "CHANGELOG-0.4.0.md"}
LINK = re.compile(r"(\]\()(?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages whose text lies outside docs/."""
    for name, source in GENERATED.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001 - mkdocs' names
    """Lead each link to its page. What is no page becomes its path, as code; --strict refuses what leads nowhere."""
    at = ROOT if page.file.src_uri in GENERATED else (ROOT / "docs" / page.file.src_uri).parent
    depth = page.file.src_uri.count("/")
    pages = {(ROOT / source).resolve(): name for name, source in GENERATED.items()}

    def led(match: re.Match[str]) -> str:
        target = (at / match[2]).resolve()
        if target in pages:
            return f"{match[1]}{'../' * depth}{pages[target]}{match[3] or ''})"
        if target.is_relative_to(ROOT / "docs") and target.is_file():
            return f"{match[1]}{'../' * depth}{target.relative_to(ROOT / 'docs')}{match[3] or ''})"
        return match[0]

    led_to_pages = LINK.sub(led, markdown)
    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)\)", lambda match: _in_the_tree(match, at), led_to_pages)


LOADED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(https?:)?//"
    r"|<link\b(?=[^>]*\brel=[\"']?(?:stylesheet|icon|preload|preconnect))[^>]*\bhref=[\"']?(https?:)?//"
)


def on_post_build(config: Any) -> None:
    """Refuse a page that a reader's browser would load something for from another host."""
    site = Path(config["site_dir"])
    outside = [str(page.relative_to(site)) for page in site.rglob("*.html") if LOADED.search(page.read_text("utf-8"))]
    if outside:
        raise PluginError(f"these pages load from other hosts: {', '.join(outside)}")


def _in_the_tree(match: re.Match[str], at: Path) -> str:
    """[text](../transferd/x.py) as text: the site is read without the tree."""
    target = (at / match[2]).resolve()
    if "://" in match[2] or target.is_relative_to(ROOT / "docs") or not target.is_relative_to(ROOT):
        return match[0]
    return f"{match[1]} (`{target.relative_to(ROOT)}`)" if target.exists() else match[0]
