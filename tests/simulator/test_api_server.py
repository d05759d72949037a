"""Requests on their way to the engine."""

import pytest

from simulator.engine.engine_flags import EngineFlags
from simulator.engine.simulation import simulate_level
from simulator.engine.step_time import HostTime, StepTime
from simulator.loads.workload import ClosedLoop, Length, OpenLoop, Shape, Workload

FLAGS = EngineFlags(max_num_seqs=128, num_gpu_blocks=5431)
SHAPE = (Shape(Length.fixed(1024), Length.fixed(256)),)


class RecordedSteps(StepTime):
    """Keeps the prompt tokens of every step that has any."""

    def duration(self, sequences, kv_tokens, prefill_tokens=0, prefill_attention=0.0):
        if prefill_tokens:
            self.chunks.append(prefill_tokens)
        return super().duration(sequences, kv_tokens, prefill_tokens, prefill_attention)


# The prompt tokens of every step that had any, from the step log of vLLM 0.32.0 with the step times below, under
# ``vllm bench serve`` with 4 requests a client; one line a wave.
LOGGED = {
    8: [
        *(1024, 2047, 2046, 2044, 1031),
        *(1024, 1024, 2046, 2045, 2043, 10),
        *(1024, 1024, 1024, 2045, 2044, 1031),
        *(1024, 1024, 1024, 1024, 2044, 2043, 9),
    ],
    16: [
        *(1024, 2047, 2046, 2044, 2042, 2040, 2038, 2036, 1067),
        *(1024, 1024, 2038, 2039, 2039, 2039, 2039, 2037, 2035, 70),
        *(1024, 1024, 1024, 2038, 2039, 2039, 2039, 2038, 2036, 1083),
        *(1024, 1024, 1024, 1024, 2038, 2039, 2039, 2039, 2037, 2035, 61),
    ],
}


def chunks(clients, host_time):
    step_time = RecordedSteps(15.7e-3, 35e-6, 62e-9, 80e-6, 3.1e-9)
    object.__setattr__(step_time, "chunks", [])
    simulate_level(Workload(ClosedLoop(clients), SHAPE, 4 * clients), FLAGS, step_time, host_time)
    return step_time.chunks


@pytest.mark.parametrize("serial", [0.5e-3, 2e-3, 4e-3])
@pytest.mark.parametrize("clients", LOGGED)
def test_requests_that_come_one_by_one_are_chunked_as_by_a_real_vllm(clients, serial):
    assert chunks(clients, HostTime(6e-3, serial)) == LOGGED[clients]


def test_requests_that_come_together_share_the_first_step():
    assert chunks(8, HostTime(6e-3))[0] == 2048


def test_a_request_waits_for_those_before_it():
    step_time = StepTime(1e-3)
    load = Workload(OpenLoop(float("inf")), (Shape(Length.fixed(16), Length.fixed(1)),), 3)
    ttft = simulate_level(load, FLAGS, step_time, HostTime(5e-3, 100e-3)).requests["ttft"]
    assert ttft.tolist() == pytest.approx([0.106, 0.206, 0.306])


def test_a_lone_request_takes_both_times():
    load = Workload(ClosedLoop(1), (Shape(Length.fixed(16), Length.fixed(1)),), 2)
    ttft = simulate_level(load, FLAGS, StepTime(1e-3), HostTime(5e-3, 100e-3)).requests["ttft"]
    assert ttft.tolist() == pytest.approx([0.106, 0.106])


def test_a_time_cannot_be_negative():
    with pytest.raises(ValueError, match="per_request_serial"):
        HostTime(0.0, -1e-3)
