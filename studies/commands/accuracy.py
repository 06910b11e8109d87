"""``python -m studies accuracy``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.base.errors import UsageError
from forerun.surface.cli.output import quiet_libraries
from forerun.surface.cli.settings import DebugOption

_PAGE = Path("docs/accuracy.md")
_SCHEDULING = Path(__file__).parents[1] / "schedule" / "figures.md"
_LARGE_MODELS, _FRESH_DRAWS = "\n## Large models\n", "\n### Fresh draws\n"
_BEGIN, _END = "<!-- accuracy:begin -->", "<!-- accuracy:end -->"


def accuracy(
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Take a sample of the rows and short fits: minutes instead of hours."),
    ] = False,
    steps_only: Annotated[
        bool,
        typer.Option(
            "--steps-only", help="Make only the sections on step times, and replace them in the page."
        ),
    ] = False,
    out: Annotated[Path, typer.Option(metavar="FILE.md", help="The page to write.")] = _PAGE,
    debug: DebugOption = False,
) -> None:
    """Run every study on the public tables; write the page, README's table and the pictures of docs/methods."""
    if not out.parent.is_dir():
        raise UsageError(
            f"the folder of the page '{out}' does not exist; create it or choose another with --out"
        )
    from studies.reference_run import run_reference

    if steps_only:
        _renew_steps(out, quick=quick, debug=debug)
        return
    with quiet_libraries(debug=debug):
        results = run_reference(quick=quick)
        page = results.as_markdown()
    if out.is_file():
        page = with_last_section(page, out, _LARGE_MODELS)
    out.write_text(page, encoding="utf-8")
    typer.echo(page)
    typer.echo(f"page written to {out}", err=True)
    readme = out.resolve().parent.parent / "README.md"
    if not quick:
        figures = with_last_section(results.scheduling_as_markdown(), _SCHEDULING, _FRESH_DRAWS)
        _SCHEDULING.write_text(figures, encoding="utf-8")
    if not quick and readme.is_file():
        text = readme.read_text(encoding="utf-8")
        readme.write_text(with_accuracy(text, results.summary()), encoding="utf-8")
    _draw_pictures(out.parent / "methods")


def _renew_steps(out: Path, *, quick: bool, debug: bool) -> None:
    """Renews the sections on step times of a page that is there."""
    if not out.is_file():
        raise UsageError(
            f"expected the page '{out}', whose sections are to be renewed; leave --steps-only out"
        )
    from studies.reference_run import step_sections
    from studies.tables.public import require_reference_folder

    with quiet_libraries(debug=debug):
        sections = step_sections(require_reference_folder(), quick=quick).as_markdown()
    out.write_text(with_sections(out.read_text(encoding="utf-8"), sections), encoding="utf-8")
    typer.echo(sections)
    typer.echo(f"sections on step times renewed in {out}", err=True)


def with_sections(page: str, sections: str) -> str:
    """A page in which sections ("## ...") stand in place of those of the same title, new ones after the one before."""
    head, *parts = page.split("\n## ")
    titles = [part.partition("\n")[0] for part in parts]
    place = 0
    for section in f"\n{sections}".split("\n## ")[1:]:
        title = section.partition("\n")[0]
        if title in titles:
            place = titles.index(title)
            parts[place] = section.rstrip("\n") + "\n"
        else:
            place = min(place + 1, len(parts))
            parts.insert(place, section.rstrip("\n") + "\n")
            titles.insert(place, title)
    return "\n## ".join([head, *parts])


def with_last_section(page: str, earlier: Path, title: str) -> str:
    """A page with the last section of the earlier one: figures that other commands print, or that take a day."""
    _, mark, figures = earlier.read_text(encoding="utf-8").partition(title)
    return f"{page}{mark}{figures}"


def with_accuracy(readme: str, summary: str) -> str:
    """The text of a README with the summary between its accuracy markers; unchanged if it has none."""
    if _BEGIN not in readme or _END not in readme:
        return readme
    before, after = readme.split(_BEGIN)[0], readme.split(_END)[1]
    return f"{before}{_BEGIN}\n{summary}{_END}{after}"


def _draw_pictures(folder: Path) -> None:
    """Renews the pictures of the pages of methods."""
    if not folder.is_dir():
        return
    from forerun.evidence.pages.evaluation_page import plot_compositions
    from studies.own.records import recorded_compositions

    picture = folder / "composition.png"
    plot_compositions(picture, recorded_compositions())
    typer.echo(f"picture written to {picture}", err=True)
