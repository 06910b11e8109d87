"""Times of the record store with many records: import, questions, export; each in a separate process.

    python benchmarks/record_store.py [--num-records 1000000] [--store postgresql://user@host/name] [--folder FOLDER]

Prints for each part its answer, seconds by the clock and of the processor, and peak resident memory. The records are
made up: 20 devices, 50 model families, 10 repetitions each.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from forerun.evidence.records.measurement import Circumstances, JobKind, Measurement, Outcome, Summary
from forerun.evidence.records.reading import export_measurements, import_measurements
from forerun.evidence.records.record_store import RecordStore

NUM_DEVICES = 20
NUM_FAMILIES = 50
NUM_REPETITIONS = 10
# ru_maxrss is in KiB on Linux.
BYTES_PER_MAXRSS = 1024


def made_records(num_records: int) -> Iterator[Measurement]:
    """Records of made-up steps, all different."""
    random_source = random.Random(0)
    for number in range(num_records):
        device, family = f"device-{number % NUM_DEVICES}", f"family-{number // NUM_DEVICES % NUM_FAMILIES}"
        times_s = sorted(random_source.uniform(0.1, 0.2) for _ in range(NUM_REPETITIONS))
        yield Measurement(
            key=f"{random_source.getrandbits(128):032x}",
            kind=JobKind.STEP,
            subject=f"{family}:{number % 400}",
            family=family,
            parameters={
                "batch_size": 2 ** (number % 9),
                "image_size": 224,
                "precision": "fp32",
                "layout": "nchw",
                "compile": False,
                "optimizer": "sgd",
            },
            outcome=Outcome.DONE,
            repetitions_s=tuple(times_s),
            warm_up_s=(times_s[-1], times_s[0]),
            summary=Summary(median_s=times_s[5], low_s=times_s[1], high_s=times_s[8], is_stable=True),
            results={"num_parameters": 25_557_032, "peak_memory_bytes": 3.1e9, "null_step_s": 1e-7},
            circumstances=Circumstances(
                device=device,
                device_title=device.title(),
                device_index="cuda:0",
                host="one",
                num_cores=16,
                num_threads=8,
                memory_bytes=24e9,
                operating_system="Linux 6.1",
                python_version="3.12.1",
                framework_version="2.15.0",
                forerun_version="0.1.0",
                accelerator_software="CUDA 13.0, driver 580.65",
                started_at="2026-11-21T00:00:00+00:00",
                occasion=f"day-{number % 7}",
                load_before=0.1,
                telemetry={"power_before_w": 60.0, "power_during_w": 310.5, "clock_during_hz": 1.695e9},
            ),
        )


def make_file(store: str, folder: Path, num_records: int) -> int:
    """Writes the records to a Parquet file."""
    return export_measurements(made_records(num_records), folder / "made.parquet")


def import_file(store: str, folder: Path, num_records: int) -> int:
    """Reads the file into the store."""
    with RecordStore.open(store) as opened:
        return opened.add_many(import_measurements(folder / "made.parquet"))


def count_one_pair(store: str, folder: Path, num_records: int) -> int:
    """Counts the records of one device and one family."""
    with RecordStore.open(store, create=False) as opened:
        return opened.count(device="device-3", family="family-7")


def read_one_pair(store: str, folder: Path, num_records: int) -> int:
    """Reads the records of one device and one family."""
    with RecordStore.open(store, create=False) as opened:
        return sum(1 for _ in opened.measurements(device="device-3", family="family-7"))


def read_one_device(store: str, folder: Path, num_records: int) -> int:
    """Reads the records of one device, a twentieth of all."""
    with RecordStore.open(store, create=False) as opened:
        return sum(1 for _ in opened.measurements(device="device-3"))


def count_groups(store: str, folder: Path, num_records: int) -> int:
    """Counts by device and family, as `forerun records list` does."""
    with RecordStore.open(store, create=False) as opened:
        return sum(number for _, number in opened.counts("device", "family"))


def skip_done(store: str, folder: Path, num_records: int) -> int:
    """Asks which of 10,000 keys are done, as a session that resumes does."""
    keys = [record.key for record in made_records(min(10_000, num_records))]
    with RecordStore.open(store, create=False) as opened:
        return len(opened.done_keys(keys))


def export_parquet(store: str, folder: Path, num_records: int) -> int:
    """Writes all records to Parquet."""
    with RecordStore.open(store, create=False) as opened:
        return export_measurements(opened.measurements(), folder / "all.parquet")


def export_csv(store: str, folder: Path, num_records: int) -> int:
    """Writes all records to CSV."""
    with RecordStore.open(store, create=False) as opened:
        return export_measurements(opened.measurements(), folder / "all.csv")


PARTS: tuple[Callable[[str, Path, int], int], ...] = (
    make_file,
    import_file,
    count_one_pair,
    read_one_pair,
    read_one_device,
    count_groups,
    skip_done,
    export_parquet,
    export_csv,
)


def run_part(part: Callable[[str, Path, int], int], store: str, folder: Path, num_records: int) -> None:
    """Runs one part in this process and prints a line about it."""
    start_s = time.perf_counter()
    answer = part(store, folder, num_records)
    taken_s, computing_s = time.perf_counter() - start_s, time.process_time()
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * BYTES_PER_MAXRSS
    print(
        f"{part.__name__:<18} {answer:>9} {taken_s:>9.2f} s {computing_s:>9.2f} s {peak_bytes / 1e6:>7.0f} MB",
        flush=True,
    )


def main() -> None:
    """Runs all parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-records", type=int, default=1_000_000)
    parser.add_argument("--store", help="file or URL; an SQLite file in the folder if not given")
    parser.add_argument("--folder", type=Path, help="where the files go; a temporary one if not given")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        store = asked.store or str(folder / "records.sqlite")
        for part in PARTS:
            process = multiprocessing.get_context("spawn").Process(
                target=run_part, args=(part, store, folder, asked.num_records)
            )
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(f"{part.__name__} failed")
        for path in sorted(folder.iterdir()):
            print(f"{path.name:<18} {path.stat().st_size / 1e6:>9.0f} MB")


if __name__ == "__main__":
    main()
