"""Long loads in short: nothing grows but what is kept of every token, and nothing is left behind.

The long forms are in `benchmarks.load_held`. Bounds are of memory and descriptors, never of times: each lies between
what is kept by design and what a single forgotten object a request would add.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import aiohttp
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")]

if sys.platform == "linux":
    from benchmarks.load_held.processes import spent, usage
    from benchmarks.load_held.sweep import Held, hold
    from benchmarks.load_held.traces import bytes_a_line, read, write
    from benchmarks.load_held.vanish import vanish
    from benchmarks.twin import twin

STREAMS, LEVELS, STEP = 24, 6, 0.02
FORGOTTEN = 500  # bytes; a request and its ticket take a thousand


@pytest.fixture(scope="module")
def held() -> Held:
    """A sweep of several levels of a second, watched."""
    return hold(STREAMS, LEVELS, 1.0, STEP, every=0.2)


def test_a_sweep_loses_no_request_and_leaves_nothing_behind(held: Held) -> None:
    assert (held.status, held.requests, held.failed) == (0, LEVELS * STREAMS, 0)
    assert held.tokens == LEVELS * STREAMS * round(1.0 / STEP)
    assert held.files_left == []
    assert held.processes_left == []


def test_descriptors_and_processes_do_not_add_up_from_level_to_level(held: Held) -> None:
    """One left open by each level would be five more in the last."""
    assert held.idle[1].descriptors == held.idle[0].descriptors
    most = [max(seen.client.descriptors for seen in level) for level in held.levels]
    assert len(most) == LEVELS
    assert most[-1] <= most[0] + 2
    assert (
        max(seen.client.threads for seen in held.levels[-1]) <= max(seen.client.threads for seen in held.levels[0]) + 2
    )
    assert all(seen.helpers.processes <= 2 for seen in held.seen)
    assert held.seen[-1].helpers.zombies == 0


def test_the_twin_keeps_nothing_of_requests_that_have_ended() -> None:
    clients, rounds = 64, 30
    body = json.dumps({"prompt": [5] * 8, "max_tokens": 2, "ignore_eos": True, "stream": True})

    async def load(url: str) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def client() -> None:
                for _ in range(rounds):
                    async with session.post(f"{url}/v1/completions", data=body) as response:
                        assert (await response.read()).endswith(b"data: [DONE]\n\n")

            await asyncio.gather(*(client() for _ in range(clients)))

    with twin(0.001) as (host, port, pid):
        asyncio.run(load(f"http://{host}:{port}"))  # the allocator takes what it needs for so many at once
        before = usage([pid]).rss
        for _ in range(3):
            asyncio.run(load(f"http://{host}:{port}"))
        assert usage([pid]).rss - before < 3 * clients * rounds * FORGOTTEN


def test_clients_that_are_killed_leave_nothing_in_the_twin() -> None:
    before, (one,) = vanish(STREAMS, 1, STEP)
    assert one.running == STREAMS
    assert one.is_clean
    assert one.server.descriptors == before.descriptors


def test_a_million_simulated_requests_fit_in_a_gigabyte_and_a_half() -> None:
    peaks = []
    for requests in (20_000, 60_000):
        found = spent([sys.executable, "-m", "benchmarks.speed", "--measure", str(requests)])
        assert found.status == 0
        peaks.append(json.loads(found.output)["bytes"])
    assert (peaks[1] - peaks[0]) / 40_000 < 1500


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("azure.csv", 24 + 8 * 12),  # a time and two lengths; a few copies while they are put together
        ("azure.csv.gz", 24 + 8 * 12),
        ("mooncake.jsonl", 24 + 8 * 12 + 13 * 8 * 2),  # and up to 13 hash ids, with what their list holds in reserve
    ],
)
def test_a_trace_is_read_in_little_memory(name: str, most: int, tmp_path: Path) -> None:
    few, many = ((lines, read(write(name, lines, tmp_path))) for lines in (40_000, 160_000))
    assert bytes_a_line(few, many) < most
