"""Hook of the documentation's site: menus that follow the folders, and links that leave docs/.

A menu entry `guides/` in mkdocs.yml stands for every page of that folder, so a new page cannot be forgotten. Pages link
to files of the repository (`../../charts/rlfleet/README.md`), which is right where they are read in a checkout; the
site holds docs/ only, so there such a link becomes the file's path in plain code.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

#: Relative links of Markdown, with their text.
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")
_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)


def pages(docs: Path, folder: str) -> list[dict[str, str]]:
    """Menu entries for a folder's pages: {title: path}, a README first, then by title."""
    found = []
    for page in sorted((docs / folder).glob("*.md")):
        if page.name == "template.md":
            continue
        title = _TITLE.search(page.read_text())
        if title is None:
            raise ValueError(f"{page}: the first heading is the page's title in the menu; there is none")
        found.append((page.name != "README.md", page.name, title[1], f"{folder}{page.name}"))
    if not found:
        raise ValueError(f"mkdocs.yml: nav names the folder {folder}, which has no page")
    return [{title: path} for _, _, title, path in sorted(found)]


def on_config(config: Any) -> Any:
    """Puts the pages of a folder where the menu names the folder."""
    docs = Path(config["docs_dir"])
    config["nav"] = [
        {title: pages(docs, entry) if isinstance(entry, str) and entry.endswith("/") else entry}
        for part in config["nav"]
        for title, entry in part.items()
    ]
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Makes links to files outside docs/ code that names the file."""
    folder = posixpath.dirname(page.file.src_uri)

    def inside(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        if not target.startswith("../"):
            return link[0]
        path = target.removeprefix("../")
        if not (Path(config["docs_dir"]).parent / path).exists():
            raise ValueError(f"docs/{page.file.src_uri} links to {link[2]}, which is not in the repository")
        return f"{link[1]} (`{path}`)" if link[1].strip("`") != path else f"`{path}`"

    return _LINK.sub(inside, markdown)
