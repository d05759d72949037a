"""``capsim capacity``: a sentence for people, numbers for programs, one line for what goes wrong."""

from __future__ import annotations

import json
import re
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from capsim.cli import app
from simulator.profile import Coefficient, Profile

LOAD = ("--input-len", 256, "--output-len", 32)
SHIPPED = Path("rtx4090-qwen2.5-7b")


def capacity(profile: Path, *arguments: object) -> Result:
    texts = ["capacity", "--profile", str(profile), *map(str, (*LOAD, *arguments))]
    return CliRunner().invoke(app, texts)


def flat(result: Result) -> str:
    return " ".join(result.output.split())


def test_people_get_a_verdict_a_reason_and_a_level_to_run_at(profile_file: Path) -> None:
    result = capacity(profile_file, "--slo", "p95_ttft:400", "--slo", "p95_tpot:20,error_rate:0")
    assert result.exit_code == 0, result.output
    assert max(len(line) for line in result.output.splitlines()) <= 80
    parts = ("meets p95_ttft <= 400 ms", "Why: at C=", "Recommended: C=", "Levels tried", "Ceilings: --max-num-seqs")
    for part in parts:
        assert part in " ".join(result.output.split())
    assert "outside the measured range" in result.output


def test_programs_get_the_same_in_json(profile_file: Path) -> None:
    answer = json.loads(capacity(profile_file, "--slo", "p95_tpot:12", "--also-slo", "p95_tpot:10.5", "--json").output)
    strict, loose = answer["slos"][1], answer["slos"][0]
    assert strict["level"] < loose["level"]
    assert loose["fallback"] <= 0.9 * loose["level"]
    assert loose["at_level"]["p95_tpot"] <= 0.012 < loose["beyond"]["p95_tpot"]
    assert set(loose["at_level"]["intervals_90"]["p95_tpot"]) == {loose["at_level"]["p95_tpot"]}  # nothing is random
    assert sum(loose["limits"]["shares"].values()) == pytest.approx(1)
    assert answer["ceilings"]["slots"] == 32
    assert answer["knee"] >= 1


def test_csv_has_a_row_for_every_level_tried(profile_file: Path) -> None:
    table = pd.read_csv(StringIO(capacity(profile_file, "--slo", "p95_tpot:11", "--csv").output))
    assert list(table["value"]) == sorted(table["value"])
    assert set(table["verdict"]) == {"meets", "misses"}
    assert table.loc[table["verdict"] == "meets", "p95_tpot"].max() <= 0.011


@pytest.mark.slow
def test_a_rate_without_a_steady_state_has_no_percentiles(profile_file: Path) -> None:
    result = capacity(
        profile_file, "--slo", "error_rate:0", "--by", "rate", "--output-len", 2, "--num-prompts", 200, "--csv"
    )
    table = pd.read_csv(StringIO(result.output)).set_index("verdict")
    assert table.loc[["no steady state"], "p99_ttft"].isna().all()
    assert table.loc[["meets"], "p99_ttft"].notna().all()


@pytest.mark.slow
def test_flags_change_the_answer(profile_file: Path) -> None:
    few, many = (
        json.loads(capacity(profile_file, "--slo", "p95_ttft:100", "--max-num-seqs", slots, "--json").stdout)
        for slots in (4, 16)
    )
    assert few["slos"][0]["level"] < many["slos"][0]["level"]
    assert few["slos"][0]["limits"]["name"] == "slots"


def test_where_more_clients_only_wait_it_says_so(profile_file: Path) -> None:
    output = " ".join(capacity(profile_file, "--slo", "p95_tpot:500").output.split())
    assert "every level below meets p95_tpot" in output
    assert "more clients only wait" in output


@pytest.mark.slow
def test_what_is_counted_is_said_and_so_is_what_counts_the_start(profile_file: Path) -> None:
    steady, whole = (capacity(profile_file, "--slo", "p99_ttft:200", *more) for more in ((), ("--whole-runs",)))
    assert "without the start burst and the end of a run; capsim capacity --whole-runs counts" in flat(steady)
    assert "Counted with the start burst and the end" in flat(whole)


@pytest.mark.slow
def test_draws_of_the_coefficients_say_how_sure_a_level_is() -> None:
    """The highest level of all is on the edge; the level to run at is not."""
    words = ("--slo", "p99_itl:100", "--input-len", 1024, "--output-len", 256)
    told = re.search(r"C=8 meets it in (\d+) of 8 draws, C=4 in 8 of 8", flat(capacity(SHIPPED, *words)))
    assert told is not None
    assert 0 < int(told[1]) < 8


def test_a_profile_that_states_no_uncertainty_tells_of_none(profile_file: Path) -> None:
    sure = Profile.load(profile_file)
    terms = {name: Coefficient(value=term.value) for name, term in sure.coefficients.step_time.items()}
    coefficients = sure.coefficients.model_copy(update={"step_time": terms, "host_time": {}})
    sure.model_copy(update={"coefficients": coefficients}).save(profile_file)
    assert "How sure" not in capacity(profile_file, "--slo", "p95_tpot:11").output


@pytest.mark.slow
def test_more_clients_fit_where_they_think(profile_file: Path) -> None:
    words = ("--slo", "p50_ttft:150", "--max-num-seqs", 2, "--whole-runs", "--num-prompts", 60, "--json")
    busy, calm = (
        json.loads(capacity(profile_file, *words, *think).stdout)["slos"][0]["level"]
        for think in ((), ("--think-time", "exponential(2s)"))
    )
    assert calm > 2 * busy


def test_another_card_and_chats(profile_file: Path) -> None:
    short = ("--whole-runs", "--num-prompts", "30")
    few = ("--slo", "p50_itl:15", "--max-num-seqs", 2, *short)
    assert "No level meets" in flat(capacity(SHIPPED, *few))
    assert "C=4 and every level below meets" in flat(capacity(SHIPPED, *few, "--gpu", "H100-SXM"))
    chats = ("--sessions", "turns=3,user=64,output=16,system=128", "--enable-prefix-caching")
    texts = ["capacity", "--profile", str(profile_file), "--slo", "p95_ttft:100", "--max-num-seqs", "4", *short, *chats]
    result = CliRunner().invoke(app, texts)
    assert result.exit_code == 0, result.output
    assert "3x(128+64/16) tokens" in result.output


def test_an_slo_that_nothing_meets(profile_file: Path) -> None:
    result = capacity(profile_file, "--slo", "p95_tpot:1")
    assert result.exit_code == 0
    assert "even C=1 misses p95_tpot" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--slo", "p95_tttf:10"), 1, "did you mean 'p95_ttft'"),
        (("--slo", "p95_ttft:10", "--slo", "p95_ttft:20"), 1, "give it once"),
        ((), 2, "--slo"),
        (("--slo", "p95_ttft:100", "--input-len", 9000), 1, "does not fit --max-model-len"),
        (("--slo", "p95_ttft:100", "--by", "rate", "--think-time", "2s"), 2, "--think-time: goes with --by clients"),
        (("--slo", "p95_ttft:100", "--json", "--csv"), 1, "either --json or --csv"),
    ],
)
def test_what_goes_wrong_is_one_line(profile_file: Path, arguments: tuple[object, ...], code: int, says: str) -> None:
    result = capacity(profile_file, *arguments)
    assert result.exit_code == code
    assert says in result.output
    assert len(result.output.strip().splitlines()) == 1
