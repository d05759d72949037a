"""``capsim capacity``: a sentence for people, numbers for programs, one line for what goes wrong."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from capsim.cli import app

LOAD = ("--input-len", 256, "--output-len", 32)


def capacity(profile: Path, *arguments: object) -> Result:
    texts = ["capacity", "--profile", str(profile), *map(str, (*LOAD, *arguments))]
    return CliRunner().invoke(app, texts)


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


def test_a_rate_without_a_steady_state_has_no_percentiles(profile_file: Path) -> None:
    result = capacity(
        profile_file, "--slo", "error_rate:0", "--by", "rate", "--output-len", 2, "--num-prompts", 200, "--csv"
    )
    table = pd.read_csv(StringIO(result.output)).set_index("verdict")
    assert table.loc[["no steady state"], "p99_ttft"].isna().all()
    assert table.loc[["meets"], "p99_ttft"].notna().all()


def test_flags_change_the_answer(profile_file: Path) -> None:
    few, many = (
        json.loads(capacity(profile_file, "--slo", "p95_ttft:100", "--max-num-seqs", slots, "--json").output)
        for slots in (4, 16)
    )
    assert few["slos"][0]["level"] < many["slos"][0]["level"]
    assert few["slos"][0]["limits"]["name"] == "slots"


def test_where_more_clients_only_wait_it_says_so(profile_file: Path) -> None:
    output = " ".join(capacity(profile_file, "--slo", "p95_tpot:500").output.split())
    assert "every level below meets p95_tpot" in output
    assert "more clients only wait" in output


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
        (("--slo", "p95_ttft:100", "--json", "--csv"), 1, "either --json or --csv"),
    ],
)
def test_what_goes_wrong_is_one_line(profile_file: Path, arguments: tuple[object, ...], code: int, says: str) -> None:
    result = capacity(profile_file, *arguments)
    assert result.exit_code == code
    assert says in result.output
    assert len(result.output.strip().splitlines()) == 1
