"""Inputs that are wrong in the ways files are wrong: broken by hand, by a disk, by another version, or on purpose.

Everything is drawn from one `random.Random`, so that the number of an input makes it again.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import yaml

MOST_BYTES = 200_000  # of a mutated input, so that doubling does not run away

# values that readers of numbers, names and texts trip over
WORDS: tuple[bytes, ...] = (
    *b"NaN nan .nan inf -inf .inf Infinity -1 0 1 -0.0 0.1 1e308 -1e308 1e400 5e-324 1e-400 1_000 0x10 0777".split(),
    *b"9223372036854775807 9223372036854775808 -9223372036854775809 18446744073709551616 4294967296 10**40".split(),
    *b"10GiB 10GB 9999999999TiB 1k 1.5 2.0 1e3 true false yes null None ~ [] {} \"\" '' , : - = / .. ../../etc".split(),
    *b"2026-01-01 2026-13-45T25:61:61Z 0000-00-00 -- --- ... %s {0} $HOME `x` $(x) ;x &x *x !x |x >x #x @x".split(),
    b"1" + b"0" * 40,
    b"9" * 5000,
    b"1" + b"0" * 400,
    b"0." + b"0" * 400 + b"1",
    b"x" * 10_000,
    b"",
    b" ",
    b"\0",
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"\xff",
    b"\x80\x81",
    b"\xed\xa0\x80",  # a lone surrogate in UTF-8
    b"\\ud800",
    b"\\u0000",
    b"\x1b[31mred",
    b"\r",
    b"\x85",
    "\u2028".encode(),
    "\u202etxet".encode(),
    "\u0661\u0662".encode(),  # digits, though not of ASCII
    "½²".encode(),
    "Größe".encode(),
    "Größe".encode("latin-1"),
    b"<script>alert(1)</script>",
)

# whole passages
PASSAGES: tuple[bytes, ...] = (
    b"[" * 500,
    b"[" * 100_000,
    b'{"a":' * 5_000,
    b"{" * 3_000,
    b"[" * 2_000 + b"]" * 2_000,
    b"- " * 3_000,
    b"(" * 3_000,
    b"\n" * 5_000,
    b",".join([b"1"] * 5_000),
    b"a: &a [x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a]\nc: &c [*b, *b, *b, *b, *b, *b, *b, *b]\n"
    b"d: &d [*c, *c, *c, *c, *c, *c, *c, *c]\ne: [*d, *d, *d, *d, *d, *d, *d, *d]\n",
    b"<<: {name: x}\n",
    b"&x *x\n",
    b"!!python/object/apply:os.system ['true']\n",
    b"!!binary AAAA\n",
    b"!!set {a, b}\n",
    b"!!omap [a: 1]\n",
    b"? [a, b]\n: c\n",
    b"--- \n... \n--- \n",
    b"|\n  text\n",
    b"%YAML 9.9\n---\n",
)

# values for trees, which are written as JSON or YAML
LEAVES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 10**6, 10**9, 10**12, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63) - 1, 10**40,
    10**400, 0.0, -0.0, 0.5, 1e-9, 5e-324, 1e15, 1e300, 1e308, -1e308, float("nan"), float("inf"), float("-inf"),
    "", " ", "x", "0", "1", "-1", "1e9", "1e400", "NaN", "nan", "inf", "9" * 400, "10GiB", "true", "\0", "\ud800",
    "\x1b[31m", "\u2028", "a\nb", "x" * 10_000, "../../etc/passwd", "/dev/zero", "\u0661", [], {}, [None], [[]], [{}],
    {"": None}, [1, 2], ["a", "b"], [0] * 1000, {"a": {"b": {"c": {}}}}, {"key": 1},
)  # fmt: skip


def mutate(rng: random.Random, seed: bytes, others: Sequence[bytes]) -> bytes:
    """`seed` after one or several changes; `others` lend it parts."""
    content = seed
    for number in range(rng.choice((1, 1, 1, 2, 2, 3, 5))):
        if not number and rng.random() < 0.4:
            content = _tree(rng, content, others)
        else:
            content = rng.choice(_CHANGES)(rng, content, others)
        content = content[:MOST_BYTES]
    return content


# --- blind


def _flip(rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    changed = bytearray(content or b"\0")
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _cut(rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    return content[: rng.randint(0, len(content))] if rng.random() < 0.7 else content[rng.randint(0, len(content)) :]


def _drop(rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    start, end = _span(rng, content)
    return content[:start] + content[end:]


def _repeat(rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    start, end = _span(rng, content)
    return content[:end] + content[start:end] * rng.choice((1, 1, 2, 10, 300)) + content[end:]


def _splice(rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    other = rng.choice(others) if others else content
    start, end = _span(rng, other)
    at = rng.randint(0, len(content))
    return content[:at] + other[start:end] + content[at + rng.choice((0, end - start)) :]


def _insert(rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    at = rng.randint(0, len(content))
    return content[:at] + rng.choice(WORDS) + content[at:]


def _passage(rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    at = rng.choice((0, len(content), rng.randint(0, len(content))))
    return content[:at] + rng.choice(PASSAGES) + content[at:]


def _encode(rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    text = content.decode("utf-8", "replace")
    return rng.choice(
        (
            lambda: text.encode("utf-16"),
            lambda: text.encode("utf-16-be"),
            lambda: text.encode("latin-1", "replace"),
            lambda: b"\xef\xbb\xbf" + content,
            lambda: content.replace(b"\n", b"\r\n"),
            lambda: content.replace(b"\n", b"\r"),
            lambda: content.replace(b" ", b"\t"),
            content.upper,
        )
    )()


def _span(rng: random.Random, content: bytes) -> tuple[int, int]:
    start = rng.randint(0, len(content))
    return start, min(len(content), start + rng.choice((1, 2, 4, 16, 64, 256)))


# --- lines and words


def _lines(rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    lines = content.splitlines(keepends=True) or [b""]
    one, two = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(5):
        case 0:
            lines.insert(two, lines[one])
        case 1:
            del lines[one]
        case 2:
            lines[one], lines[two] = lines[two], lines[one]
        case 3:
            lines[one] = rng.choice((b" ", b"  ", b"\t")) + lines[one]
        case _:
            other = (rng.choice(others) if others else content).splitlines(keepends=True) or [b""]
            lines.insert(one, rng.choice(other))
    return b"".join(lines)


_WORD = re.compile(rb"[\w.+-]+")


def _word(rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    """Another value in the place of a word or a number."""
    words = list(_WORD.finditer(content))
    if not words:
        return _insert(rng, content, others)
    found = rng.choice(words)
    other = rng.choice(words)[0] if rng.random() < 0.2 else rng.choice(WORDS)
    return content[: found.start()] + other + content[found.end() :]


_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?")


def _number(rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    """A number that is far larger, smaller or of the other sign."""
    numbers = list(_NUMBER.finditer(content))
    if not numbers:
        return _insert(rng, content, others)
    found = rng.choice(numbers)
    text = found[0]
    other = rng.choice(
        (b"-" + text, text + b"0" * rng.choice((1, 3, 6, 9, 20, 300)), b"0", b"-0", b"0.000" + text, text + b"e300",
         text + b"e-300", b"NaN", b"inf", b"-inf", text + b"." + text, b" " + text, b"+" + text)
    )  # fmt: skip
    return content[: found.start()] + other + content[found.end() :]


_KEY = re.compile(rb'"[^"\n]{0,80}"\s*:')


def _double(rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    """A key of a JSON object a second time, with another value."""
    keys = list(_KEY.finditer(content))
    if not keys:
        return _repeat(rng, content, others)
    found = rng.choice(keys)
    value = json.dumps(rng.choice(LEAVES)).encode()
    return content[: found.start()] + found[0] + b" " + value + b", " + content[found.start() :]


# --- trees


def _tree(rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    """A change of what the content says, where it is JSON, lines of JSON, or YAML."""
    lines = content.splitlines()
    if len(lines) > 1 and (number := rng.randrange(len(lines))) is not None and (tree := _json(lines[number])):
        lines[number] = json.dumps(_changed(rng, tree[0])).encode()
        return b"\n".join(lines) + b"\n"
    if tree := _json(content):
        return json.dumps(_changed(rng, tree[0])).encode()
    if tree := _yaml(content):
        changed = _changed(rng, tree[0])
        if rng.random() < 0.3:  # which YAML contains
            return json.dumps(changed, default=str, skipkeys=True).encode()
        return yaml.dump(changed, sort_keys=False, allow_unicode=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    return _word(rng, content, others)


@lru_cache(maxsize=64)
def _json(content: bytes) -> tuple[Any] | None:
    """What it says, in a tuple; None if it is no object or list."""
    if content[:1] not in (b"{", b"["):
        return None
    try:
        return (json.loads(content),)
    except (ValueError, RecursionError):
        return None


@lru_cache(maxsize=64)
def _yaml(content: bytes) -> tuple[Any] | None:
    if b":" not in content or b"&" in content or len(content) > 10_000:
        return None
    try:
        tree = yaml.safe_load(content)
        json.dumps(tree)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):  # it may hold dates, which JSON lacks
        return None
    return (tree,) if isinstance(tree, (dict, list)) else None


def _changed(rng: random.Random, tree: Any) -> Any:
    """A copy in which one value somewhere, or its key, is another."""
    tree = _copy(tree)
    places = list(_places(tree))
    if not places:
        return rng.choice(LEAVES)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        holder, key = rng.choice(places)
        if isinstance(holder, list) and not (isinstance(key, int) and key < len(holder)):
            continue
        if isinstance(holder, dict) and key not in holder:
            continue
        _change(rng, holder, key, places)
    return tree if rng.random() < 0.97 else rng.choice(([tree], {"a": tree}, rng.choice(LEAVES)))


def _change(rng: random.Random, holder: Any, key: Any, places: list[tuple[Any, Any]]) -> None:
    value = holder[key]
    match rng.randrange(10):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[rng.choice(("", "x", "\0", f"{key} ", f"{key}".upper(), "__class__", "<<", "1"))] = holder.pop(key)
        case 2 if isinstance(holder, list):
            holder[key:key] = [value] * rng.choice((1, 2, 100))
        case 3:
            other, there = rng.choice(places)
            if isinstance(other, dict) and there in other:
                holder[key] = _copy(other[there])
        case 4:
            holder[key] = [value]
        case 5 if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300:
            factor = rng.choice((-1, 0, 2, 1000, 10**6, 10**9, 10**18, 10**40, 0.001, 1e-12, 1e300))
            holder[key] = int(value) * factor if isinstance(factor, int) else _times(value, factor)
        case 6:
            holder[key] = str(value)
        case _:
            holder[key] = rng.choice(LEAVES)


def _times(value: float, factor: float) -> float:
    try:
        return float(value) * factor
    except OverflowError:
        return float("inf")


def _places(tree: Any) -> Any:
    """Every holder and key of the tree, the tree itself aside."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in entries:
        yield tree, key
        yield from _places(value)


def _copy(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _copy(value) for key, value in tree.items()}
    return [_copy(value) for value in tree] if isinstance(tree, list) else tree


Change = Callable[[random.Random, bytes, Sequence[bytes]], bytes]
_CHANGES: tuple[Change, ...] = (
    _flip, _cut, _drop, _repeat, _splice, _insert, _passage, _encode, _lines, _lines, _word, _word, _word, _number,
    _number, _double, _tree, _tree,
)  # fmt: skip
