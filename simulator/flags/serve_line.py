"""What people paste to say how a server is started: some flags, or a whole ``vllm serve ...`` line.

Prompts (``$``, ``#``), line continuations, quotes, environment assignments and what stands before the command are
understood, ``python -m vllm.entrypoints.openai.api_server ...`` and ``docker run ... vllm/vllm-openai ...`` too. The
order of flags does not matter; of two values for one flag the last one counts, as for argparse.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from simulator.engine.engine_flags import FlagError
from simulator.flags.serve_flags import ServeFlag, find_flag

Value = str | bool

WORDS = ("gpu", "replicas", "router")  # capsim's own, beside vLLM's flags

# options of docker run that no value follows
_DOCKER_SWITCHES = {
    "-d",
    "-i",
    "-t",
    "-it",
    "-ti",
    "-dit",
    "-itd",
    "--detach",
    "--init",
    "--interactive",
    "--no-healthcheck",
    "--privileged",
    "--publish-all",
    "-P",
    "--read-only",
    "--rm",
    "--tty",
}
_CONTAINERS = ("docker", "podman", "nerdctl")
_WRAPPERS = {"sudo", "nohup", "exec", "time", "env", "export", "setsid", "uv", "uvx", "run", "CMD", "command"}
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_NUMBER = re.compile(r"-\d+(\.\d+)?")
_PROMPT = re.compile(r"^\s*(?:[$>%]|#(?=\s*(?:\w+=\S+\s+)*(?:sudo\s+)?(?:vllm|python3?|docker|podman|--)\b))\s*")
_SECRET = re.compile(r"((?:key|token|secret|password|passwd|bearer)s?['\"]?(?:[=:]\s*|\s+))\S+", re.IGNORECASE)
_SHELL = set("();<>|&")


class ServeLineError(FlagError):
    """A line that says nothing of a server. The message is one line."""


@dataclass(frozen=True)
class ServeLine:
    """A line that was read.

    Attributes
        name: the label given by ``name=...``; empty without
        flags: values by flag, in no order that matters; a switch has True or False
        model: the model that the line serves, if it names one
        words: values of capsim's own words, `WORDS`
        environment: variables that are set before the command
        before: words before the command that are not understood, such as ``numactl --cpunodebind=0``
    """

    name: str = ""
    flags: dict[ServeFlag, Value] = field(default_factory=dict)
    model: str | None = None
    words: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    before: str = ""

    @classmethod
    def of(cls, given: Mapping[str, Value], gpu: str | None = None) -> ServeLine:
        """The line with flags that are known apart, such as ``{"--max-num-seqs": "64"}``."""
        words = {} if gpu is None else {"gpu": gpu}
        return cls(flags={find_flag(written)[0]: value for written, value in given.items()}, words=words)

    @property
    def label(self) -> str:
        """The name, or else what is modelled of the line: no secret such as an API key is in it."""
        words = [part for name, value in self.words.items() for part in (f"--{name}", value)]
        for flag, value in self.flags.items():
            if flag.kind == "modelled":
                words += [f"--{'no-' if value is False else ''}{flag.name}"]
                words += [value] if isinstance(value, str) else []
        return self.name or " ".join(words) or "as measured"

    @property
    def given(self) -> dict[str, Value]:
        """Values by the flags' names, with underscores."""
        return {flag.name.replace("-", "_"): value for flag, value in self.flags.items()}


def read_lines(text: str) -> list[ServeLine]:
    """Every line of a file; a line that ends in a backslash goes on, ``#`` begins a comment."""
    lines: list[ServeLine] = []
    whole = ""
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        if not whole and (not bare or (bare.startswith("#") and not _PROMPT.match(bare))):
            continue
        whole += line + "\n"
        if bare.endswith("\\"):
            continue
        try:
            lines.append(read_line(whole))
        except FlagError as problem:
            raise ServeLineError(f"line {number}: {problem}") from None
        whole = ""
    if whole:
        lines.append(read_line(whole.rstrip().removesuffix("\\")))
    return lines


def read_line(text: str) -> ServeLine:
    """One line, perhaps continued. Raises `FlagError` for what vLLM would not understand."""
    plain = re.sub(r"\\\s*\n\s*(?:>\s)?", " ", _PROMPT.sub("", text.strip(), count=1)).strip()
    words, name = _words(plain), ""
    if words and words[0].startswith("name="):
        name, words = words[0].partition("=")[2], words[1:]
        if not name:
            raise ServeLineError("name= is empty; write name=LABEL")
    before, words, is_command = _split(words)
    environment, stray = _environment(before)
    line = ServeLine(name, environment=environment, before=_masked(" ".join(stray)))
    return _read_flags(line, words, is_command)


def _masked(text: str) -> str:
    """A part of a line as it may be shown: without what follows a word such as --api-key, and without users of URLs."""
    return re.sub(r"//[^/\s]*@", "//", _SECRET.sub(r"\1***", text))


