"""Commands that measure a server: every load in one run, resumed where it stopped, and judged against a profile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from calibration.imports import import_files
from capsim.cli import app
from simulator.profile import Profile
from simulator.results.run_files import load_run

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "calibration"))

from fake_server import FakeServer, Manners, serve  # noqa: E402

SMALL = ("--input-len", "64", "--output-len", "16")

pytestmark = pytest.mark.slow


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def done(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    """3 ms a token, as many at once as wanted."""
    with serve(Manners(token_seconds=0.003, prefill_seconds=2e-6)) as running:
        yield running


@pytest.fixture(scope="module")
def calibration(server: FakeServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A profile of the server, its raw run beside it, and what calibrate printed."""
    folder = tmp_path_factory.mktemp("calibrated")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("calibration.sweep_plan.PROBE_LENGTHS", (64, 512))
        patch.setattr("calibration.next_level.NEGLIGIBLE", 100.0)  # no level is worth choosing: the test would be long
        budget = ("--time-budget", "1h", "--concurrency", "1,2,4")
        shown = done("calibrate", "--endpoint", server.url, "-o", folder / "p.yaml", *SMALL, *budget)
    return folder / "p.yaml", shown


@pytest.fixture
def calibrated(calibration: tuple[Path, str]) -> Path:
    return calibration[0]


# --- calibrate


def test_a_time_budget_ends_with_the_hold_out_and_a_repeat(calibrated: Path) -> None:
    levels = [level.workload for level in load_run(calibrated.with_name("p-run")).levels]
    start = ["C=1", "C=1", "C=16", "C=16", "C=1", "C=4"]
    assert [level.label for level in levels] == [*start, "C=2", "C=4"]
    assert levels[-1] == levels[5]


