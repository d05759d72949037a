"""A small server that many tests ask: its steps take 10 ms and a little."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest

from simulator.profile import Profile

hypothesis.settings.register_profile("capsim", deadline=None)  # a shared machine may pause anywhere
hypothesis.settings.load_profile("capsim")

PROFILE = """\
schema_version: 1
name: demo
model: demo-7b
gpu: a GPU
engine_version: 0.32.0
kv_bytes_per_token: 65536
engine_flags:
  max_num_seqs: 32
  max_num_batched_tokens: 2048
  max_model_len: 8192
  num_gpu_blocks: 1001
  block_size: 16
coefficients:
  step_time:
    constant: {value: 0.01, stderr: 1.0e-05, low: 0.00998, high: 0.01002}
    per_sequence: {value: 2.0e-05}
    per_kv_token: {value: 1.0e-08}
    per_prefill_token: {value: 5.0e-05, origin: assumed, note: from the data sheet}
  host_time:
    per_request: {value: 0.002}
measured_range:
  concurrency: [1, 8]
  sequences: [1, 8]
  context_tokens: [64, 1280]
  prompt_chunk_tokens: [64, 2048]
hold_out:
- level: C=4, 1024/256 tokens, 16 requests
  num_prompts: 16
  errors: {output_throughput: -0.011, p50_ttft: 0.03}
assumed:
- asynchronous scheduling is on
provenance: {created: '2026-01-01T00:00:00+00:00', capsim_version: 0.1.0, source: made up}
"""


@pytest.fixture
def profile_file(tmp_path: Path) -> Path:
    path = tmp_path / "demo.yaml"
    path.write_text(PROFILE)
    return path


@pytest.fixture
def profile(profile_file: Path) -> Profile:
    return Profile.load(profile_file)
