"""``capsim what-if``: servers side by side for people, numbers for programs, a figure, one line for what goes wrong."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from capsim.cli import app

LOAD = ("--input-len", 256, "--output-len", 32, "--num-prompts", 64)
FEW = ("--alt", "--max-num-seqs 4")
SHIPPED = Path("rtx4090-qwen2.5-7b")
LOG = """\
INFO 07-06 10:00:00 [utils.py:1] non-default args: {'model': 'Qwen/Qwen2.5-7B', 'max_num_seqs': 128}
INFO 07-06 10:00:00 [core.py:76] Initializing a V1 LLM engine (v0.27.1) with config: model='Qwen/Qwen2.5-7B', \
max_seq_len=32768, tensor_parallel_size=1, kv_cache_dtype=auto, enforce_eager=False
INFO 07-06 10:00:33 [kv_cache_utils.py:1] GPU KV cache size: 86,896 tokens
INFO 07-06 10:00:41 [gpu_worker.py:2] Free memory on device (23.13/23.52 GiB) on startup. Desired GPU memory \
utilization is (0.9, 21.17 GiB). Actual usage is 15.49 GiB for consumed memory (weights + non-torch), 1.04 GiB for \
peak activation, and 0.34 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with \
`--kv-cache-memory=4465688576` (4.16 GiB) to fit into requested memory, or `--kv-cache-memory=6569114112` (6.12 GiB) \
to fully utilize gpu memory. Current kv cache memory in use is 4.64 GiB.
"""


def what_if(profile: Path, *arguments: object) -> Result:
    texts = ["what-if", "--profile", str(profile), *map(str, (*LOAD, *arguments))]
    return CliRunner().invoke(app, texts)


def complaint(profile: Path, *arguments: object) -> str:
    result = what_if(profile, *arguments)
    assert result.exit_code in (1, 2)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.split())


def test_people_get_servers_side_by_side_and_the_reason(profile_file: Path) -> None:
    result = what_if(profile_file, *FEW, "--alt", "name=large --num-gpu-blocks-override 4000", "--concurrency", "16")
    assert result.exit_code == 0, result.output
    assert max(len(line) for line in result.output.splitlines()) <= 80
    output = " ".join(result.output.split())
    for part in (
        "What if: demo-7b on a GPU, vLLM 0.32.0",
        "A: --max-num-seqs 4",
        "Throughput, both gauges, and ceilings",
        "Difference to the baseline, with 90 % intervals",
        "Why A: a request takes",
        "more for waiting for a slot (--max-num-seqs)",
        "Why large: throughput and the time of a request",
        "Note on baseline, A, large: outside the measured range: concurrency 16",
        "Note on A: the KV pool stays as measured",
    ):
        assert part in output, part


def test_a_few_levels_without_asking(profile_file: Path) -> None:
    result = what_if(profile_file, *FEW, "--no-intervals")
    for load in ("C=8, ", "C=32, ", "C=128, "):
        assert load in result.output
    assert "interval" not in result.output


def test_programs_get_the_same_in_json(profile_file: Path) -> None:
    answer = json.loads(what_if(profile_file, *FEW, "--concurrency", "24,32", "--json").output)
    assert answer["baseline"]["engine_flags"]["max_num_seqs"] == 32
    (few,) = answer["alternatives"]
    assert (few["name"], few["engine_flags"]["max_num_seqs"]) == ("--max-num-seqs 4", 4)
    for level in answer["levels"]:
        (other,) = level["alternatives"]
        change = other["changes"]["output_throughput"]
        assert change["baseline"] == level["baseline"]["output_throughput"]
        assert change["value"] == other["output_throughput"]
        assert change["relative"] == pytest.approx(change["value"] / change["baseline"] - 1)
        assert change["low"] < change["relative"] < change["high"] < 0
        assert change["is_clear"]
        assert other["limits"]["name"] == "slots"
        assert other["ceilings"]["slots"] == 4
        low, high = other["intervals_90"]["p50_ttft"]
        assert low < other["p50_ttft"] < high


def test_csv_has_a_row_for_each_level_alternative_and_figure(profile_file: Path) -> None:
    result = what_if(profile_file, *FEW, "--alt", "--block-size 32", "--concurrency", "4,8", "--csv")
    table = pd.read_csv(StringIO(result.output))
    assert len(table) == 2 * 2 * table["metric"].nunique()
    same = table[(table["alternative"] == "--max-num-seqs 4") & (table["level"] == "C=4")]
    assert (same["relative"] == 0).all()  # four clients fit into four slots
    assert not same["is_clear"].any()


def test_alternatives_come_from_a_file_too(profile_file: Path, tmp_path: Path) -> None:
    lines = tmp_path / "alternatives.txt"
    lines.write_text(
        "# mine\nname=few --max-num-seqs 4\n\n$ vllm serve demo-7b \\\n    --max-num-seqs 16 --port 8000\n"
    )
    arguments = ("--alt-file", lines, "--concurrency", 4, "--json", "--no-intervals")
    answer = json.loads(what_if(profile_file, *arguments).output)
    assert [server["name"] for server in answer["alternatives"]] == ["few", "--max-num-seqs 16"]
    assert "without effect on the result: --port" in answer["alternatives"][1]["notes"]


def test_the_baseline_may_be_another_start_of_the_server(profile_file: Path) -> None:
    arguments = ("--baseline", "--max-num-seqs 4", "--alt", "--max-num-seqs 8", "--concurrency", 8, "--json")
    answer = json.loads(what_if(profile_file, *arguments).output)
    assert answer["baseline"]["name"] == "--max-num-seqs 4"
    assert answer["levels"][0]["alternatives"][0]["changes"]["output_throughput"]["low"] > 0


def test_another_gpu_and_its_assumptions() -> None:
    result = what_if(SHIPPED, "--alt", "--gpu A100-SXM4-80GB", "--concurrency", 8, "--json", "--no-intervals")
    (moved,) = json.loads(result.output)["alternatives"]
    assert moved["gpu"] == "A100 80GB SXM"
    assert any("the step time on A100 80GB SXM" in sentence for sentence in moved["assumed"])


def test_the_servers_log_tells_what_its_card_holds(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(LOG)

    def pool(*flags: str) -> Result:
        alternatives = [part for text in flags for part in ("--alt", text)]
        arguments = ("--server-log", log, "--concurrency", 4, "--num-prompts", 8, "--no-intervals", "--json")
        return what_if(SHIPPED, *alternatives, *arguments)

    answer = json.loads(pool("--kv-cache-memory=6569114112", "--gpu-memory-utilization 0.95").output)
    suggested, more = answer["alternatives"]
    assert suggested["kv_tokens"] == 114_544
    assert more["kv_tokens"] - 86_896 == pytest.approx(0.05 * 23.52 * 2**30 / 57_344, abs=200)
    assert len(more["assumed"]) == 1
    assert more["assumed"][0].endswith("tokens, 86,896 as measured, is computed from the server's log")
    refused = pool("--kv-cache-memory 8GiB")
    assert refused.exit_code == 1
    assert "leaves the GPU 1.74 GiB short; at most 6569114112 fit" in " ".join(refused.stderr.split())
    log.write_text(LOG.replace("86,896", "96,896"))
    assert "tells of a KV pool of 96,896 tokens and the profile of 86,896" in " ".join(
        pool("--max-num-seqs 8").stderr.split()
    )


@pytest.mark.slow
def test_predict_and_capacity_start_the_server_as_what_if_does() -> None:
    """A larger step takes memory from the pool, whoever asks."""
    flags = ("--max-num-batched-tokens", "8192", "--json")
    load = ("--concurrency", "4", "--num-prompts", "20", "--no-intervals")
    run = CliRunner().invoke(app, ["predict", "--profile", str(SHIPPED), *load, *flags])
    found = CliRunner().invoke(app, ["capacity", "--profile", str(SHIPPED), "--slo", "p99_itl:17", *flags])
    compared = what_if(SHIPPED, "--alt", " ".join(flags[:2]), *load, "--json")
    pool = json.loads(compared.stdout)["alternatives"][0]["kv_tokens"]
    assert pool < 86_896
    assert json.loads(found.stdout)["ceilings"]["kv_tokens"] == pool - 16  # but for the block that vLLM keeps
    for result in (run, found):
        assert f"assumed: the KV pool of {pool:,} tokens, 86,896 as measured" in " ".join(result.stderr.split())
    printed = CliRunner().invoke(app, ["predict", "--profile", str(SHIPPED), *load, *flags[:2]]).stdout
    assert f"KV pool {pool:,} tokens" in " ".join(printed.split())


def test_two_cards_predict_faster_steps() -> None:
    words = ["predict", "--profile", str(SHIPPED), "--concurrency", "4", "--num-prompts", "20", "--no-intervals"]
    alone, split = (
        json.loads(CliRunner().invoke(app, [*words, "--json", *more]).stdout)["levels"][0]
        for more in ([], ["--tensor-parallel-size", "2"])
    )
    assert 0.5 * alone["p50_tpot"] < split["p50_tpot"] < alone["p50_tpot"]


def test_predict_moves_to_another_gpu_as_well() -> None:
    arguments = ["--concurrency", "8", "--num-prompts", "40", "--no-intervals", "--csv"]
    here, there = (
        pd.read_csv(
            StringIO(CliRunner().invoke(app, ["predict", "--profile", "rtx4090-qwen2.5-7b", *arguments, *gpu]).stdout)
        )
        for gpu in ([], ["--gpu", "H100-SXM", "--max-num-seqs", "64"])
    )
    assert there["output_throughput"][0] > 1.5 * here["output_throughput"][0]


@pytest.mark.slow
def test_a_figure_is_drawn_and_the_same_each_time(profile_file: Path, tmp_path: Path) -> None:
    drawn = []
    for name in ("a.svg", "b.svg", "bars.png"):
        levels = "8" if name.endswith("png") else "4,8"
        result = what_if(profile_file, *FEW, "--concurrency", levels, "--figure", tmp_path / name)
        assert f"drawn in {tmp_path / name}" in result.output.replace("\n", "")
        drawn.append((tmp_path / name).read_bytes())
    assert drawn[0] == drawn[1]
    assert drawn[0].startswith(b"<?xml")
    assert b"A: --max-num-seqs 4" in drawn[0]  # text stays text
    assert drawn[2].startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "give at least one, such as --alt '--max-num-seqs 256'"),
        (
            ("--alt", "--max-num-seqz 4"),
            "error: --alt: vLLM has no flag --max-num-seqz; did you mean '--max-num-se",
        ),
        (("--alt", "--enable-lora --max-num-seqs 4"), "--alt --max-num-seqs 4: --enable-lora would change the result"),
        (("--alt", "--gpu-memory-utilization 0.95"), "needs the GPU's memory; name the GPU, or give the server's log"),
        (("--alt", "--max-model-len 128"), "--max-model-len 128: "),
        ((*FEW, "--json", "--csv"), "give either --json or --csv"),
        ((*FEW, "--figure", "x.txt"), "must end in .png, .svg or .pdf"),
        (("--alt-file", "nowhere.txt"), "nowhere.txt: No such file or directory"),
        ((*FEW, "--gpu-memory", "1"), "No such option"),
    ],
)
def test_what_goes_wrong_is_told_in_one_line(profile_file: Path, arguments: tuple[object, ...], told: str) -> None:
    message = " ".join(complaint(profile_file, *arguments).replace("│", " ").split())
    assert told in message


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\0" * (2 << 20), "larger than 1 MiB; such a file is not read"),
        (b"\xff\xfe-\0-\0", "begins neither flags nor a line"),
        (b"--max-num-seqs 9" + b"9" * 5000, "has more than 18 digits"),
        (b"\n" * 1000, "has none"),
    ],
)
def test_a_file_of_no_alternatives_is_told(profile_file: Path, tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "lines"
    path.write_bytes(content)
    message = " ".join(complaint(profile_file, "--alt-file", path).replace("│", " ").split())
    assert told in message
    assert len(message) < 800
