"""Deliveries are matched to the steps of a log that has a clock of its own."""

from __future__ import annotations

import numpy as np

from benchmarks.accuracy.steps import delivering, match, read_log, shifts

SHIFT = 8448.25  # s


def test_deliveries_find_their_steps_on_another_clock():
    rng = np.random.default_rng(1)
    ends = 8400 + np.cumsum(rng.choice([15.7e-3, 16.1e-3, 57e-3, 180e-3], 4000, p=[0.6, 0.3, 0.06, 0.04]))
    truth = np.sort(rng.choice(np.arange(1000, 1600), 500, replace=False))
    times = ends[truth] - SHIFT + rng.exponential(0.4e-3, len(truth))
    best = max(shifts(times, ends), key=lambda shift: (match(times + shift, ends) >= 0).sum())
    assert abs(best - SHIFT) < 1e-3
    assert (match(times + best, ends) == truth).mean() > 0.99


def test_a_second_delivery_after_one_step_finds_none():
    ends = np.array([1.0, 2.0, 3.0])
    assert match(np.array([1.001, 1.004, 3.002]), ends).tolist() == [0, -1, 2]


def test_a_prompt_chunk_before_the_last_gives_no_token(tmp_path):
    path = tmp_path / "steps.csv"
    path.write_text(
        "start,seconds,sequences,prefill_tokens,prefill_attention,kv_tokens\n"
        "1.0,0.2,1,2048,2097152.0,0\n1.2,0.1,1,952,2403800.0,0\n1.3,0.016,1,0,0.0,3000\n1.316,0.2,2,2048,2097152.0,3001\n"
    )
    assert delivering(read_log(path)).tolist() == [False, True, True, True]
