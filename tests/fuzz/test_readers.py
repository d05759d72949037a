"""A quick share of the inputs that `python -m benchmarks.fuzz` tries: no reader breaks, hangs or takes gigabytes."""

from __future__ import annotations

import pytest

from tests.fuzz import inside, outside
from tests.fuzz.check import check, inputs
from tests.fuzz.reader import Reader

QUICK, QUICK_SLOW = 100, 15  # inputs

READERS: tuple[Reader, ...] = (*inside.READERS, *outside.READERS)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_reader_refuses_in_one_line_what_it_cannot_use(reader: Reader):
    count = QUICK_SLOW if reader.slow else QUICK
    found = []
    for number, content in inputs(reader, "ci", range(count)):
        outcome = check(reader, content)
        if outcome.verdict == "found":
            found.append(f"input {number}: {outcome.told} ({outcome.place})")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_reader_accepts_most_of_its_seeds(reader: Reader):
    """Otherwise mutations of them would all end at the same early refusal."""
    seeds = reader.seeds()
    refused = {
        number: outcome.told
        for number, seed in enumerate(seeds)
        if (outcome := check(reader, seed)).verdict != "accepted"
    }
    assert len(refused) <= len(seeds) / 2, refused
