"""The twin's tokenizer: exact counts, and a way back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.dialect import WORDS
from capsim.emulator import tokenizer


@given(st.text())
def test_a_text_comes_back_from_its_tokens(text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.count(text) == len(ids)
    assert all(0 <= number < tokenizer.VOCABULARY for number in ids)
    if text.isprintable():
        assert tokenizer.decode(ids) == text


@given(st.integers(0, 200), st.integers(0, 200))
def test_every_word_of_the_twin_is_one_token(start: int, length: int) -> None:
    text = tokenizer.speech(start, start + length)
    assert tokenizer.count(text) == length
    assert tokenizer.encode(tokenizer.speech(0, length)) == tokenizer.speech_ids(length)


def test_english_has_about_four_characters_a_token() -> None:
    for text in (" ".join(WORDS), __doc__, "The quick brown fox jumps over the lazy dog, and measures 1,024 requests."):
        assert 3 <= len(text) / tokenizer.count(text) <= 5


@given(st.lists(st.integers(0, tokenizer.VOCABULARY - 1)))
def test_any_token_of_the_vocabulary_has_a_text(ids: list[int]) -> None:
    assert isinstance(tokenizer.decode(ids), str)


@pytest.mark.parametrize("change", [0, 15, 16, 40])
def test_blocks_are_alike_up_to_the_first_token_that_differs(change: int) -> None:
    ids = list(range(47))  # two full blocks of 16, and a part of one
    other = [*ids[:change], 999, *ids[change + 1 :]]
    same = [
        one == two
        for one, two in zip(tokenizer.block_contents(ids, 16), tokenizer.block_contents(other, 16), strict=True)
    ]
    assert same == [change >= 16, change >= 32]


def test_the_next_turn_of_a_chat_begins_with_the_tokens_of_the_last_one() -> None:
    before = "<|user|>\nhello\n<|assistant|>\n"
    answer = tokenizer.speech(0, 40)
    after = f"{before}{answer}\n<|user|>\nand now?\n<|assistant|>\n"
    known = tokenizer.encode(before) + tokenizer.speech_ids(40)
    assert tokenizer.encode(after)[: len(known)] == known
