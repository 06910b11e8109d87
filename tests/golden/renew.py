"""Asks questions again and keeps their answers.

    python tests/golden/renew.py                  all of them
    python tests/golden/renew.py plan-ranges      these

An answer changes only where the change is meant: say which and why in ``CHANGES.md``.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests, as pytest has them

from golden.asking import answer_file, ask, folder_of_questions, question_names


def renew(names: list[str]) -> None:
    """Asks the questions and writes their answers."""
    unknown = set(names) - set(question_names())
    if unknown:
        sys.exit(f"unknown questions: {', '.join(sorted(unknown))}; known are {', '.join(question_names())}")
    with tempfile.TemporaryDirectory() as folder, folder_of_questions(Path(folder)):
        for name in names:
            begin = time.monotonic()
            text = json.dumps(ask(name), ensure_ascii=False, separators=(",", ":"))
            answer_file(name).write_text(f"{text}\n", encoding="utf-8")
            print(f"{name}: {len(text)} bytes, {time.monotonic() - begin:.2f} s", flush=True)


if __name__ == "__main__":
    renew(sys.argv[1:] or question_names())
