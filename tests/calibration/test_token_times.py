"""The times of an answer's tokens are a list of pairs that takes little room."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from calibration.token_times import TokenTimes

Pairs = list[tuple[float, int]]
READS = st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 1 << 31)), max_size=20).map(sorted)


@given(READS)
def test_it_is_the_list_of_its_pairs(pairs: Pairs) -> None:
    found = TokenTimes(pairs)
    assert found == pairs
    assert len(found) == len(pairs)
    assert [found[place] for place in range(-len(pairs), len(pairs))] == pairs + pairs
    assert found.tokens == (pairs[-1][1] if pairs else 0)
    times, tokens = found.arrays()
    assert list(zip(times.tolist(), tokens.tolist(), strict=True)) == pairs
    assert pickle.loads(pickle.dumps(found)) == found
    if pairs:
        assert found.pop() == pairs[-1]
        assert found == pairs[:-1]


@given(READS, st.floats(0, 1e6))
def test_what_was_received_by_a_moment(pairs: Pairs, moment: float) -> None:
    assert TokenTimes(pairs).received_by(moment) == ([0] + [tokens for time, tokens in pairs if time <= moment])[-1]


def test_many_pairs_take_sixteen_bytes_each() -> None:
    """As they are sent from process to process too."""
    many = TokenTimes((float(number), number) for number in range(100_000))
    assert len(pickle.dumps(many)) < 100_000 * 16.1
