"""Tables are made a part at a time, and are the same."""

from __future__ import annotations

import pandas as pd
import pytest

from simulator.engine import recorder
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.workload import ClosedLoop, Length, Shape, Workload
from simulator.results.run import GAP_COLUMNS


@pytest.mark.parametrize("noise", [(), tuple(range(-5, 6))])
def test_gaps_do_not_depend_on_how_many_are_computed_at_a_time(
    noise: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Workload(ClosedLoop(6), (Shape(Length(100, 900), Length(5, 60)),), 30)
    host_time = HostTime(0.002, per_prompt_token=1e-6, gap_noise=tuple(value * 1e-4 for value in noise))

    def gaps(at_a_time: int) -> pd.DataFrame:
        monkeypatch.setattr(recorder, "AT_A_TIME", at_a_time)
        return simulate_level(load, EngineFlags(num_gpu_blocks=300), StepTime(0.01, 1e-5, 1e-8, 5e-5), host_time).gaps

    whole = gaps(1 << 20)
    assert whole["count"].sum() == (load.lengths()[1] - 1).sum()
    assert {name: str(kind) for name, kind in whole.dtypes.items()} == GAP_COLUMNS
    for part in (1, 7, len(whole)):
        pd.testing.assert_frame_equal(gaps(part), whole, check_exact=True)
