"""Starts a server, lets many clients ask at once, and prints errors and the 95th percentile.

    python benchmarks/serve_load.py --clients 50 --questions 200

Every client asks for other batch sizes and devices of one model, all distinct, so that no answer is a kept one.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import time

import httpx
import numpy as np

MODEL = "torchvision:resnet50"
DEVICES = ("t4", "l4", "a10g", "v100-sxm2-16gb", "a100-sxm4-40gb", "h100-sxm", "rtx-3090", "rtx-4090")


def main() -> None:
    """Starts a server, asks, and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--questions", type=int, default=200, help="of each client")
    options = parser.parse_args()
    server = subprocess.Popen(
        [sys.executable, "-m", "forerun", "serve", "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    assert server.stderr is not None
    try:
        found = re.search(r"http://\S+:\d+", server.stderr.readline())
        assert found, "the server did not start"
        report(*asyncio.run(load(found[0], options.clients, options.questions)))
    finally:
        server.terminate()
        server.wait()


async def load(address: str, num_clients: int, num_questions: int) -> tuple[list[float], int, float]:
    """Times of all answers [s], the number of errors, and the time of everything [s]."""
    limits = httpx.Limits(max_connections=num_clients)
    async with httpx.AsyncClient(base_url=address, timeout=600.0, limits=limits) as client:
        await ask(client, 0)  # traces the model
        begin = time.perf_counter()
        clients = [
            asyncio.create_task(ask_many(client, number, num_questions)) for number in range(num_clients)
        ]
        answers = [answer for task in clients for answer in await task]
    return (
        [seconds for seconds, _ in answers],
        sum(not good for _, good in answers),
        time.perf_counter() - begin,
    )


async def ask_many(client: httpx.AsyncClient, number: int, num_questions: int) -> list[tuple[float, bool]]:
    """The answers to one client's questions, one after the other."""
    first = 1 + number * num_questions
    return [await ask(client, first + question) for question in range(num_questions)]


async def ask(client: httpx.AsyncClient, number: int) -> tuple[float, bool]:
    """Time of one answer and whether it is one."""
    batch_size, device = divmod(number, len(DEVICES))
    question = {"model": MODEL, "device": DEVICES[device], "batch_size": batch_size + 1, "precision": "amp"}
    begin = time.perf_counter()
    answer = await client.post("/predict", json=question)
    return time.perf_counter() - begin, answer.status_code == 200 and "step_time_s" in answer.json()


def report(times_s: list[float], num_errors: int, whole_s: float) -> None:
    """Prints the counts and the times."""
    low, middle, high = np.quantile(times_s, [0.5, 0.95, 0.99])
    print(
        f"{len(times_s):,} predictions in {whole_s:.1f} s ({len(times_s) / whole_s:.0f} a second), "
        f"{num_errors} errors; median {1e3 * low:.0f} ms, p95 {1e3 * middle:.0f} ms, p99 {1e3 * high:.0f} ms"
    )


if __name__ == "__main__":
    main()