def test_the_profile_keeps_the_noise_and_shows_it_beside_the_errors(calibration: tuple[Path, str]) -> None:
    profile, shown = calibration
    noise = Profile.load(profile).noise
    assert {"output_throughput", "p50_ttft", "p99_e2el"} <= noise.keys()
    assert all(value >= 0 for value in noise.values())
    assert shown.count("noise") == 2, "below the errors of fitted levels, and of those kept out"
    assert "kept out" in shown


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--time-budget", "soon"), 2, "'soon' is not a time such as 5m or 300s"),
        (("--time-budget", "5m", "--request-rate", "1"), 1, "give --concurrency alone"),
        (("--time-budget", "5m", "--num-prompts", "9"), 1, "--time-budget chooses the requests itself"),
        (("--requests-per-client", "2", "--request-rate", "1"), 1, "--requests-per-client goes with --concurrency"),
        (("--requests-per-client", "2", "--num-prompts", "1"), 1, "and not with num_prompts"),
        (("--concurrency", "1", "--input-len", "9000"), 1, "exceed the server's max_model_len of 8192"),
    ],
)
def test_loads_that_make_no_sense(
    server: FakeServer, tmp_path: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    result = run("calibrate", "--endpoint", server.url, "-o", tmp_path / "p.yaml", *arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


# --- sweep


def test_clients_rates_and_mixed_lengths_go_into_one_run(server: FakeServer, tmp_path: Path) -> None:
    load = ("--concurrency", "1,3", "--request-rate", "40", "--burstiness", "2", "--shapes", "64/8:3,128/16")
    flags = ("--max-num-seqs", "8", "--no-async-scheduling", "--long-prefill-token-threshold", "256")
    command = ("sweep", "--endpoint", server.url, "--no-probes", *load, "--num-prompts", "12", *flags)
    done(*command, "-o", tmp_path / "run", "--export", tmp_path / "bench")
    ours = load_run(tmp_path / "run")
    assert [level.workload.label for level in ours.levels] == ["C=1", "C=3", "40/s"]
    assert {level.workload.lengths_label for level in ours.levels} == {"64/8:0.75 128/16:0.25"}
    assert {len(level.requests) for level in ours.levels} == {12}

    kept = ours.server
    assert (kept["max_num_seqs"], kept["async_scheduling"], kept["long_prefill_token_threshold"]) == (8, False, 256)
    assert "max_num_batched_tokens" not in kept, "what is assumed is no fact"

    files = sorted((tmp_path / "bench").iterdir())
    assert [file.name for file in files] == ["000-concurrency1.json", "001-concurrency3.json", "002-40qps.json"]
    theirs = import_files(files)
    assert theirs.levels[2].workload.request_rate == 40
    assert theirs.levels[1].requests["e2el"].tolist() == pytest.approx(ours.levels[1].requests["e2el"].tolist())
    before = len(server.requests)
    refused = run(*command, "-o", tmp_path / "other", "--export", tmp_path / "bench")
    assert refused.exit_code == 1
    assert "is not an empty folder" in refused.stderr
    assert len(server.requests) == before, "said before anything was measured"


def test_an_unknown_certificate_is_taken_when_asked(tmp_path: Path) -> None:
    certificate = str(ROOT / "tests" / "calibration" / "self_signed.pem")
    command = ("sweep", "-o", tmp_path / "run", "--concurrency", "1", "--num-prompts", "2", "--no-probes", *SMALL)
    with serve(Manners(certificate=certificate)) as server:
        refused = run(*command, "--endpoint", server.url)
        assert refused.exit_code == 1
        assert "--insecure takes any" in refused.stderr
        done(*command, "--endpoint", server.url, "--insecure")
    assert len(load_run(tmp_path / "run").levels[0].completed) == 2


def test_an_interrupt_tells_the_command_that_goes_on(server: FakeServer, tmp_path: Path) -> None:
    kept = tmp_path / "a run"
    load = ("--concurrency", "1,2", "--requests-per-client", "25", "--input-len", "64", "--output-len", "16")
    command = ["sweep", "--endpoint", server.url, "-o", str(kept), "--no-probes", *load]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "capsim", *command], env=environment, text=True, stderr=subprocess.PIPE
    )
    while not (kept / "levels" / "000" / "level.json").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    last = errors.splitlines()[-1]
    assert last.startswith(f"interrupted: 1 finished level is kept in {kept}; to go on: capsim sweep --endpoint")
    assert last.endswith("--resume")
    assert f"'{kept}'" in last, "a path with a space can be pasted"
    first = load_run(kept).levels[0]

    done(*command, "--resume")
    levels = load_run(kept).levels
    assert [level.workload.concurrency for level in levels] == [1, 2]
    assert levels[0].requests.equals(first.requests)
    other = run(*command[:-1], "15", "--resume")
    assert other.exit_code == 1
    assert "is of another sweep: its level 1 is C=1, 64/16 tokens" in other.stderr


# --- validate


def test_a_server_is_measured_and_validated_at_once(server: FakeServer, calibrated: Path, tmp_path: Path) -> None:
    load = ("--concurrency", "2", "--num-prompts", "12", *SMALL)
    command = ("validate", "--endpoint", server.url, "--profile", calibrated)
    content = json.loads(done(*command, *load, "-o", tmp_path / "run", "--json"))
    assert {row["level"] for row in content["metrics"]} == {"C=2"}
    assert all(row["noise"] is not None for row in content["metrics"] if row["metric"] == "p50_itl")
    assert len(load_run(tmp_path / "run").levels) == 1
    assert "give the load to measure" in run(*command).stderr


def test_a_profile_that_allows_for_the_change_holds(server: FakeServer, calibrated: Path, tmp_path: Path) -> None:
    profile = Profile.load(calibrated)
    noisy = profile.model_copy(update={"noise": dict.fromkeys(profile.noise, 100.0)})
    noisy.save(tmp_path / "noisy.yaml")
    load = ("--concurrency", "2", "--num-prompts", "8", *SMALL)
    result = run("validate", "--drift", "--endpoint", server.url, "--profile", tmp_path / "noisy.yaml", *load)
    assert result.exit_code == 0, result.output + result.stderr
    assert "Verdict: the profile still holds" in result.stdout


def test_a_slower_server_has_drifted(calibrated: Path) -> None:
    load = ("--concurrency", "2", "--num-prompts", "16", *SMALL, "--json")
    with serve(Manners(token_seconds=0.02, prefill_seconds=2e-6)) as slower:
        result = run("validate", "--drift", "--endpoint", slower.url, "--profile", calibrated, *load)
    content = json.loads(result.stdout)
    outside = {row["metric"] for row in content["figures"] if row["outside"]}
    assert {"p50_itl", "p50_tpot"} <= outside
    busy = any("client-bound" in note for note in content["notes"])
    assert (result.exit_code, content["state"]) == ((4, "unclear") if busy else (3, "drifted"))


