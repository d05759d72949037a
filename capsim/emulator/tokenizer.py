"""A tokenizer that needs no model: text is cut into pieces of a word, about four characters each, and back again.

A token is up to six bytes, and its id is those bytes read as a number behind a 1. So every count is exact, every id
says its text, and the same text has the same ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b

_WORD = rb"[A-Za-z0-9_\x80-\xff]"
# A piece of a word with the space before it, white space that precedes no word, or signs.
_TOKEN = re.compile(rb" ?%s{1,5}|\s{1,6}(?!%s)|\s|[^\sA-Za-z0-9_\x80-\xff]{1,3}" % (_WORD, _WORD))

LONGEST = 6  # bytes of a token
VOCABULARY = 2 * 256**LONGEST  # ids are below

# What the twin says, over and over. Each is one token with the space before it.
_SPEECH = b"the time year and way day man that life child world with part place case week point work fact month lot of"
WORDS = tuple(b" " + word for word in _SPEECH.split())


def count(text: str) -> int:
    """Number of tokens."""
    return len(_TOKEN.findall(_bytes(text)))


def encode(text: str) -> list[int]:
    """The ids of a text's tokens."""
    return [int.from_bytes(b"\x01" + piece) for piece in _TOKEN.findall(_bytes(text))]


def decode(ids: Iterable[int]) -> str:
    """The text of tokens; ids that `encode` never gives stand for their bytes. Each must be in the vocabulary."""
    return b"".join(piece(number) for number in ids).decode(errors="replace")


def piece(token: int) -> bytes:
    """The bytes of one token."""
    data = token.to_bytes(max(1, -(-token.bit_length() // 8)))
    return data[1:] if len(data) > 1 and data[0] == 1 else data


def speech(start: int, stop: int) -> str:
    """Tokens `start` to `stop` of any answer."""
    return b"".join(WORDS[index % len(WORDS)] for index in range(start, stop)).decode()


def speech_ids(length: int) -> list[int]:
    """The ids of the first tokens of any answer."""
    ids = [int.from_bytes(b"\x01" + word) for word in WORDS]
    return [ids[index % len(ids)] for index in range(length)]


def block_contents(ids: Sequence[int], block_size: int) -> list[bytes]:
    """What each full KV block holds: equal for two blocks iff all tokens up to their ends are equal."""
    contents, before = [], b""
    for start in range(0, len(ids) - block_size + 1, block_size):
        block = b"".join(number.to_bytes(8) for number in ids[start : start + block_size])
        before = blake2b(before + block, digest_size=16).digest()
        contents.append(before)
    return contents


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
