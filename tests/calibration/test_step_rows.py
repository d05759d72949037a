"""Rows of the fit are sums over whole steps, whatever reaches the client late."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic import Noise, closed, measured_level

from calibration.step_rows import FIRST, KINDS, LONE, MIXED, TERMS, observations
from simulator.engine.cuda_graphs import DecodeGraphs
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.workload import ClosedLoop, Length, Shape, Workload

FLAGS = EngineFlags(max_num_seqs=128, max_num_batched_tokens=2048, num_gpu_blocks=5431)
STEP_TIME = StepTime(15.7e-3, 35e-6, 62e-9, 80e-6, 3.1e-9, mixed_per_sequence=20e-6, per_padded_sequence=30e-6)
HOST_TIME = HostTime(per_request=0.002, per_request_serial=0.004)
MIXED_LOAD = Workload(ClosedLoop(6), (Shape(Length(100, 3000), Length(20, 60)),), 30)
LAG = 2e-6  # s a prompt token


@pytest.fixture(scope="module")
def levels():
    lone = [closed(1, length, 8, 2) for length in (300, 5000)]
    return [measured_level(load, FLAGS, STEP_TIME, HOST_TIME, Noise(lag=LAG)) for load in (*lone, MIXED_LOAD)]


def test_every_row_is_the_sum_of_its_terms_though_steps_with_prompts_come_late(levels):
    rows = observations(levels, FLAGS, HOST_TIME.per_request_serial)
    truth = {
        **{name: getattr(STEP_TIME, name) for name in TERMS if hasattr(STEP_TIME, name)},
        "per_request": HOST_TIME.per_request + HOST_TIME.per_request_serial,
        "per_prompt_token": LAG,
    }
    told = rows.terms @ [truth[name] for name in TERMS]
    right = np.isclose(told, rows.seconds, rtol=0, atol=2e-6)
    assert right.mean() > 0.98
    for kind in KINDS:
        assert right[rows.kinds == kind].any(), kind
    assert (rows.kinds == LONE).sum() == (rows.kinds == FIRST).sum() == 4
    assert (rows.terms[rows.kinds == MIXED, TERMS.index("constant")] >= 2).all()


def test_the_largest_step_is_known(levels):
    rows = observations(levels, FLAGS, HOST_TIME.per_request_serial)
    assert rows.most_prompt_tokens == 2048
    assert rows.most_sequences == 6


def test_decode_steps_know_the_empty_places_of_their_graph(levels):
    rows = observations(levels, FLAGS, HOST_TIME.per_request_serial)
    graphs = DecodeGraphs(FLAGS)
    decode = rows.terms[rows.kinds == "decode steps"]
    for row in decode[:50]:
        assert row[TERMS.index("per_padded_sequence")] == graphs.padding(int(row[TERMS.index("per_sequence")]))


def test_for_a_given_knee_the_overlap_is_linear_and_its_slopes_are_those_of_the_formula(levels):
    rows = observations(levels, FLAGS, HOST_TIME.per_request_serial)
    weights, rate, small = 4e-3, 20e-6, 1e-9

    def computing(weights: float, rate: float) -> np.ndarray:
        each = np.hypot(weights, rate * rows.tokens) - weights
        return np.bincount(rows.owners, each)

    column = TERMS.index("per_prefill_token")
    assert rows.design(weights / rate)[:, column] * rate == pytest.approx(computing(weights, rate))
    slopes = rows.slopes(weights / rate)
    by_rate = (computing(weights, rate + small) - computing(weights, rate - small)) / (2 * small)
    by_weights = (computing(weights + small, rate) - computing(weights - small, rate)) / (2 * small)
    assert slopes[:, column] == pytest.approx(by_rate, rel=1e-4)
    assert slopes[:, TERMS.index("weights")] == pytest.approx(by_weights, rel=1e-4, abs=1e-4)
