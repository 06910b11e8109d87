"""``python -m studies faults``: what forerun does when things go wrong, as tables."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated

import typer

from forerun.base.errors import UsageError
from forerun.surface.cli.settings import DebugOption

_STORE_COLUMNS = ("faults", "acknowledged", "lost", "twice", "changed", "damaged", "refused", "not written")
_COMMAND_COLUMNS = (
    "faults", "inside a trial", "acknowledged", "lost", "twice", "changed", "damaged", "unfinished", "profiled again",
    "processes left",
)  # fmt: skip


Maker = Callable[[float], Iterator[str]]
_PARTS: dict[str, Maker] = {}


def _part(name: str, title: str, columns: Sequence[str] = ()) -> Callable[[Maker], Maker]:
    """Registers a part: the lines below its title, or the rows of its table of faults."""

    def register(make: Maker) -> Maker:
        def lines(share: float) -> Iterator[str]:
            yield f"\n## {title}\n"
            if columns:
                yield f"| fault | {' | '.join(columns)} |"
                yield f"|---|{'---|' * len(columns)}"
            yield from make(share)

        _PARTS[name] = lines
        return make

    return register


_longest_s: ContextVar[float] = ContextVar("longest_s")


def _until_late() -> Callable[[], bool]:
    """A function that is true once the time for a part is used."""
    end_s = time.monotonic() + _longest_s.get()
    return lambda: time.monotonic() > end_s


def _number(whole: int, share: float) -> int:
    return max(1, round(whole * share))


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        yield Path(name)


@_part("input", "Bad input")
def _input(share: float) -> Iterator[str]:
    from studies.faults.bad_inputs import bad_cases, bad_input_table, run_cases

    with _folder() as folder:
        judged = run_cases(bad_cases(_number(700, share)), folder)
    yield from bad_input_table(judged)
    slowest = max(judged, key=lambda found: found[1].time_s)
    yield f"\nThe slowest took {slowest[1].time_s:.1f} s: {' '.join(slowest[0].words)[:100]}"
    for case, ended, fault in judged:
        if fault:
            said = (ended.err.strip().splitlines() or [""])[-1][:160]
            yield f"- {fault}: `{' '.join(word[:60] for word in case.words)}`: {said}"


@_part("files", "Damaged files")
def _files(share: float) -> Iterator[str]:
    from studies.faults.damaged_files import damage_table

    with _folder() as folder:
        lines, faults = damage_table(folder, _number(10_000, share))
    yield from lines
    yield from (f"- {found.outcome}, {found.kind}, {found.damage}: {found.words[:160]}" for found in faults)


@_part("stores", "Stores in a file", _STORE_COLUMNS)
def _stores(share: float) -> Iterator[str]:
    from studies.faults.stores import disk_full, flipped_bits, killed_imports, killed_writers

    with _folder() as folder:
        writers = killed_writers(lambda _: str(folder / "killed.sqlite"), _number(100, share))
        yield _row("SQLite: kill -9 of a writer", writers)
        imports = killed_imports(str(folder / "imported.sqlite"), folder, _number(100, share))
        yield _row("SQLite: kill -9 of an import", imports)
        yield _row("SQLite: disk full at a byte", disk_full(folder, _number(50, share)))
        flips = flipped_bits(folder, _number(500, share))
    yield from _flips(flips)


@_part("postgres", "PostgreSQL", _STORE_COLUMNS)
def _postgres(share: float) -> Iterator[str]:
    from studies.faults.stores import (
        disk_full_while_away,
        killed_imports,
        killed_writers,
        restarted_server,
        running_server,
    )

    with running_server() as server:
        killed = killed_writers(lambda _: server.url, _number(100, share))
        yield _row("PostgreSQL: kill -9 of a writer", killed)
    with _folder() as folder, running_server() as server:
        imports = killed_imports(server.url, folder, _number(100, share))
        yield _row("PostgreSQL: kill -9 of an import", imports)
    with running_server() as server:
        yield _row("PostgreSQL: restart under two writers", restarted_server(server, _number(6, share)))
    with running_server() as server:
        away = disk_full_while_away(server, _number(50, share))
        yield _row("PostgreSQL away: disk of the client full at a byte", away)


@_part("journal", "Journal of a study", _STORE_COLUMNS)
def _journal(share: float) -> Iterator[str]:
    from studies.faults.stores import flipped_journal_bits, full_journals, killed_journals

    with _folder() as folder:
        yield _row("journal: kill -9 of a writer", killed_journals(folder, _number(100, share)))
    with _folder() as folder:
        yield _row("journal: disk full at a byte", full_journals(folder, _number(50, share)))
    with _folder() as folder:
        flips = flipped_journal_bits(folder, _number(500, share))
    yield from _flips(flips)


@_part("grids", "Commands killed: `measure grid` with SQLite", _COMMAND_COLUMNS)
def _grids(share: float) -> Iterator[str]:
    from studies.faults.commands import killed_grids

    with _folder() as folder:
        store, number = str(folder / "records.sqlite"), _number(100, share)
        found = killed_grids(store, folder, number, is_over=_until_late())
        yield _row("SQLite: kill -9 of `measure grid`", found, _COMMAND_COLUMNS)


@_part("grids-postgres", "Commands killed: `measure grid` with PostgreSQL", _COMMAND_COLUMNS)
def _grids_postgres(share: float) -> Iterator[str]:
    from studies.faults.commands import killed_grids
    from studies.faults.stores import running_server

    with _folder() as folder, running_server() as server:
        found = killed_grids(server.url, folder, _number(100, share), is_over=_until_late())
        yield _row("PostgreSQL: kill -9 of `measure grid`", found, _COMMAND_COLUMNS)


@_part("studies", "Commands killed: `tune`", _COMMAND_COLUMNS)
def _studies(share: float) -> Iterator[str]:
    from studies.faults.commands import killed_studies

    with _folder() as folder:
        yield _row(
            "journal: kill -9 of `tune`",
            killed_studies(folder, _number(100, share), is_over=_until_late()),
            _COMMAND_COLUMNS,
        )


@_part("scripts", "Hostile scripts")
def _scripts(share: float) -> Iterator[str]:
    from studies.faults.hostile_scripts import SCRIPTS, script_table

    with _folder() as folder:
        lines, ends = script_table(folder, list(SCRIPTS)[: _number(len(SCRIPTS), share)])
    yield from lines
    yield from (f"- {told.verb}, {told.script}: {', '.join(told.faults)}" for told in ends if told.faults)


@_part("servers-killed", "Servers killed", _COMMAND_COLUMNS)
def _servers_killed(share: float) -> Iterator[str]:
    from studies.faults.server import killed_servers

    with _folder() as folder:
        yield _row("kill -9 of `serve`", killed_servers(folder, _number(100, share)), _COMMAND_COLUMNS)


@_part("ray", "Head of a Ray cluster killed")
def _ray(share: float) -> Iterator[str]:
    from studies.faults.commands import killed_heads
    from studies.markdown import markdown_table

    rows = []
    for name in ("grid", "tune"):
        with _folder() as folder:
            found = killed_heads(name, folder)
        rows.append(
            (name, found.status, found.last_line, found.num_acknowledged, found.num_lost, found.is_finished)
        )
    header = ("command", "status", "last line", "acknowledged", "lost", "finished by the same command later")
    yield from markdown_table(header, rows).splitlines()


def _flips(flips: Counter[str]) -> Iterator[str]:
    from studies.markdown import markdown_table

    yield ""
    yield from markdown_table(("one flipped bit", "number"), sorted(flips.items())).splitlines()


def _row(name: str, found: Counter[str], columns: Sequence[str] = _STORE_COLUMNS) -> str:
    return f"| {name} | {' | '.join(str(found[column]) for column in columns)} |"


@_part("server", "Server")
def _server(share: float) -> Iterator[str]:
    from studies.faults.server import busy_processes, serving, slow_sockets, under_load

    columns = ("load", "requests", "time [s]", "server's CPU time [s]", "p50 [s]", "p95 [s]", "answers by status",
               "memory growth [MB]")  # fmt: skip
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    with _folder() as folder, serving(folder / "log", "--quiet") as served:
        for name, num_clients, num_requests, with_traces, num_busy in (
            ("50 clients, three models traced meanwhile", 50, _number(200, share), True, 0),
            ("50 clients", 50, _number(400, share), False, 0),
            (
                "8 clients, three models traced and 16 busy processes meanwhile",
                8,
                _number(200, share),
                True,
                16,
            ),
        ):
            with busy_processes(num_busy):
                found = under_load(
                    served, num_clients=num_clients, num_requests=num_requests, with_traces=with_traces
                )
            import numpy as np

            median_s = float(np.median(found.times_s))
            yield (
                f"| {name} | {len(found.times_s)} | {found.total_s:.0f} | {found.cpu_s:.0f} | {median_s:.3f} | "
                f"{found.p95_s():.3f} | "
                f"{dict(found.statuses)}, traced {dict(Counter(found.expensive))} | {found.growth_bytes / 1e6:.0f} |"
            )
        number = _number(1000, share)
        left, last_s, cheap_s = slow_sockets(served, number)
        yield (
            f"\n{number} slow sockets: {left} still open, the last closed after {last_s:.1f} s; a cheap question "
            f"meanwhile took {cheap_s:.3f} s"
        )


def faults(
    part: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"Part: {', '.join(_PARTS)}; may be repeated; all if none."),
    ] = None,
    share: Annotated[
        float, typer.Option(min=0.001, max=1.0, help="Share of the faults: 1 for all, 0.1 for a tenth.")
    ] = 1.0,
    minutes: Annotated[
        float, typer.Option(min=0.1, help="Most time for killing the commands of one part [min].")
    ] = 60.0,
    debug: DebugOption = False,
) -> None:
    """Feed bad input, kill writers, fill disks, flip bits and load the server; print tables of what happened."""
    _longest_s.set(60 * minutes)
    for name in part or ():
        if name not in _PARTS:
            raise UsageError(f"expected a part among {', '.join(_PARTS)}, got '{name}'")
    for name in part or _PARTS:
        for line in _PARTS[name](share):
            typer.echo(line)