def _words(text: str) -> list[str]:
    """Words as a POSIX shell splits them, up to where another command begins or output is redirected."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    try:
        for word in lexer:
            if word and set(word) <= _SHELL:
                redirects = word[0] in "<>" and words and words[-1] in ("1", "2")
                return words[:-1] if redirects else words
            words.append(word)
    except ValueError as problem:
        shown = _masked(" ".join(text.split()))
        raise ServeLineError(f"{shown!r} has an open quote or escape ({problem})") from None
    return words


def _split(words: Sequence[str]) -> tuple[list[str], list[str], bool]:
    """Words before the command, those after it, and whether there is a command at all."""
    for at, word in enumerate(words):
        base = word.rpartition("/")[2]
        if base == "vllm" and at + 1 < len(words) and words[at + 1] == "serve":
            return list(words[:at]), list(words[at + 2 :]), True
        if base == "api_server.py" or word.startswith("vllm.entrypoints."):
            return list(words[: max(at - 2, 0)]), list(words[at + 1 :]), True
        if base in _CONTAINERS and "run" in words[at:]:
            return _in_container(words, list(words).index("run", at) + 1)
    at = 0
    while at < len(words) and (_ASSIGNMENT.fullmatch(words[at]) or words[at] in ("env", "export")):
        at += 1
    if at == len(words):
        raise ServeLineError("it names no flag; write for example --max-num-seqs 256")
    if not words[at].startswith("-"):
        raise ServeLineError(
            f"{words[at]!r} begins neither flags nor a line such as vllm serve MODEL --max-num-seqs 64"
        )
    return list(words[:at]), list(words[at:]), False


def _in_container(words: Sequence[str], at: int) -> tuple[list[str], list[str], bool]:
    """The command of ``docker run``: what follows the image. Of docker's options only the environment matters."""
    before: list[str] = []
    while at < len(words) and words[at].startswith("-"):
        option, equals, value = words[at].partition("=")
        step = 1 if equals or option in _DOCKER_SWITCHES else 2
        value = value if equals else words[at + 1] if step == 2 and at + 1 < len(words) else ""
        if option in ("-e", "--env") and _ASSIGNMENT.fullmatch(value):
            before.append(value)
        at += step
    if at >= len(words):
        raise ServeLineError("the docker line names no image")
    rest = list(words[at + 1 :])
    command, serves, _ = _split(rest) if rest and not rest[0].startswith("-") else ([], rest, True)
    return before + command, serves, True


def _environment(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Variables that are set, and the words that are not understood."""
    environment, stray = {}, []
    for word in words:
        found = _ASSIGNMENT.fullmatch(word)
        if found:
            environment[found[1]] = found[2]
        elif word not in _WRAPPERS:
            stray.append(word)
    return environment, stray


def _read_flags(line: ServeLine, words: Sequence[str], is_command: bool) -> ServeLine:
    """The line with its flags; `words` are those after the command."""
    flags: dict[ServeFlag, Value] = {}
    model: str | None = None
    own: dict[str, str] = {}
    at = 0
    while at < len(words):
        word, _, joined = words[at].partition("=")
        at += 1
        if not word.startswith("-"):
            if not is_command or model is not None:
                raise ServeLineError(f"{words[at - 1]!r} belongs to no flag")
            model = words[at - 1]
            continue
        value = joined if "=" in words[at - 1] else None
        if word.removeprefix("--") in WORDS:
            own[word.removeprefix("--")], at = _one(words, at, word, value)
            continue
        flag, positive = find_flag(word)
        taken, at = _values(words, at, word, flag, value)
        if flag.name == "model":
            model = str(taken)
        flags.pop(flag, None)
        flags[flag] = taken if flag.values != "none" else positive
    return replace(line, flags=flags, model=model, words=own)


def _values(words: Sequence[str], at: int, word: str, flag: ServeFlag, joined: str | None) -> tuple[Value, int]:
    """The flag's value and the place behind it."""
    if flag.values == "none":
        if joined is not None:
            raise ServeLineError(f"{word} is a switch and takes no value; write {word} or --no-{flag.name}")
        return True, at
    if flag.values == "one":
        if flag.name == "optimization-level" and word.startswith("-O") and len(word) > 2:
            return word[2:], at
        return _one(words, at, word, joined)
    taken = [] if joined is None else [joined]
    most = len(words) if flag.values == "some" else at + 1
    while joined is None and at < most and at < len(words) and not _is_flag(words[at]):
        taken.append(words[at])
        at += 1
    if not taken and flag.values == "some":
        raise ServeLineError(f"{word} needs a value")
    return " ".join(taken), at


def _one(words: Sequence[str], at: int, word: str, joined: str | None) -> tuple[str, int]:
    if joined is not None:
        return joined, at
    if at >= len(words) or _is_flag(words[at]):
        raise ServeLineError(f"{word} needs a value")
    return words[at], at + 1


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not _NUMBER.fullmatch(word)
