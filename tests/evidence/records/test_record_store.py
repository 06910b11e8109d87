import json
import locale
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
import warnings
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sql
from postgres_server import running_server

from forerun.base.errors import MissingExtraError, RecordError, StoreWarning, UsageError
from forerun.evidence.records import record_store
from forerun.evidence.records.measurement import JobKind, Outcome, measurement_document, read_document
from forerun.evidence.records.record_store import RecordStore, Spool, default_store_path, is_store
from made_measurements import measurement

HERE = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def postgres_url():
    with running_server() as url:
        yield url


class StoreContract:
    """What every database must do."""

    @pytest.fixture
    def url(self, tmp_path):
        raise NotImplementedError

    def test_what_was_added_is_read_back_exactly(self, url):
        with RecordStore.open(url) as store:
            assert store.add(measurement(1))
            assert list(store.measurements()) == [measurement(1)]
        with RecordStore.open(url, create=False) as store:
            assert store.count() == 1

    def test_a_done_record_is_never_replaced(self, url):
        with RecordStore.open(url) as store:
            assert store.add(measurement(1))
            assert not store.add(measurement(1, repetitions_s=(9.0,), summary=None))
            assert not store.add(measurement(1, outcome=Outcome.FAILED, reason="later"))
            assert [m.repetitions_s for m in store.measurements()] == [measurement(1).repetitions_s]

    def test_a_failed_record_is_replaced_by_a_later_one(self, url):
        failed = measurement(1, outcome=Outcome.TIMED_OUT, reason="hung", repetitions_s=(), summary=None)
        with RecordStore.open(url) as store:
            assert store.add(failed)
            assert not store.add(failed)
            assert store.done_keys([failed.key]) == set()
            assert store.add(measurement(1))
            assert store.done_keys([failed.key, "f" * 32]) == {failed.key}
            assert list(store.measurements()) == [measurement(1)]

    def test_records_are_asked_for_by_what_they_are(self, url):
        added = [measurement(i, device="cpu" if i % 2 else "rtx-3090", family=f"f{i % 3}") for i in range(12)]
        with RecordStore.open(url) as store:
            assert store.add_many(added) == 12
            chosen = list(store.measurements(device="cpu", family="f1"))
            assert [m.key for m in chosen] == [
                m.key for m in added if m.circumstances.device == "cpu" and m.family == "f1"
            ]
            assert store.count(device="rtx-3090", kind=JobKind.STEP) == 6
            assert store.counts("device") == [(("cpu",), 6), (("rtx-3090",), 6)]
            with pytest.raises(UsageError, match="can be selected by"):
                store.count(colour="red")

    def test_many_are_written_like_one(self, url):
        failed = measurement(1, outcome=Outcome.TIMED_OUT, reason="hung", repetitions_s=(), summary=None)
        with RecordStore.open(url) as store:
            assert store.add_many([failed, measurement(2)]) == 2
            assert store.add_many([measurement(1), measurement(2, reason="again"), measurement(3)]) == 2
            assert list(store.measurements()) == [measurement(1), measurement(2), measurement(3)]

    def test_a_record_is_found_by_how_its_key_begins(self, url):
        with RecordStore.open(url) as store:
            store.add_many([measurement(1, key="ab12"), measurement(2, key="ab34"), measurement(3, key="%_")])
            assert store.find("ab1").key == "ab12"
            assert store.find("%").key == "%_"
            for key, number in (("ab", "more than one"), ("c", "none")):
                with pytest.raises(RecordError, match=f"begins with '{key}', got {number}"):
                    store.find(key)

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"repetitions_s": (0.1, -0.1)}, "'repetitions_s', item 2: expected seconds"),
            ({"results": {"loss_1": float("nan")}}, "'loss_1': expected a finite number"),
            ({"results": {"time_ms": 3.0}}, "'time_ms': expected times in seconds"),
            ({"parameters": {"sizes": (1, 2)}}, "'sizes': expected a number, text or flag"),
        ],
    )
    def test_what_could_not_be_read_back_is_not_written(self, url, changed, message):
        with RecordStore.open(url) as store:
            with pytest.raises(RecordError, match=f"record {measurement(1).key}, .*{message}"):
                store.add(measurement(1, **changed))
            assert store.count() == 0

    def test_more_records_than_a_page(self, url):
        with RecordStore.open(url) as store:
            assert store.add_many(measurement(i) for i in range(4500)) == 4500
            keys = [m.key for m in store.measurements()]
            assert keys == [f"{i:032x}" for i in range(4500)]
            assert store.add_many(measurement(i) for i in range(4501)) == 1
            assert len(store.done_keys(keys)) == 4500

    def test_records_are_marked_unstable_later(self, url):
        with RecordStore.open(url) as store:
            store.add_many([measurement(1), measurement(2, summary=None)])
            assert (
                store.mark_unstable([measurement(1).key, measurement(2).key, "f" * 32], "the anchor drifted")
                == 1
            )
            first, second = store.measurements()
            assert (first.summary.is_stable, first.summary.reason) == (False, "the anchor drifted")
            assert second.summary is None

    def test_many_processes_write_at_once(self, url):
        script = textwrap.dedent(f"""
            import sys; sys.path.insert(0, {str(HERE)!r})
            from made_measurements import measurement
            from forerun.evidence.records.record_store import RecordStore
            start = int(sys.argv[1])
            with RecordStore.open({str(url)!r}) as store:
                for number in range(start, start + 40):
                    assert store.add(measurement(number))
        """)
        writers = [
            subprocess.Popen([sys.executable, "-c", script, str(start)]) for start in (0, 100, 200, 300)
        ]
        assert [writer.wait(120) for writer in writers] == [0, 0, 0, 0]
        with RecordStore.open(url) as store:
            assert store.count() == 160

    def test_kill_9_loses_nothing_that_was_written(self, url, tmp_path):
        written = tmp_path / "written"
        script = textwrap.dedent(f"""
            import sys; sys.path.insert(0, {str(HERE)!r})
            from made_measurements import measurement
            from forerun.evidence.records.record_store import RecordStore
            with RecordStore.open({str(url)!r}) as store, open({str(written)!r}, "w") as file:
                for number in range(100_000):
                    store.add(measurement(number))
                    print(number, file=file, flush=True)
        """)
        writer = subprocess.Popen([sys.executable, "-c", script])
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and not (
            written.exists() and len(written.read_text().split()) > 20
        ):
            time.sleep(0.02)
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait(30)
        numbers = [int(word) for word in written.read_text().split()]
        with RecordStore.open(url) as store:
            keys = {m.key for m in store.measurements()}
            assert {f"{n:032x}" for n in numbers[:-1]} <= keys
            assert store.add(measurement(10**6))


