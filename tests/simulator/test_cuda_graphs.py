"""Batches are padded as vLLM's own dispatcher pads them, and cost what the profile says."""

from __future__ import annotations

import pytest

from simulator.engine.cuda_graphs import DecodeGraphs, capture_sizes
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import StepTime
from simulator.loads.workload import ClosedLoop, Length, Shape, Workload

FLAGS = EngineFlags(max_num_seqs=256, max_num_batched_tokens=2048, num_gpu_blocks=20000)
BARE = StepTime(10e-3)


def decode_step(sequences: int, step_time: StepTime, flags: EngineFlags = FLAGS) -> float:
    """The duration of a step in which `sequences` sequences decode, in seconds."""
    shape = Shape(Length.fixed(1), Length.fixed(50))
    level = simulate_level(Workload(ClosedLoop(sequences), (shape,), sequences), flags, step_time)
    return float(level.gaps["gap"].median())


def test_the_defaults_capture_51_sizes_up_to_512() -> None:
    sizes = capture_sizes(FLAGS)
    assert (len(sizes), sizes[:5], sizes[-1]) == (51, [1, 2, 4, 8, 16], 512)


@pytest.mark.parametrize(("batch", "padded"), [(3, 4), (9, 16), (100, 104), (249, 256), (256, 256)])
def test_a_batch_is_padded_to_the_next_captured_size(batch: int, padded: int) -> None:
    assert DecodeGraphs(FLAGS).padding(batch) == padded - batch


def test_beyond_the_largest_graph_there_is_none() -> None:
    graphs = DecodeGraphs(FLAGS.changed(max_num_seqs=1024))
    assert graphs.padding(512) == 0
    assert graphs.padding(513) is None


def test_eager_mode_has_no_graphs() -> None:
    assert capture_sizes(FLAGS.changed(enforce_eager=True)) == []


def test_empty_places_of_a_graph_cost_what_the_profile_says() -> None:
    padded = StepTime(10e-3, per_padded_sequence=50e-6)
    assert decode_step(9, padded) == pytest.approx(10e-3 + 7 * 50e-6)
    assert decode_step(16, padded) == pytest.approx(10e-3)


def test_a_step_without_a_graph_costs_more() -> None:
    slower = StepTime(10e-3, without_graph=2e-3)
    wide = FLAGS.changed(max_num_seqs=1024)
    assert decode_step(512, slower, wide) == pytest.approx(10e-3)
    assert decode_step(513, slower, wide) == pytest.approx(12e-3)
    assert decode_step(4, slower, FLAGS.changed(enforce_eager=True)) == pytest.approx(12e-3)


def test_without_these_terms_graphs_change_nothing() -> None:
    assert decode_step(9, BARE) == pytest.approx(decode_step(9, BARE, FLAGS.changed(enforce_eager=True)))
