"""Lengths have the distribution they state, within their bounds."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from simulator.loads.lengths import Distribution, Histogram, Length, parse_length

MANY = 200_000


def drawn(length: Length) -> np.ndarray:
    return length.draw(np.random.default_rng(1), MANY)


@pytest.mark.parametrize(
    ("text", "mean", "std"),
    [
        ("normal(500,100,1-100000)", 500, 100),
        ("lognormal(500,300,1-100000)", 500, 300),
        ("exponential(200,1-100000)", 200.5, 200),  # values below half a token are drawn anew
        ("uniform", 300, 200 / math.sqrt(12)),
        ("histogram(100:1,300:1)", 200, 100),
    ],
)
def test_has_the_mean_and_deviation_that_were_asked_for(text: str, mean: float, std: float) -> None:
    length = Length(200, 400) if text == "uniform" else parse_length(text)
    tokens = drawn(length)
    assert tokens.mean() == pytest.approx(mean, rel=0.01)
    assert tokens.std() == pytest.approx(std, rel=0.02)
    assert length.mean == pytest.approx(mean, rel=2e-3)


def test_the_median_of_a_lognormal_length_lies_below_its_mean_as_theory_says() -> None:
    tokens = drawn(parse_length("lognormal(500,300,1-100000)"))
    assert np.median(tokens) == pytest.approx(500 / math.sqrt(1 + 0.6**2), rel=0.01)


@pytest.mark.parametrize("text", ["normal(500,400,100-700)", "lognormal(50,100,10-60)", "exponential(100,50-150)"])
def test_a_cut_distribution_keeps_its_form_within_the_bounds(text: str) -> None:
    length = parse_length(text)
    tokens = drawn(length)
    assert (tokens.min(), tokens.max()) == (length.low, length.high)
    assert tokens.mean() == pytest.approx(length.mean, rel=0.01)
    assert isinstance(length.shape, Distribution)
    edges = np.linspace(length.low - 0.5, length.high + 0.5, 11)
    expected = np.diff(length.shape.below(edges))
    found = np.histogram(tokens, np.rint(edges + 0.5) - 0.5)[0] / MANY
    assert found == pytest.approx(expected / expected.sum(), abs=0.02)  # nothing piles up at the bounds


def test_without_bounds_one_in_ten_thousand_is_cut() -> None:
    length = parse_length("exponential(100)")
    assert (length.low, length.high) == (1, math.ceil(100 * math.log(10_000)))


def test_a_histogram_gives_every_range_its_share() -> None:
    length = parse_length("histogram(1-100:3,1000-1001:1)")
    tokens = drawn(length)
    assert ((tokens <= 100).mean(), (tokens >= 1000).mean()) == (
        pytest.approx(0.75, abs=0.01),
        pytest.approx(0.25, abs=0.01),
    )
    assert set(np.unique(tokens)) == {*range(1, 101), 1000, 1001}


@pytest.mark.parametrize(
    "text", ["7", "7-9", "lognormal(500,300,10-4000)", "normal(5,2,1-9)", "exponential(5,1-40)", "histogram(1-5:2,9:1)"]
)
def test_a_length_is_written_as_it_is_read(text: str) -> None:
    assert str(parse_length(text)) == text
    assert parse_length(str(parse_length(text))) == parse_length(text)


def test_jitter_is_a_range_about_a_length() -> None:
    assert parse_length("500~0.1") == Length.jittered(500, 0.1) == Length(450, 550)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("zipf(2)", "known are normal, lognormal, exponential and histogram"),
        ("normal(5)", "normal is written normal(MEAN,STD)"),
        ("normal(5,x)", "'x' is no number"),
        ("normal(-5,1)", "must be positive"),
        ("normal(5,1,500-600)", "next to nothing between 500 and 600"),
        ("histogram(5-1:2)", "1 <= low <= high"),
        ("histogram(1-5:0)", "weights must be positive"),
        ("12 tokens", "no length"),
        ("500~1.5", "range ratio must be in"),
    ],
)
def test_a_fault_says_what_to_write(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_length(text)


def test_a_histogram_and_its_bounds_agree() -> None:
    with pytest.raises(ValueError, match="does not reach"):
        Length(1, 10, Histogram(((2, 5, 1.0),)))


@pytest.mark.parametrize(
    "text",
    [
        "10000001",
        "1-99999999999999999999",
        "9" * 5000,
        "512~nan",
        "99999999999999~0.1",
        "lognormal(5e-324,200)",
        "lognormal(500,1e308)",
        "normal(1e308,1)",
        "normal(nan,1)",
        "exponential(inf)",
        "exponential(1" + "0" * 400 + ")",
        "histogram(1-2:1e308,3:1e308)",
        "histogram(1:nan)",
        "\u0661\u0662",
        "\0",
        "(" * 10_000,
        "512" + "-1" * 50_000,
    ],
)
def test_lengths_beyond_all_bounds_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^(?!could not convert|Exceeds|invalid)"):
        parse_length(text)


@pytest.mark.parametrize("text", ["10000000", "lognormal(0.001,10000000)", "normal(9999999,0.001)", "exponential(0.1)"])
def test_at_their_bounds_lengths_can_be_drawn(text: str) -> None:
    length = parse_length(text)
    tokens = length.draw(np.random.default_rng(0), 1000)
    assert length.low <= tokens.min() <= tokens.max() <= length.high


def test_a_mean_between_far_bounds_is_exact() -> None:
    length = parse_length("lognormal(1000,500,1-3000000)")
    assert length.mean == pytest.approx(1000, rel=0.001)