class TestSqlite(StoreContract):
    @pytest.fixture
    def url(self, tmp_path):
        return tmp_path / "new folder" / "records.sqlite"


class TestPostgresql(StoreContract):
    @pytest.fixture
    def url(self, postgres_url):
        import psycopg

        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute("DROP TABLE IF EXISTS measurements, forerun_store")
        return postgres_url

    def test_a_server_that_is_not_there(self):
        with pytest.raises(RecordError, match="server cannot be reached"):
            RecordStore.open("postgresql://forerun:secret@127.0.0.1:1/none")

    def test_a_password_is_not_shown(self):
        with pytest.raises(RecordError) as caught:
            RecordStore.open("postgresql://forerun:secret@127.0.0.1:1/none")
        assert "secret" not in str(caught.value)
        with pytest.raises(UsageError, match="cannot be read") as caught:
            RecordStore.open("postgresql://forerun:secret@host:port/name")
        assert "secret" not in str(caught.value)

    def test_the_short_name_of_postgresql_and_other_drivers(self, url):
        for scheme in ("postgres://", "postgresql+psycopg://"):
            with RecordStore.open(url.replace("postgresql://", scheme)) as store:
                assert store.count() == 0

    def test_the_driver_is_not_installed(self, url, monkeypatch):
        monkeypatch.setitem(sys.modules, "psycopg", None)
        with pytest.raises(MissingExtraError, match=r"pip install 'forerun\[postgres\]'"):
            RecordStore.open(url)


# ---------------------------------------------------------------------------------------------------------
# faults


@pytest.fixture
def turkish():
    before = locale.setlocale(locale.LC_CTYPE)
    try:
        locale.setlocale(locale.LC_CTYPE, "tr_TR.UTF-8")
    except locale.Error:
        pytest.skip("the locale tr_TR.UTF-8 is not installed")
    yield
    locale.setlocale(locale.LC_CTYPE, before)


def test_rows_are_counted_where_a_small_i_has_another_capital(turkish, tmp_path):
    with RecordStore.open(tmp_path / "r.sqlite") as store:
        assert store.add_many([measurement(1), measurement(2)]) == 2
        assert not store.add(measurement(1))
        assert store.add(measurement(3))


