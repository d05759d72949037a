"""A server that takes no token ids is measured through its chat, by its own count of tokens."""

from __future__ import annotations

import asyncio

import pytest
from fake_server import FakeServer, Manners, serve

from calibration.clients import Job, Recording, record
from calibration.endpoint import EndpointError, discover
from calibration.load import level_of
from calibration.stream import Patience
from simulator.loads.workload import ClosedLoop, Length, Shape, Workload
from simulator.results.run import Level

SHORT = Patience(connect=1.0, first_token=0.5, next_token=0.5, idle=0.3)
LOAD = Workload(ClosedLoop(2), (Shape(Length.fixed(64), Length.fixed(16)),), 6)


def measure(server: FakeServer, workload: Workload = LOAD) -> tuple[Recording, Level]:
    job = Job(discover(server.url), workload, 1, patience=SHORT)
    seen = asyncio.run(record(job, lambda _: None))
    return seen, level_of(job, seen)


@pytest.mark.parametrize(
    "manners",
    [
        Manners(has_completions=False),
        Manners(takes_token_ids=False),
        Manners(vocabulary=3),
        Manners(has_completions=False, thinks="reasoning_content"),
        Manners(has_completions=False, thinks="reasoning"),
        Manners(has_completions=False, knows_continuous_usage=False),
        Manners(has_completions=False, tokens_per_event=4),
    ],
)
def test_a_chat_is_measured_like_completions(manners: Manners) -> None:
    with serve(manners) as server:
        seen, level = measure(server)
        assert "messages" in server.requests[-1]
    assert seen.dialect.chat
    assert level.completed["output_tokens"].tolist() == [16] * 6
    assert level.completed["prompt_tokens"].tolist() == [64] * 6
    assert level.gaps["count"].sum() == 6 * (16 - manners.tokens_per_event)
    assert "prompts are text to a chat: 64 to 64 tokens, 64 on average, where 64 were asked for" in level.notes


def test_the_first_token_of_a_chat_is_no_empty_event() -> None:
    with serve(Manners(has_completions=False, token_seconds=0.02)) as server:
        _, level = measure(server)
    assert level.completed["ttft"].min() > 0.02


def test_words_are_as_many_tokens_as_the_server_says() -> None:
    """Three tokens a word and 5 of the template: 20 words make 65 tokens, the nearest to 64."""
    with serve(Manners(has_completions=False, tokens_per_word=3)) as server:
        seen, level = measure(server)
    assert (seen.dialect.tokens_per_word, seen.dialect.template_tokens) == (3, 5)
    assert level.completed["prompt_tokens"].tolist() == [65] * 6
    assert level.records is not None
    assert level.records["asked_prompt_tokens"].tolist() == [64] * 6


def test_a_chat_without_usage_is_measured_in_words() -> None:
    with serve(Manners(has_completions=False, knows_stream_options=False)) as server:
        seen, level = measure(server)
    assert (seen.dialect.usage, seen.dialect.tokens_per_word) == ("none", 1)
    assert level.completed["output_tokens"].tolist() == [16] * 6
    assert any("sends no usage" in note for note in level.notes)


def test_the_prompts_of_a_chat_are_new_every_time() -> None:
    with serve(Manners(has_completions=False)) as server:
        measure(server)
        texts = [request["messages"][0]["content"] for request in server.requests]
    assert len({text[:60] for text in texts}) == len(texts) == 9  # a trial, two yardsticks and six requests


def test_an_answer_that_stops_by_itself_has_ended_early() -> None:
    with serve(Manners(has_completions=False, forgotten_tokens=3)) as server:
        _, level = measure(server)
    assert set(level.requests["error"]) == {"ended early"}


def test_a_server_with_neither_is_refused() -> None:
    with (
        serve(Manners(has_completions=False, has_chat=False)) as server,
        pytest.raises(EndpointError, match="has neither /v1/completions nor /v1/chat/completions"),
    ):
        measure(server)
