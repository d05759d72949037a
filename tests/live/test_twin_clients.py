"""Other people's clients against the twin, unchanged; and a calibration that finds the twin's profile again.

vLLM's load generator and the `openai` package come with the environment of install_vllm.sh. AIPerf wants its own, which
CAPSIM_AIPERF_VENV names (default: .aiperf in the repository's root): ``python -m venv V`` and
``V/bin/pip install aiperf==0.13.0``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from calibration.imports import import_files
from simulator.engine.simulation import simulate_level
from simulator.profile import Profile
from simulator.results.run import Level
from simulator.results.summary import summarize

from .server import model_folder

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tests" / "capsim"))

from twin_server import TwinServer, make_profile  # noqa: E402

from simulator.engine.engine_flags import EngineFlags  # noqa: E402

FLAGS = EngineFlags(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=8192, num_gpu_blocks=4001)
PROFILE = make_profile(
    FLAGS, {"per_request": 0.004}, constant=0.012, per_sequence=1e-4, per_kv_token=1e-7, per_prefill_token=5e-5
)
CLIENTS, REQUESTS, INPUT, OUTPUT = 4, 24, 128, 32
QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}

ASK = """
import sys
from openai import NotFoundError, OpenAI

client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="unused")
model = client.models.list().data[0].id
question = [{"role": "user", "content": "hello"}]
stream = client.chat.completions.create(
    model=model, messages=question, max_tokens=5, stream=True, stream_options={"include_usage": True}
)
*events, last = stream
assert "".join(event.choices[0].delta.content or "" for event in events) == " the time year and way", events
assert last.usage.completion_tokens == 5, last
assert client.chat.completions.create(model=model, messages=question, max_tokens=2).usage.completion_tokens == 2
whole = client.completions.create(model=model, prompt=[5, 6, 7], max_tokens=3)
assert (whole.usage.prompt_tokens, whole.choices[0].text) == (3, " the time year"), whole
try:
    client.completions.create(model="other", prompt="x")
except NotFoundError as error:
    assert "does not exist" in str(error)
else:
    raise AssertionError("a model that is not served was served")
"""


@pytest.fixture
def twin(tmp_path: Path) -> Iterator[TwinServer]:
    """`capsim emulate` as a user starts it, with its flags shown."""
    PROFILE.save(tmp_path / "quick.yaml")
    command = [sys.executable, "-m", "capsim", "emulate", "--profile", str(tmp_path / "quick.yaml"), "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "VLLM_SERVER_DEV_MODE": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        try:
            yield TwinServer(server.stdout.readline().partition(" at ")[2].partition(";")[0])
        finally:
            server.send_signal(signal.SIGINT)
    assert server.returncode == 0


def check(level: Level) -> None:
    """All answers came whole, at the simulator's pace as far as this machine and that client allow."""
    assert len(level.completed) == len(level.requests) > 0
    assert set(level.requests["output_tokens"]) == {OUTPUT}
    simulated = simulate_level(level.workload, FLAGS, PROFILE.step_time, PROFILE.host_time)
    measured, predicted = (summarize(each).flat()["p50_tpot"] for each in (level, simulated))
    assert measured == pytest.approx(predicted, rel=0.25)


def test_the_openai_client_is_served(venv: Path, twin: TwinServer) -> None:
    subprocess.run([venv / "bin" / "python", "-c", ASK, twin.url], check=True)


def test_the_load_generator_of_vllm_measures_the_twin(venv: Path, twin: TwinServer, tmp_path: Path) -> None:
    command = [
        *(venv / "bin" / "vllm", "bench", "serve", "--backend", "openai", "--base-url", twin.url),
        *("--model", "quick-7b", "--tokenizer", model_folder(venv, "tiny") / "tokenizer"),
        *("--dataset-name", "random", "--random-input-len", INPUT, "--random-output-len", OUTPUT, "--ignore-eos"),
        *("--num-prompts", REQUESTS, "--max-concurrency", CLIENTS, "--disable-tqdm"),
        *("--save-result", "--save-detailed", "--result-dir", tmp_path, "--result-filename", "bench.json"),
    ]
    subprocess.run([str(part) for part in command], check=True, env=os.environ | QUIET)
    (level,) = import_files([tmp_path / "bench.json"]).levels
    check(level)
    assert len(level.requests) == REQUESTS
    assert twin.metric("request_success_total") >= REQUESTS


def test_aiperf_measures_the_twin(venv: Path, twin: TwinServer, tmp_path: Path) -> None:
    named = os.environ.get("CAPSIM_AIPERF_VENV")
    own = Path(named or REPOSITORY / ".aiperf").absolute()
    if not (own / "bin" / "aiperf").exists():
        missing = pytest.fail if named else pytest.skip
        missing(f"no AIPerf in {own}: install it there, or set CAPSIM_AIPERF_VENV")
    command = [
        *(own / "bin" / "aiperf", "profile", "--model", "quick-7b", "--url", twin.url, "--endpoint-type", "chat"),
        *("--streaming", "--tokenizer", model_folder(venv, "tiny") / "tokenizer", "--ui", "none"),
        *("--concurrency", CLIENTS, "--request-count", REQUESTS, "--isl", INPUT, "--isl-stddev", 0),
        *("--osl", OUTPUT, "--osl-stddev", 0, "--extra-inputs", "ignore_eos:true", "--artifact-dir", tmp_path / "out"),
    ]
    path = os.pathsep.join((str(own / "bin"), os.environ["PATH"]))
    subprocess.run([str(part) for part in command], check=True, env=os.environ | QUIET | {"PATH": path})
    (level,) = import_files([tmp_path / "out" / "profile_export.jsonl"]).levels
    check(level)
    metrics = json.loads((tmp_path / "out" / "server_metrics_export.json").read_text())["metrics"]
    assert "vllm:cache_config_info" in metrics


def test_a_calibration_finds_the_profile_of_the_twin(twin: TwinServer, tmp_path: Path) -> None:
    load = ("--concurrency", "1,4,8", "--hold-out", "4", "--input-len", "512", "--output-len", "64")
    command = [sys.executable, "-m", "capsim", "calibrate", "--endpoint", twin.url, *load, "--requests-per-client", "6"]
    subprocess.run([*command, "--no-repeat", "-o", str(tmp_path / "fit.yaml")], check=True, cwd=REPOSITORY)
    fit = Profile.load(tmp_path / "fit.yaml")
    assert fit.engine_flags == FLAGS
    found, true = fit.step_time, PROFILE.step_time
    assert found.constant == pytest.approx(true.constant, rel=0.05)
    assert found.per_prefill_token == pytest.approx(true.per_prefill_token, rel=0.05)
    assert found.per_sequence == pytest.approx(true.per_sequence, rel=0.5)
    assert found.per_kv_token == pytest.approx(true.per_kv_token, rel=0.5)
