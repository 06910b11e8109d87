"""Leaves a text as the one comment of forerun on a pull request: ``leave_comment.py NUMBER FILE``.

The comment of an earlier run is found by its mark and replaced. Where the token may not write, as for pull requests of
forks, the text is in the summary of the job alone.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

MARK = "<!-- forerun -->"
_PAGE = 100


def ask(method: str, path: str, body: object = None) -> Any:
    """The answer of GitHub's interface of comments on issues."""
    address = f"{os.environ['GITHUB_API_URL']}/repos/{os.environ['GITHUB_REPOSITORY']}/issues/{path}"
    headers = {"Authorization": f"Bearer {os.environ['TOKEN']}", "Accept": "application/vnd.github+json"}
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(address, data, headers, method=method), timeout=30) as answer:
        return json.load(answer)


def own_comment(number: str) -> int | None:
    """The comment of an earlier run."""
    page = 1
    while comments := ask("GET", f"{number}/comments?per_page={_PAGE}&page={page}"):
        for comment in comments:
            if comment["body"].startswith(MARK):
                return int(comment["id"])
        page += 1
    return None


def main(number: str, file: str) -> None:
    """Writes the comment, or replaces it."""
    body = {"body": f"{MARK}\n{Path(file).read_text(encoding='utf-8')}"}
    try:
        earlier = own_comment(number)
        if earlier is None:
            ask("POST", f"{number}/comments", body)
        else:
            ask("PATCH", f"comments/{earlier}", body)
    except HTTPError as error:
        if error.code not in (401, 403):
            raise
        print(
            f"::notice::the token may not comment ({error.reason}); the review is in the summary of the job"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
