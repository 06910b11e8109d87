"""``forerun report``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.base.errors import FailureError, UsageError
from forerun.base.extras import plugin_names
from forerun.base.kept import write_whole, writes
from forerun.surface.cli.output import json_text, quiet_libraries
from forerun.surface.cli.verbs import format_of_job, verb

if TYPE_CHECKING:
    from forerun.surface.report.document import Readable

_OWN_FORMATS = ("html", "markdown", "json")
_FORMAT_OF_SUFFIX = {".html": "html", ".htm": "html", ".md": "markdown", ".json": "json"}


@verb("Make one document of a plan or a prediction.")
def report(
    debug: bool,
    source: Annotated[
        str,
        typer.Argument(
            metavar="ANSWER.json",
            help="JSON that 'forerun predict', 'forerun plan' or 'forerun scale' printed with --json; - for stdin.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File for the document (.html, .md or .json).", show_default="stdout"
        ),
    ] = None,
    output: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="NAME",
            help="Format: html, markdown, json, job (for a scheduler) or slurm-time (a --time with a margin); "
            "if not given, by the ending of FILE.",
        ),
    ] = "",
) -> None:
    """Make one self-contained document of a plan, a prediction or a curve of scaling, ready to send."""
    form = _format(output, out)
    if out is not None and not out.parent.is_dir():
        raise UsageError(f"the folder of the report '{out}' does not exist; create it or choose another")
    from forerun.surface.report.document import read_answer

    with quiet_libraries(debug=debug):
        given = _text(source)
        answer = read_answer(given, source)
        text = _written(answer, form, given).removesuffix("\n") + "\n"
    if out is None:
        typer.echo(text, nl=False)
        return
    with writes(out, FailureError):
        write_whole(out, text.encode())
    typer.echo(f"report written to {out}", err=True)


def _format(output: str, out: Path | None) -> str:
    found = output or _FORMAT_OF_SUFFIX.get(
        "" if out is None else out.suffix.lower(), "" if out else "markdown"
    )
    known = (*_OWN_FORMATS, *plugin_names("forerun.formats"))
    if found not in known:
        raise UsageError(
            f"the format of a report must be one of {', '.join(known)}, got '{output or out}'; end FILE in "
            ".html, .md or .json, or give --format"
        )
    return found


def _text(source: str) -> str:
    if source == "-":
        return sys.stdin.read()
    try:
        return Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or error
        raise UsageError(
            f"expected a readable file of JSON at '{source}', got: {said}; check the path"
        ) from error


def _written(answer: Readable, form: str, given: str) -> str:
    import json

    from forerun.search.scale import ScaleCurve

    if form in ("html", "markdown"):
        from forerun.surface.report.document import html_document, markdown_document

        return html_document(answer) if form == "html" else markdown_document(answer)
    if form == "json":
        # What the command printed beside the answer, such as ways to save, stays.
        return json_text({**json.loads(given), **answer.as_dict()})
    if isinstance(answer, ScaleCurve):
        raise UsageError(
            f"the format {form} needs one job, got a curve of scaling; give it the answer of 'forerun predict --json'"
        )
    return format_of_job(form, answer)
