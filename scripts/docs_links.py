"""A hook of mkdocs: links of docs/ to files of the repository outside of it become the files' paths.

On a code host ``[sweep](../benchmarks/results)`` leads there; a site has no such page.
"""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?:\.\./)+(?P<path>(?!docs/)[^)#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with such links as ``text (path)``, or as the path alone where the text names it."""

    def plain(link: re.Match[str]) -> str:
        text, path = link["text"].strip("`"), link["path"].rstrip("/")
        return f"`{path}`" if text.rstrip("/") in (path, path.rsplit("/", 1)[-1]) else f"{link['text']} (`{path}`)"

    return _OUTSIDE.sub(plain, markdown)
