"""A hook of mkdocs: links that lead out of the folder of pages lead to ``repo_url`` of mkdocs.yml, or become words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\[(?P<text>[^\]\[]*)\]\((?!https?://|#|/)(?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
_ROOT = Path(__file__).parents[1]


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """The page with such links made absolute, or their words alone; a folder of pages is its README."""
    if page.file.abs_src_path is None:  # the page of commands, which is made: it links within the pages only
        return markdown
    repository = (config["repo_url"] or "").rstrip("/")
    folder = Path(page.file.abs_src_path).parent

    def absolute(found: re.Match[str]) -> str:
        target = (folder / found["target"]).resolve()
        anchor = found["anchor"] or ""
        if not target.exists() or not target.is_relative_to(_ROOT):
            return found[0]
        if target.is_relative_to(_ROOT / "docs"):
            inside = f"[{found['text']}]({found['target'].rstrip('/')}/README.md{anchor})"
            return inside if target.is_dir() else found[0]
        if not repository:
            return found["text"]
        return f"[{found['text']}]({repository}/blob/main/{target.relative_to(_ROOT).as_posix()}{anchor})"

    return _LINK.sub(absolute, markdown)