def test_another_model_is_no_drift(calibrated: Path, tmp_path: Path) -> None:
    text = calibrated.read_text().replace("model: demo", "model: other")
    (tmp_path / "other.yaml").write_text(text)
    load = ("--concurrency", "1", "--num-prompts", "2", *SMALL)
    with serve() as server:
        result = run("validate", "--drift", "--endpoint", server.url, "--profile", tmp_path / "other.yaml", *load)
    assert result.exit_code == 1
    assert "the server serves demo, the profile is of other: calibrate anew" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give either what was measured or a server to measure"),
        (("somewhere", "--drift"), "goes with --endpoint"),
        (("--endpoint", "localhost:9", "--resume"), "give --output"),
    ],
)
def test_validate_says_what_goes_together(profile_file: Path, arguments: tuple[str, ...], words: str) -> None:
    result = run("validate", "--profile", profile_file, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_validate_takes_files_of_other_tools(server: FakeServer, calibrated: Path, tmp_path: Path) -> None:
    load = ("--concurrency", "2,3", "--requests-per-client", "4", "--range-ratio", "0.5", "--no-probes", *SMALL)
    done("sweep", "--endpoint", server.url, "-o", tmp_path / "run", *load, "--export", tmp_path / "bench.json")
    levels = load_run(tmp_path / "run").levels
    assert [len(level.requests) for level in levels] == [8, 12]
    assert 32 <= levels[1].requests["prompt_tokens"].min() < levels[1].requests["prompt_tokens"].max() <= 96

    command = ("validate", "--profile", calibrated)
    ours = json.loads(done(*command, tmp_path / "run", "--json"))["metrics"]
    theirs = json.loads(done(*command, tmp_path / "bench.json", "--json"))["metrics"]
    assert [row["metric"] for row in theirs] == [row["metric"] for row in ours]
    for mine, other in zip(ours, theirs, strict=True):
        if mine["metric"] in ("p50_ttft", "p50_e2el", "output_throughput"):
            assert other["measured"] == pytest.approx(mine["measured"], rel=0.02)


def test_validate_takes_stated_figures(calibrated: Path, tmp_path: Path) -> None:
    stated: dict[str, object] = {
        "date": "20260101-000000",
        "endpoint_type": "openai",
        "backend": "openai",
        "model_id": "demo",
    }
    stated |= {"num_prompts": 12, "request_rate": "inf", "burstiness": 1.0, "max_concurrency": 2, "duration": 0.4}
    stated |= {"completed": 12, "failed": 0, "total_input_tokens": 768, "total_output_tokens": 192}
    stated |= {"request_throughput": 30.0, "output_throughput": 480.0, "total_token_throughput": 2400.0}
    stated |= {
        "mean_ttft_ms": 10.0,
        "median_ttft_ms": 9.0,
        "p99_ttft_ms": 20.0,
        "mean_tpot_ms": 3.1,
        "p99_tpot_ms": 4.0,
    }
    (tmp_path / "plain.json").write_text(json.dumps(stated))
    rows = json.loads(done("validate", "--profile", calibrated, tmp_path / "plain.json", "--json"))["metrics"]
    measured = {row["metric"]: row["measured"] for row in rows}
    assert (measured["output_throughput"], measured["mean_tpot"]) == (480.0, pytest.approx(0.0031))
    assert {"p50_ttft", "p99_ttft"} <= measured.keys()
    shown = done("validate", "--profile", calibrated, tmp_path / "plain.json")
    assert max(len(line) for line in shown.splitlines()) <= 80
    assert "TPOT" in shown.split("Error of the prediction")[1], "by its mean, since no median is stated"

    done("import", tmp_path / "plain.json", "-o", tmp_path / "imported")
    again = json.loads(done("validate", "--profile", calibrated, tmp_path / "imported", "--json"))["metrics"]
    assert again == rows