def test_statements_that_write_reach_the_driver_in_the_letters_that_it_knows_in_every_language(tmp_path):
    with RecordStore.open(tmp_path / "r.sqlite") as store:
        said: list[str] = []

        @sql.event.listens_for(store._engine, "connect")
        def listen(connection, _):
            connection.set_trace_callback(said.append)

        store._engine.dispose()
        store.add(measurement(1))
    assert any(words.startswith("insert ") for words in said)
    assert not any(words.startswith("INSERT ") for words in said)


def test_a_missing_file_is_not_made_for_a_reader(tmp_path):
    with pytest.raises(RecordError, match="no such file"):
        RecordStore.open(tmp_path / "none.sqlite", create=False)
    assert not (tmp_path / "none.sqlite").exists()


def test_a_file_that_is_no_database(tmp_path):
    path = tmp_path / "text.sqlite"
    path.write_text("not a database, but long enough to be taken for one " * 50)
    with pytest.raises(RecordError, match="not an SQLite database"):
        RecordStore.open(path)


def test_a_damaged_database(tmp_path):
    path = tmp_path / "records.sqlite"
    with RecordStore.open(path) as store:
        store.add_many(measurement(i) for i in range(300))
    data = bytearray(path.read_bytes())
    data[8192:-8192] = os.urandom(len(data) - 16384)
    path.write_bytes(data)
    with pytest.raises(RecordError, match=r"damaged|refused|no SQLite"), RecordStore.open(path) as store:
        list(store.measurements())


def test_somebody_elses_table(tmp_path):
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE measurements (x INTEGER)")
    with pytest.raises(RecordError, match="not forerun's"):
        RecordStore.open(path)


@pytest.mark.parametrize("version", [0, 99])
def test_a_store_of_another_layout(tmp_path, version):
    path = tmp_path / "records.sqlite"
    RecordStore.open(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE forerun_store SET layout_version = ?", (version,))
    for _ in range(2):
        with pytest.raises(RecordError, match=f"expected a store of layout version 2, got {version};"):
            RecordStore.open(path)


@pytest.mark.parametrize("version", [1, 99])
def test_a_record_of_another_version(tmp_path, version):
    path = tmp_path / "records.sqlite"
    with RecordStore.open(path) as store:
        store.add(measurement(1))
    with sqlite3.connect(path) as connection:
        document = json.loads(connection.execute("SELECT document FROM measurements").fetchone()[0])
        document["schema_version"] = version
        connection.execute("UPDATE measurements SET checksum = NULL, document = ?", (json.dumps(document),))
    with (
        RecordStore.open(path) as store,
        pytest.raises(RecordError, match=f"expected schema_version 2, got {version};"),
    ):
        list(store.measurements())


def flip(path, marker, offset=0):
    """Flips one bit of a file behind a marker in it."""
    data = bytearray(path.read_bytes())
    data[data.index(marker) + len(marker) + offset] ^= 1
    path.write_bytes(data)


def test_a_damaged_record_is_left_out_named_and_measured_again(tmp_path):
    path = tmp_path / "records.sqlite"
    with RecordStore.open(path) as store:
        store.add_many([measurement(1, family="made-up"), measurement(2)])
    flip(path, b'made-up","parameters":{"batch_size":3')  # 32 becomes 33, which no parser would notice
    with RecordStore.open(path) as store:
        with pytest.warns(StoreWarning, match=rf"1 damaged records are left out \(such as {1:032x}\)"):
            assert [m.key for m in store.measurements()] == [measurement(2).key]
        assert store.done_keys([measurement(1).key, measurement(2).key]) == {measurement(2).key}
        assert store.check() == (f"record {1:032x}: not as it was written",)
        with pytest.raises(RecordError, match="got a damaged one"), RecordStore.open(path) as other:
            other.find(measurement(1).key)
        assert store.add(measurement(1))
        assert {m.key for m in store.measurements()} == {measurement(1).key, measurement(2).key}
        assert store.check() == ()


def test_a_damaged_index_is_made_anew(tmp_path):
    path = tmp_path / "records.sqlite"
    with RecordStore.open(path) as store:
        store.add_many([measurement(number, family=f"kind-{number}") for number in range(3)])
    data = bytearray(path.read_bytes())
    data[data.rindex(b"kind-1") + 5] ^= 2  # the last occurrence may be in the table or in the index
    path.write_bytes(data)
    with warnings.catch_warnings(record=True) as caught, RecordStore.open(path) as store:
        warnings.simplefilter("always")
        assert len(list(store.measurements())) + len(caught) >= 3
        assert caught


def test_a_store_of_an_earlier_version_is_read_without_a_change(tmp_path):
    path = tmp_path / "records.sqlite"
    with RecordStore.open(path) as store:
        store.add(measurement(1))
    with sqlite3.connect(path) as connection:
        connection.execute("ALTER TABLE measurements DROP COLUMN checksum")
        connection.execute("UPDATE forerun_store SET layout_version = 1")
    with RecordStore.open(path, create=False) as store:
        assert list(store.measurements()) == [measurement(1)]
        assert store.counts("kind")
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT layout_version FROM forerun_store").fetchone() == (1,)


def test_a_store_without_checksums_gets_them(tmp_path):
    path = tmp_path / "records.sqlite"
    with RecordStore.open(path) as store:
        store.add_many([measurement(1), measurement(2)])
    with sqlite3.connect(path) as connection:
        connection.execute("ALTER TABLE measurements DROP COLUMN checksum")
        connection.execute("UPDATE forerun_store SET layout_version = 1")
    with RecordStore.open(path) as store:
        assert list(store.measurements()) == [measurement(1), measurement(2)]
        assert store.add(measurement(3))
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM measurements WHERE checksum IS NULL").fetchone() == (
            0,
        )


