"""Bytes of a stream become tokens in time, however they are cut, counted or broken off."""

from __future__ import annotations

import json
from typing import Any

import pytest

from calibration.stream import Answer, StreamReader

END = b"data: [DONE]\n\n"


def event(tokens: int | None, text: str = " w", reason: str | None = None) -> bytes:
    content: dict[str, Any] = {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}
    if tokens is not None:
        content["usage"] = {"prompt_tokens": 64, "completion_tokens": tokens}
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n".encode()


def usage(tokens: int) -> bytes:
    return f'data: {{"choices":[],"usage":{{"prompt_tokens":64,"completion_tokens":{tokens}}}}}\n\n'.encode()


def read(*pieces: bytes) -> Answer:
    """The answer of pieces that arrive a second apart."""
    reader = StreamReader(Answer(0, 64, 3, 0.0))
    for second, piece in enumerate(pieces, start=1):
        reader.feed(float(second), piece)
    reader.end()
    return reader.answer


def test_every_event_is_as_many_tokens_as_the_server_counts() -> None:
    answer = read(event(1), event(3), event(4, reason="length"), usage(4), END)
    assert answer.arrivals == [(1.0, 1), (2.0, 3), (3.0, 4)]
    assert (answer.finish_reason, answer.counted_prompt, answer.counted_output) == ("length", 64, 4)
    assert answer.error == ""


def test_an_empty_event_is_a_token_only_if_the_count_says_so() -> None:
    assert read(event(0, text=""), event(1, text=""), event(2, reason="length"), END).arrivals == [(2.0, 1), (3.0, 2)]


def test_events_read_together_arrived_together() -> None:
    assert read(event(1), event(2) + event(3), event(4, reason="length") + usage(4) + END).arrivals == [
        (1.0, 1),
        (2.0, 3),
        (3.0, 4),
    ]


@pytest.mark.parametrize("size", [1, 7, 50, 10_000])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_where_the_bytes_are_cut_does_not_matter(size: int, newline: bytes) -> None:
    stream = (b": a comment\n\n" + event(1, text="é") + event(2) + event(3, reason="length") + usage(3) + END).replace(
        b"\n", newline
    )
    answer = read(*(stream[start : start + size] for start in range(0, len(stream), size)))
    assert (answer.tokens, answer.finish_reason, answer.counted_output, answer.error) == (3, "length", 3, "")


@pytest.mark.parametrize(
    "text",
    [
        '"completion_tokens":99',
        '\\"completion_tokens":99}',
        '"finish_reason":null,"completion_tokens":99',
        "\n\ndata: x",
        "\\",
    ],
)
def test_a_text_that_looks_like_a_count_is_not_taken_for_one(text: str) -> None:
    """The quick way of reading an event must agree with decoding it, whatever a model writes."""
    plain = read(event(None, text), event(None, reason="length"), usage(2), END)
    assert plain.arrivals == [(1.0, 1), (2.0, 2)]
    counted = read(event(5, text), event(6, text, reason="length"), END)
    assert counted.arrivals == [(1.0, 5), (2.0, 6)]


def test_spaces_in_the_json_change_nothing() -> None:
    spaced = b'data: {"choices": [{"text": "w", "finish_reason": null}], "usage": {"completion_tokens": 7}}\n\n'
    assert read(spaced, END).tokens == 7


def test_without_a_running_count_every_event_is_a_token() -> None:
    answer = read(event(None), event(None), event(None, reason="length"), END)
    assert (answer.arrivals, answer.counted_output) == ([(1.0, 1), (2.0, 2), (3.0, 3)], None)


def test_the_final_count_corrects_an_end_without_a_token() -> None:
    answer = read(event(None), event(None), event(None, text="", reason="length"), usage(2), END)
    assert answer.arrivals == [(1.0, 1), (2.0, 2)]
    answer = read(event(None), event(None) + event(None, text="", reason="length") + usage(2) + END)
    assert answer.arrivals == [(1.0, 1), (2.0, 2)]


def test_a_final_count_of_none_leaves_no_token() -> None:
    assert read(event(None, text="", reason="length"), usage(0), END).arrivals == []


def test_the_final_count_spreads_tokens_over_events_that_held_several() -> None:
    answer = read(event(None), event(None), event(None, reason="length"), usage(12), END)
    assert answer.arrivals == [(1.0, 4), (2.0, 8), (3.0, 12)]


def test_a_stream_that_stops_short_is_broken() -> None:
    assert read(event(1), event(2)).error == "stream broken"
    assert read().error == "stream broken"


def test_an_error_within_the_stream_is_the_servers() -> None:
    answer = read(event(1), b'data: {"error": {"message": "engine died", "code": 500}}\n\n', END)
    assert (answer.error, answer.detail) == ("server error", "engine died")
    assert read(b"data: oops\n\n", END).error == "not JSON"


def chat(delta: dict[str, Any], reason: str | None = None, tokens: int | None = None) -> bytes:
    content: dict[str, Any] = {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
    if tokens is not None:
        content["usage"] = {"prompt_tokens": 64, "completion_tokens": tokens}
    return f"data: {json.dumps(content)}\n\n".encode()


ROLE = {"role": "assistant", "content": ""}


def test_a_chat_streams_thoughts_words_and_calls_and_each_is_a_token() -> None:
    call = {"tool_calls": [{"function": {"arguments": "{"}}]}
    deltas: list[dict[str, Any]] = [{"reasoning_content": "hm"}, {"reasoning": "ah"}, {"content": " w"}, call]
    answer = read(chat(ROLE), *[chat(delta) for delta in deltas], chat({}, "length"), usage(4), END)
    assert answer.arrivals == [(2.0, 1), (3.0, 2), (4.0, 3), (5.0, 4)]
    assert (answer.finish_reason, answer.counted_output, answer.error) == ("length", 4, "")


def test_a_chats_first_event_names_the_role_and_is_no_token() -> None:
    assert read(chat(ROLE, tokens=0), chat({"content": "w"}, tokens=2), chat({}, "length", 2), END).arrivals == [
        (2.0, 2)
    ]
    together = read(chat({"role": "assistant", "content": "w"}), chat({"content": "w"}, "length"), END)
    assert together.arrivals == [(1.0, 1), (2.0, 2)]


def test_a_chats_token_without_letters_counts() -> None:
    """Half a character is a token whose text comes with the next one."""
    answer = read(chat(ROLE), chat({"content": ""}), chat({"content": "é"}), chat({}, "length"), usage(2), END)
    assert answer.arrivals == [(2.0, 1), (3.0, 2)]


def test_cached_tokens_of_the_prompt_are_kept() -> None:
    details = b'data: {"choices":[],"usage":{"prompt_tokens":64,"prompt_tokens_details":{"cached_tokens":48}}}\n\n'
    assert read(event(1, reason="length"), details, END).cached_prompt == 48


def test_the_fingerprint_is_kept() -> None:
    assert read(event(1, reason="length"), b'data: {"choices":[],"system_fingerprint":"vllm-tp2"}\n\n', END).fingerprint
