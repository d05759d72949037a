"""Steps seen from outside are the steps that the engine took."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from synthetic import closed, measured_level

from calibration.steps import all_steps, reconstruct
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.step_time import HostTime, StepTime

STEP_TIME = StepTime(15.7e-3, 35e-6, 62e-9, 80e-6, 3.1e-9)
HOST_TIME = HostTime(per_request=0.003, per_request_serial=0.002)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(("concurrency", "input_len", "budget"), [(1, 300, 2048), (8, 1024, 2048), (8, 1500, 512)])
def test_a_reconstructed_step_takes_as_long_as_its_composition_says(
    asynchronous: bool, concurrency: int, input_len: int, budget: int
) -> None:
    flags = EngineFlags(
        max_num_seqs=128, max_num_batched_tokens=budget, num_gpu_blocks=5431, async_scheduling=asynchronous
    )
    level = measured_level(closed(concurrency, input_len, 100, 4 * concurrency), flags, STEP_TIME, HOST_TIME)
    steps = reconstruct(level, flags, HOST_TIME.per_request_serial)
    told = [
        STEP_TIME.duration(int(row.sequences), int(row.kv_tokens), int(row.prefill_tokens), row.prefill_attention)
        for row in steps.itertuples()
    ]
    assert len(steps) > 0.9 * (level.gaps["count"].sum() / concurrency)
    right = np.isclose(steps["duration"], told, rtol=0, atol=1e-6)
    assert right[steps["prefill_tokens"] == 0].all(), "decode steps are seen exactly"
    assert right.mean() > 0.98


def test_every_step_that_delivers_is_counted_and_the_certain_ones_are_given() -> None:
    flags = EngineFlags(max_num_seqs=128, max_num_batched_tokens=512, num_gpu_blocks=5431)
    level = measured_level(closed(6, 1500, 40, 18), flags, STEP_TIME, HOST_TIME)
    seen = all_steps(level, flags, HOST_TIME.per_request_serial)
    assert level.tokens is not None
    assert len(seen) == level.tokens["time"].round(9).nunique()
    certain = seen[seen["certain"]].drop(columns="certain").reset_index(drop=True)
    pd.testing.assert_frame_equal(certain, reconstruct(level, flags, HOST_TIME.per_request_serial))
    assert certain["duration"].notna().all()
    assert not seen["certain"].iloc[0], "nothing is known of how long the first step took"


def test_a_request_that_lost_its_stream_leaves_no_trace() -> None:
    flags = EngineFlags(max_num_seqs=128, num_gpu_blocks=5431)
    level = measured_level(closed(2, 100, 20, 6), flags, STEP_TIME, HOST_TIME)
    level.requests.loc[0, "error"] = "stream broken"
    assert len(reconstruct(level, flags, 0.0)) > 0


def test_without_raw_tokens_nothing_can_be_seen() -> None:
    flags = EngineFlags()
    level = measured_level(closed(1, 10, 5, 2), flags, STEP_TIME, HOST_TIME)
    level.tokens = None
    with pytest.raises(ValueError, match="raw token times"):
        reconstruct(level, flags, 0.0)
