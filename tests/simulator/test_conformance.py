"""Our scheduler makes the decisions of vLLM's own, event by event and in the same order.

dumps/ holds a small set; a larger one is read from ../shared/conformance next to the repository where it exists.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from conformance import first_difference, load_dump, replay

SMALL_SET = Path(__file__).parent / "dumps"
LARGE_SET = Path(__file__).resolve().parents[3] / "shared" / "conformance"


def dumps(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("*.json*") if path.suffix in (".json", ".gz"))


@pytest.mark.parametrize("path", dumps(SMALL_SET), ids=lambda path: path.name.partition(".")[0])
def test_every_event_of_the_small_set_is_reproduced(path: Path) -> None:
    dump = load_dump(path)
    assert first_difference(replay(dump), dump["events"]) == ""


@pytest.mark.slow
@pytest.mark.skipif(not LARGE_SET.is_dir(), reason="no ../shared/conformance next to the repository")
@pytest.mark.parametrize("path", dumps(LARGE_SET), ids=lambda path: path.name.partition(".json")[0])
def test_every_event_of_the_large_set_is_reproduced(path: Path) -> None:
    dump = load_dump(path)
    assert first_difference(replay(dump), dump["events"]) == ""


def test_the_small_set_shows_every_rule() -> None:
    heads = [load_dump(path)["head"]["config"] for path in dumps(SMALL_SET)]
    for flag in ("async", "chunked_prefill", "prefix_caching", "long_prefill_token_threshold_adaptive"):
        assert {head[flag] for head in heads} == {True, False}, flag
    assert {head["policy"] for head in heads} == {"fcfs", "priority"}
    assert {head["block_size"] for head in heads} >= {16, 128}
    assert any(head["watermark"] for head in heads)
    assert any(not head["reserve_full_isl"] for head in heads)


def test_a_request_served_out_of_order_is_noticed() -> None:
    dump = load_dump(SMALL_SET / "plain_sync.json.gz")
    events = copy.deepcopy(dump["events"])
    event = next(event for event in events if len(event.get("n", ())) > 1)
    event["n"] = dict(reversed(event["n"].items()))
    assert "n is" in first_difference(replay(dump), events)


def test_a_missing_event_is_noticed() -> None:
    dump = load_dump(SMALL_SET / "plain_sync.json.gz")
    assert first_difference(replay(dump), dump["events"][:-1])