def test_a_server_that_goes_away_loses_nothing(postgres_url, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(record_store, "_PATIENCE_S", 0.0)
    with RecordStore.open(postgres_url) as store:
        store.add(measurement(1))
        there, store._engine = store._engine, sql.create_engine("postgresql+psycopg://u@127.0.0.1:1/x")
        with pytest.warns(StoreWarning, match="nothing listens on this port.*; measurements are kept in"):
            assert store.add(measurement(2001))
        assert store.add(measurement(2002))
        store._engine = there
    with RecordStore.open(postgres_url) as store:
        assert store.done_keys([measurement(2001).key, measurement(2002).key]) == {
            measurement(2001).key,
            measurement(2002).key,
        }
        assert not list((tmp_path / "forerun" / "spool").glob("*.jsonl"))


def test_a_line_that_was_cut_off_in_the_file_of_a_server_that_is_away_costs_no_other(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    spool = Spool(sql.make_url("postgresql://u@127.0.0.1:1/x"))
    spool.add([measurement(1)])
    with spool.path.open("a") as file:  # by a full disk, or a kill
        file.write(json.dumps(measurement_document(measurement(2)))[:100])
    spool.add([measurement(3)])
    written = []
    assert spool.replay(lambda found: written.extend(found) or len(written)) == 2
    assert written == [measurement(1), measurement(3)]
    assert not spool.path.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda url: url.replace("/postgres", "/nowhere"), "has no database of this name"),
        (lambda url: f"{url}?nonsense=1", "an option that PostgreSQL does not know"),
        (lambda url: "postgresql://u@127.0.0.1:1/x", "nothing listens on this port"),
        (lambda url: "postgresql://u@no-such-host.invalid/x", "its name is not known"),
        (lambda url: url.replace("forerun@", "nobody@"), "does not know the user"),
    ],
)
def test_each_reason_of_a_server_that_cannot_be_used_has_its_message(postgres_url, change, message):
    with pytest.raises(RecordError, match=message):
        RecordStore.open(change(postgres_url))


