"""A hook for mkdocs: pages of the repository that live outside of docs/ become pages of the site, and links follow.

The README is the site's first page, so that its text exists once. A link in any page is resolved as on the repository's
own web view, relative to the file that holds it. If it leads to a page of the site, it is rewritten to that page; if it
leads to another file of the repository (a source file, an example), its text stays without a link, because the site
does not have that file. Everything else is left to mkdocs, which reports a link that leads nowhere.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
#: file of the repository -> page of the site
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "passes/README.md": "passes.md",
    "benchmarks/README.md": "benchmark-scripts.md",
}
_SOURCES = {page: file for file, page in PAGES.items()}
#: a link, or code, in which nothing is a link
_LINK = re.compile(
    r"^(?P<fence>`{3,}|~{3,}).*?^(?P=fence)"
    r"|(?P<before>!?\[(?P<text>(?:[^][]|\[[^][]*\])*)\]\()(?P<path>[^()\s#]*)(?P<anchor>#[^()\s]*)?\)"
    r"|`[^`\n]+`",
    re.DOTALL | re.MULTILINE,
)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside of docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite the links of a page."""
    here = page.file.src_uri
    return rewrite(markdown, here, _SOURCES.get(here, f"docs/{here}"))


def rewrite(markdown: str, page: str, source: str) -> str:
    """The text of a page of the site, made from the file ``source`` of the repository, with its links rewritten.

    >>> rewrite("[The guide](docs/guide.md#levels), [a file](Makefile), `[x](Makefile)`.", "index.md", "README.md")
    '[The guide](guide.md#levels), a file, `[x](Makefile)`.'
    """

    def link(match: re.Match[str]) -> str:
        path = match["path"]  # None for code
        if not path or re.match(r"[a-z]+:", path) or path.startswith("/"):
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        place = PAGES.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if place is not None:
            relative = posixpath.relpath(place, posixpath.dirname(page) or ".")
            return f"{match['before']}{relative}{match['anchor'] or ''})"
        return match["text"] if (ROOT / target).exists() else match[0]

    return _LINK.sub(link, markdown)
