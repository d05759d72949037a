"""Step-time terms from data sheets."""

import pytest

from calibration.roofline import Efficiency, GpuFacts, ModelFacts, roofline_priors, roofline_step_time, server_priors

QWEN = ModelFacts(7_615_616_512, 152_064 * 3_584, layers=28, attention_heads=28, kv_heads=4, head_dim=128)
RTX_4090 = GpuFacts("RTX 4090", memory_bandwidth=1008e9, dense_operations=165.2e12)
PEAK = Efficiency(weights=1, kv_cache=1, compute=1, attention=1)


def test_memory_terms_are_bytes_over_bandwidth():
    bound = roofline_step_time(QWEN, RTX_4090, PEAK)
    assert QWEN.kv_bytes_per_token == 57_344
    assert bound.per_kv_token == pytest.approx(57_344 / 1008e9)
    assert bound.constant == pytest.approx(14.03e-3, rel=1e-3)  # 15.11 ms if the input table were read as a whole


def test_compute_terms_are_operations_over_rate():
    bound = roofline_step_time(QWEN, RTX_4090, PEAK)
    assert bound.per_prefill_token == pytest.approx(2 * 6.5256e9 / 165.2e12, rel=1e-3)
    assert bound.per_prefill_attention == pytest.approx(4 * 28 * 3584 / 165.2e12)


def test_tied_embeddings_are_read_once_but_not_multiplied_for_prompt_tokens():
    tied = ModelFacts(1000, 100, 1, 1, 1, 1, tied_embeddings=True)
    untied = ModelFacts(1100, 100, 1, 1, 1, 1)
    assert tied.weight_bytes_read == untied.weight_bytes_read == 2000
    assert tied.prompt_token_operations == untied.prompt_token_operations == 1800


def test_a_lower_efficiency_takes_longer():
    half = roofline_step_time(QWEN, RTX_4090, Efficiency(weights=0.5, kv_cache=0.5, compute=0.5, attention=0.5))
    peak = roofline_step_time(QWEN, RTX_4090, PEAK)
    assert half.constant == pytest.approx(2 * peak.constant)
    assert half.per_prefill_attention == pytest.approx(2 * peak.per_prefill_attention)


def test_priors_name_the_gpu_and_the_share_of_its_peak():
    priors = roofline_priors(QWEN, RTX_4090)
    assert set(priors) == {"constant", "per_kv_token", "per_prefill_token", "per_prefill_attention"}
    assert priors["constant"].source == "weights read at 89% of the RTX 4090's bandwidth"


def test_a_server_that_tells_its_gpu_and_kv_cache_has_a_prior_for_reading_it():
    prior = server_priors({"gpu": "NVIDIA GeForce RTX 4090", "kv_bytes_per_token": 57_344})["per_kv_token"]
    assert prior.value == pytest.approx(57_344 / (1008e9 * 0.85), rel=0.01)
    assert "4090" in prior.source


@pytest.mark.parametrize(
    "server",
    [
        {},
        {"gpu": "NVIDIA GeForce RTX 4090"},
        {"gpu": "a card of tomorrow", "kv_bytes_per_token": 57_344},
        {"gpu": "NVIDIA GeForce RTX 4090", "kv_bytes_per_token": 57_344, "tensor_parallel_size": 2},
    ],
)
def test_a_server_that_tells_less_has_none(server):
    assert server_priors(server) == {}
