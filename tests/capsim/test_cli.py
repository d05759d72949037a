"""The command line: tables for people, numbers for programs, one line and an exit code for whatever goes wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

import capsim
from capsim.cli import app
from simulator.results.run_files import load_run

COMMANDS = ("simulate", "predict", "validate", "sweep", "calibrate")
ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def predict(profile_file: Path, *arguments: object) -> Result:
    return run("predict", "--profile", profile_file, "--num-prompts", 20, *arguments)


def process(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "capsim", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.fixture
def scenario_file(profile_file: Path) -> Path:
    path = profile_file.with_name("scenario.yaml")
    path.write_text(
        "name: test\nprofile: demo.yaml\nload:\n  concurrency: [1, 8]\n  input_len: 512\n  output_len: 32\n"
        "  num_prompts: 20\nslo:\n  p99_ttft: 100\n"
    )
    return path


# --- what people see


def test_the_installed_command_shows_its_help_within_80_columns() -> None:
    output, errors = process("--help").communicate()
    assert errors == ""
    assert all(command in output for command in COMMANDS)
    assert max(len(line) for line in output.splitlines()) <= 80


def test_help_loads_nothing_heavy() -> None:
    heavy = ("numpy", "pandas", "scipy", "pydantic", "aiohttp", "simpy", "lmfit", "matplotlib")
    code = f"import sys, capsim.cli; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "[]\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "…" not in result.output  # no option's name is cut
    assert "--kv-cache-memory-bytes" in result.output


def test_a_scenario_is_answered_in_80_columns_of_plain_text(scenario_file: Path) -> None:
    running = process("simulate", str(scenario_file))
    output, errors = running.communicate()
    assert (running.returncode, errors) == (0, "")
    assert max(len(line) for line in output.splitlines()) <= 80
    assert "\x1b" not in output
    assert "…" not in output
    assert "demo-7b on a GPU, vLLM 0.32.0" in output
    assert "SLO p99_ttft <= 100 ms: met up to C=1; C=8 misses p99_ttft" in output


def test_the_shipped_scenario_answers() -> None:
    result = run("simulate", "rtx4090-qwen2.5-7b")
    assert result.exit_code == 0
    assert all(f"C={clients}" in result.output for clients in (1, 2, 4, 8, 16, 32, 64))


def test_levels_outside_the_measured_range_are_marked(profile_file: Path) -> None:
    result = predict(profile_file, "--concurrency", "8,16")
    assert "C=16*" in result.output
    assert "C=8*" not in result.output
    assert "C=16: concurrency 16, measured 1 to 8" in result.output


def test_wide_numbers_and_mixed_lengths_are_not_cut(profile_file: Path) -> None:
    result = predict(profile_file, "--request-rate", "500", "--shapes", "4096/512,1024-2048/16-32:0.25")
    assert result.exit_code == 0, result.output
    assert "…" not in result.output
    assert max(len(line) for line in result.output.splitlines()) <= 80


def test_version() -> None:
    assert run("--version").output == f"capsim {capsim.__version__}\n"


# --- what programs read


def test_json_holds_every_number(profile_file: Path) -> None:
    result = predict(profile_file, "--concurrency", "1,16", "--json", "--slo", "p50_itl:5")
    content = json.loads(result.output)
    assert [level["workload"]["arrivals"]["concurrency"] for level in content["levels"]] == [1, 16]
    assert content["levels"][0]["p50_itl"] == pytest.approx(0.01, rel=0.01)  # seconds
    assert content["levels"][0]["missed_targets"] == ["p50_itl"]
    outside, widened = content["levels"][1]["notes"]
    assert outside == "concurrency 16, measured 1 to 8"
    assert "2.0 times" in widened
    low, high = content["levels"][1]["intervals_90"]["p99_ttft"]
    assert low < content["levels"][1]["p99_ttft"] < high
    assert content["server"]["profile"] == "demo"


def test_csv_is_one_row_a_level(profile_file: Path) -> None:
    table = pd.read_csv(StringIO(predict(profile_file, "--concurrency", "1,4", "--csv").output))
    assert list(table["level"]) == ["C=1", "C=4"]
    assert {"output_throughput", "mean_active_tokens", "p99_ttft"} <= set(table.columns)


def test_the_same_command_prints_the_same(profile_file: Path) -> None:
    command = ("--request-rate", "5", "--range-ratio", "0.3", "--json")
    assert predict(profile_file, *command).output == predict(profile_file, *command).output
    assert predict(profile_file, *command).output != predict(profile_file, *command, "--seed", 1).output


def test_a_run_is_saved_and_not_overwritten_by_accident(profile_file: Path, tmp_path: Path) -> None:
    saved = tmp_path / "run"
    assert predict(profile_file, "--concurrency", "1", "--save", saved).exit_code == 0
    assert len(load_run(saved).levels) == 1
    refused = predict(profile_file, "--concurrency", "1,2", "--save", saved)
    assert refused.exit_code == 1
    assert "is not empty" in refused.stderr
    assert predict(profile_file, "--concurrency", "1,2", "--save", saved, "--overwrite").exit_code == 0
    assert len(load_run(saved).levels) == 2


# --- engine flags


def server(result: Result) -> dict[str, object]:
    assert result.exit_code == 0, result.output
    content: dict[str, object] = json.loads(result.stdout)["server"]
    return content


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--max-num-seqs", "4"), {"max_num_seqs": 4}),
        (("--max_num_seqs=4",), {"max_num_seqs": 4}),
        (("--max-num-batched-tokens", "4k"), {"max_num_batched_tokens": 4000}),
        (("--kv-cache-memory", "1G"), {"num_gpu_blocks": 1024}),
        (("--kv-cache-memory-bytes=1073741824",), {"num_gpu_blocks": 1024}),
        (("--num-gpu-blocks-override", "600"), {"num_gpu_blocks": 600}),
        (("--block-size", "32"), {"block_size": 32, "num_gpu_blocks": 500}),
        (("--no-async-scheduling",), {"async_scheduling": False}),
        (("--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192"), {"enable_chunked_prefill": False}),
        (("--long-prefill-token-threshold", "256"), {"long_prefill_token_threshold": 256}),
        (("--scheduling-policy", "priority"), {"scheduling_policy": "priority"}),
        (("--max-model-len", "4096"), {"max_model_len": 4096}),
    ],
)
def test_flags_have_the_names_of_vllm(
    profile_file: Path, arguments: tuple[str, ...], expected: dict[str, object]
) -> None:
    answered = server(predict(profile_file, "--concurrency", "1", "--json", *arguments))
    assert {name: answered[name] for name in expected} == expected


def test_flags_on_the_command_line_win_over_the_scenario(scenario_file: Path) -> None:
    scenario_file.write_text(scenario_file.read_text() + "engine_flags:\n  num-gpu-blocks: 700\n  max-num-seqs: 9\n")
    answered = server(run("simulate", scenario_file, "--kv-cache-memory", "1GiB", "--json"))
    assert (answered["num_gpu_blocks"], answered["max_num_seqs"]) == (1024, 9)


def test_options_have_the_names_of_other_load_generators(profile_file: Path) -> None:
    ours = ("--concurrency", "2", "--input-len", "100", "--output-len", "20", "--json")
    theirs = ("--max-concurrency", "2", "--isl", "100", "--random-output-len", "20", "--json")
    assert predict(profile_file, *ours).output == predict(profile_file, *theirs).output


# --- what goes wrong


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("simulate nothing", 1, "nothing: no such scenario; shipped are"),
        ("predict --profile nothing", 1, "nothing: no such profile; shipped are"),
        ("predict", 2, "Missing option '--profile'"),
        ("forecast", 2, "No such command 'forecast'"),
        ("--bogus", 2, "No such option: --bogus"),
        ("predict --profile P --max-num-seq 4", 2, "--max-num-seqs"),
        ("predict --profile P --max-num-seqs many", 1, "--max-num-seqs: 'many' is not a size"),
        ("predict --profile P --max-num-seqs 4096", 1, "--max-num-batched-tokens (2048) must not be smaller"),
        ("predict --profile P --scheduling-policy lifo", 1, "--scheduling-policy: must be fcfs or priority"),
        ("predict --profile P --async-scheduling --no-async-scheduling", 2, "given together with its opposite"),
        ("predict --profile P --no-enable-chunked-prefill", 1, "without chunked prefill"),
        ("predict --profile P --concurrency 1,two", 2, "'1,two' is not a list of whole numbers"),
        ("predict --profile P --concurrency 0", 1, "concurrency must be at least 1, got 0"),
        ("predict --profile P --concurrency 1 --request-rate 1", 1, "either --concurrency or --request-rate"),
        ("predict --profile P --request-rate nan", 1, "request rate must be positive"),
        ("predict --profile P --input-len 0", 2, "a length must have 1 <= low <= high"),
        ("predict --profile P --input-len 9000", 1, "a prompt of 9000 tokens does not fit --max-model-len 8192"),
        ("predict --profile P --num-gpu-blocks-override 20", 1, "does not fit into the KV pool of 20 blocks"),
        ("predict --profile P --shapes 512", 2, "'512' is not a shape"),
        ("predict --profile P --shapes 512/1 --input-len 3", 2, "give either --shapes, or --input-len"),
        ("predict --profile P --slo p99_tft:3", 1, "did you mean 'p99_ttft'?"),
        ("predict --profile P --json --csv", 1, "give either --json or --csv"),
        ("predict --profile /", 1, "/: no such profile"),
        ("validate --profile P nowhere", 1, "nowhere: no such file"),
        ("sweep --endpoint http://localhost:9 -o out", 1, "nothing listens at http://localhost:9"),
        ("sweep --endpoint /v1/completions -o out", 1, "'/v1/completions' is a path"),
        ("sweep --endpoint localhost:9 --api-key-file nowhere -o out", 1, "nowhere: No such file or directory"),
        ("calibrate --target localhost:9 -o nowhere/out.yaml", 2, "nowhere/out.yaml cannot be written"),
        ("calibrate --url localhost:9 -o out.yaml --concurrency 1,2 --hold-out 3", 2, "3 is not among --concurrency"),
        ("calibrate --base-url localhost:9 -o out.yaml --max-num-seqs x", 1, "nothing listens"),
    ],
)
def test_a_mistake_ends_in_one_line(
    profile_file: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, code: int, words: str
) -> None:
    monkeypatch.chdir(profile_file.parent)
    result = run(*[str(profile_file) if word == "P" else word for word in arguments.split()])
    assert result.exit_code == code
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr


def test_a_faulty_file_is_told_with_its_line(profile_file: Path, scenario_file: Path) -> None:
    scenario_file.write_text(scenario_file.read_text().replace("num_prompts", "num_prompt"))
    assert f"error: {scenario_file}, line 7: unknown key load.num_prompt" in run("simulate", scenario_file).stderr
    profile_file.write_text(profile_file.read_text().replace("value: 0.01,", "value: 10 ms,"))
    assert "line 15: coefficients.step_time.constant.value must be a number" in predict(profile_file).stderr


def test_a_bug_keeps_its_traceback(profile_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("capsim.progress.predict_with_progress", fail)
    result = predict(profile_file, "--concurrency", "1")
    assert isinstance(result.exception, ZeroDivisionError)


# --- against a server


@pytest.fixture
def demo_server() -> Iterator[str]:
    """The fake server of tests/calibration, 3 ms a token."""
    sys.path.insert(0, str(ROOT / "tests" / "calibration"))
    from fake_server import Manners, serve

    with serve(Manners(token_seconds=0.003, prefill_seconds=2e-6)) as running:
        yield running.url
    sys.path.pop(0)


SMALL = ("--input-len", "64", "--output-len", "16", "--num-prompts", "8")


@pytest.mark.slow
def test_calibrates_sweeps_and_validates(demo_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("calibration.sweep_plan.PROBE_LENGTHS", (64, 1024))
    profile, measured = tmp_path / "fitted.yaml", tmp_path / "measured"
    result = run("calibrate", "--endpoint", demo_server, "-o", profile, "--concurrency", "1,2,4", *SMALL)
    assert result.exit_code == 0, result.stderr
    fitted = capsim.Profile.load(profile)
    assert fitted.name == "fitted"
    assert "C=2, 64/16 tokens, 8 requests" in [level.level for level in fitted.hold_out]
    assert any(sentence.startswith("max_num_seqs = 256") for sentence in fitted.assumed)
    assert len(load_run(tmp_path / "fitted-run").levels) >= 3
    assert "kept out" in result.output

    flags = ("--max-num-seqs", "8")
    result = run("sweep", "--endpoint", demo_server, "-o", measured, "--concurrency", "2,2", *SMALL, *flags)
    assert result.exit_code == 0, result.stderr
    assert load_run(measured).server["max_num_seqs"] == 8

    result = run("validate", "--profile", profile, measured)
    assert result.exit_code == 0, result.stderr
    assert "max_num_seqs 8 (not 256)" in result.output.replace("\n", " ")
    assert "p99 ITL, ms" in result.output
    metrics = json.loads(run("validate", "--profile", profile, measured, "--json").output)["metrics"]
    repeated = [row for row in metrics if row["workload"].startswith("C=2, 64/16") and row["metric"] == "p50_itl"]
    assert len(repeated) == 2
    assert all(row["noise"] is not None for row in repeated)