def test_a_folder_instead_of_a_file(tmp_path):
    with pytest.raises(RecordError, match="got a folder"):
        RecordStore.open(tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot be made"):
        RecordStore.open(tmp_path / "file" / "records.sqlite")


@contextmanager
def mounted(folder: Path, options: str):
    """A small file system in memory; skips where none may be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here (needs root)")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere; the next test is for root")
def test_a_folder_that_cannot_be_written(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(RecordError, match="cannot be"):
        RecordStore.open(tmp_path / "records.sqlite")


def test_a_disk_that_may_only_be_read(tmp_path):
    with mounted(tmp_path / "fixed", "size=4m") as folder:
        with RecordStore.open(folder / "records.sqlite") as store:
            store.add(measurement(1))
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        with RecordStore.open(folder / "records.sqlite", create=False) as store:
            assert list(store.measurements()) == [measurement(1)]
        for name in ("records.sqlite", "new.sqlite", "new folder/new.sqlite"):
            with (
                pytest.raises(RecordError, match=r"cannot be (written|opened|made)"),
                RecordStore.open(folder / name) as store,
            ):
                store.add(measurement(2))


@pytest.fixture
def small_disk(tmp_path):
    with mounted(tmp_path / "small", "size=1m") as folder:
        yield folder


def test_a_full_disk_loses_nothing_that_was_written(small_disk):
    path = small_disk / "records.sqlite"
    num_written = 0
    with RecordStore.open(path) as store:
        message = ""
        while not message:
            try:
                store.add(measurement(num_written))
            except RecordError as error:
                message = str(error)
            else:
                num_written += 1
        assert "no space is left" in message or "cannot be written" in message
        assert num_written > 20
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    with RecordStore.open(path) as store:
        assert store.count() == num_written
        assert store.add(measurement(10**6))


@pytest.mark.parametrize("url", ["mysql://host/x", "nonsense://"])
def test_a_database_nobody_here_speaks(url):
    with pytest.raises(UsageError, match=r"SQLite or PostgreSQL|database URL"):
        RecordStore.open(url)


def test_the_default_store_can_be_named(monkeypatch):
    monkeypatch.setenv("FORERUN_RECORDS", "/somewhere/else.sqlite")
    assert default_store_path() == "/somewhere/else.sqlite"
    monkeypatch.delenv("FORERUN_RECORDS")
    assert default_store_path().endswith("records.sqlite")


def test_what_is_a_store():
    assert is_store("postgresql://host/x")
    assert is_store("records.sqlite")
    assert not is_store("records.csv")


# ---------------------------------------------------------------------------------------------------------
# documents


def test_documents_are_json_and_round():
    document = json.loads(json.dumps(measurement_document(measurement(3)), allow_nan=False))
    assert read_document(document, "here") == measurement(3)


CIRCUMSTANCES = {"device": "cpu", "device_title": "Test CPU"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"repetitions_s": [0.1, -0.2]}, r"here, 'repetitions_s', item 2: expected seconds"),
        ({"repetitions_s": [float("nan")]}, "item 1: expected a finite number"),
        ({"repetitions_s": "0.1"}, "'repetitions_s': expected a valid tuple"),
        ({"kind": "stepp"}, "expected 'step', 'training'"),
        ({"outcome": "well"}, "expected 'done', 'out-of-memory'"),
        ({"subject": ""}, "expected text"),
        ({"parameters": {"a": [1]}}, "'parameters', 'a': expected a number, text or flag"),
        ({"results": {"loss_1": float("inf")}}, "finite"),
        ({"repetitions_ms": [1.0]}, "unknown field 'repetitions_ms'; did you mean repetitions_s"),
        ({"schema_version": 3}, "expected schema_version 2, got 3; read it with"),
        ({"schema_version": "two"}, "expected schema_version 2, got .two.;"),
        ({"schema_version": None}, "expected schema_version 2, got None;"),
        ({"repetitions_s": [], "results": {}}, "needs repetitions_s or results"),
        ({"circumstances": {"device": "cpu"}}, "here, 'circumstances': expected the field 'device_title'"),
        ({"circumstances": CIRCUMSTANCES | {"num_cores": "four"}}, "'num_cores': expected a valid integer"),
        (
            {"circumstances": CIRCUMSTANCES | {"load_before": float("nan")}},
            "'load_before': expected a finite",
        ),
        (
            {"circumstances": CIRCUMSTANCES | {"telemetry": {"power_w": "12"}}},
            "'power_w': expected a valid number",
        ),
        ({"circumstances": CIRCUMSTANCES | {"memory_gb": 24}}, "unknown field 'memory_gb'"),
        ({"results": {"epoch_time_s": -1.0}}, "'epoch_time_s': expected seconds from zero"),
        ({"results": {"peak_memory_mb": 7.0}}, "'peak_memory_mb': expected times in seconds"),
        ({"summary": {"median_s": 1.0, "low_s": 2.0, "high_s": 3.0, "is_stable": True}}, "low_s <= median_s"),
    ],
)
def test_what_cannot_be_meant_is_refused(changed, message):
    document = measurement_document(measurement(1)) | changed
    with pytest.raises(RecordError, match=message):
        read_document(document, "here")


def test_missing_fields_are_named():
    document = measurement_document(measurement(1))
    del document["circumstances"]
    with pytest.raises(RecordError, match="'circumstances', which is missing"):
        read_document(document, "here")


def test_reasons_add_up(tmp_path):
    with RecordStore.open(tmp_path / "r.sqlite") as store:
        store.add(measurement(1, summary=replace(measurement().summary, is_stable=False, reason="trend")))
        store.mark_unstable([measurement(1).key], "anchor")
        store.mark_unstable([measurement(1).key], "anchor")
        assert next(store.measurements()).summary.reason == "trend; anchor"
