"""Which KV blocks are taken, shared, found again and lost, step by step as vLLM's block pool does it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import count

import pytest

from simulator.engine.decode_batch import DecodeBatch
from simulator.engine.kv_cache import BlockCounter, KVCache, PrefixCache
from simulator.engine.request import Request

SIZE = 4  # tokens a block
numbers = count()


def asking(blocks: Sequence[str], more: int = 1) -> Request:
    """A request whose prompt is full blocks of these contents and `more` tokens."""
    return Request(next(numbers), SIZE * len(blocks) + more, 8, prefix=tuple(blocks))


def admit(cache: KVCache, request: Request) -> list[int]:
    """Compute the whole prompt, as the scheduler does on admission; returns the blocks that were found."""
    found = cache.find_prefix(request, request.prompt_tokens)
    cache.adopt(request, found)
    cache.take(request, -(-request.prompt_tokens // SIZE) - len(found))
    cache.store(request, request.prompt_tokens)
    return found


def found(cache: PrefixCache, blocks: Sequence[str]) -> list[int]:
    request = asking(blocks)
    return cache.find_prefix(request, request.prompt_tokens)


def decoding(cache: KVCache, requests: Sequence[Request]) -> DecodeBatch:
    """A batch of these requests, their prompts computed."""
    batch = DecodeBatch(SIZE)
    for position, request in enumerate(requests):
        admit(cache, request)
        request.position = position
        request.computed = request.prompt_tokens
        batch.join(request, last_step=1000)
    return batch


# --- a pool without prefix caching


def test_a_counter_only_counts() -> None:
    cache = BlockCounter(10)
    one, other = asking("AB"), asking("AB")
    assert admit(cache, one) == admit(cache, other) == []
    assert (one.blocks, other.blocks, cache.free_blocks) == (3, 3, 4)
    cache.take(one, 2)
    assert (one.blocks, cache.free_blocks) == (5, 2)
    cache.release(one)
    assert (one.blocks, cache.free_blocks) == (0, 7)
    cache.release(other)
    assert cache.free_blocks == 10


def test_a_resumed_request_begins_with_no_blocks() -> None:
    cache = BlockCounter(10)
    request = asking("A")
    admit(cache, request)
    assert cache.unreferenced([]) == 0
    cache.release(request)
    admit(cache, request)
    assert (request.blocks, cache.free_blocks) == (2, 8)


@pytest.mark.parametrize("cache", [BlockCounter(20), PrefixCache(20, SIZE)])
def test_the_decode_batch_takes_a_block_whenever_a_request_fills_its_last_one(cache: KVCache) -> None:
    requests = [asking((), more=prompt) for prompt in (4, 5, 8)]  # 1, 2 and 2 blocks, and 0, 3 and 0 places left
    batch = decoding(cache, requests)
    assert cache.free_blocks == 15
    cache.take_for_batch(batch, 1)
    batch.advance()
    assert cache.free_blocks == 13
    cache.take_for_batch(batch, 5)  # the second request in the third of these steps, the others in the fourth
    batch.advance(5)
    assert cache.free_blocks == 10
    for request in requests:
        batch.leave(request)
        assert request.blocks == -(-(request.prompt_tokens + 6) // SIZE)
        cache.release(request)
    assert cache.free_blocks == 20


def test_the_batch_takes_its_blocks_in_running_order_step_by_step() -> None:
    cache = PrefixCache(20, SIZE)
    requests = [
        Request(next(numbers), prompt, 8, prefix=prefix) for prompt, prefix in ((3, "AB"), (4, "CD"), (3, "EF"))
    ]
    cache.take_for_batch(decoding(cache, requests), 2)  # block 4 in the first step, blocks 5 and 6 in the second
    for request in requests:
        cache.store(request, 2 * SIZE)
    assert [found(cache, blocks) for blocks in ("AB", "CD", "EF")] == [[1, 5], [2, 4], [3, 6]]


# --- finding a prefix (KVCacheManager.get_computed_blocks)


def test_full_blocks_are_found_up_to_the_first_miss() -> None:
    cache = PrefixCache(20, SIZE)
    assert admit(cache, asking("ABC")) == []
    assert found(cache, "ABC") == [1, 2, 3]
    assert found(cache, "ABX") == [1, 2]
    assert found(cache, "XBC") == []
    assert found(cache, "ABCDE") == [1, 2, 3]


def test_a_partly_filled_block_is_not_found() -> None:
    cache = PrefixCache(20, SIZE)
    request = asking("AB")
    cache.adopt(request, [])
    cache.take(request, 2)
    cache.store(request, 2 * SIZE - 1)
    assert found(cache, "AB") == [1]
    cache.store(request, 2 * SIZE)
    assert found(cache, "AB") == [1, 2]


def test_the_last_known_token_is_always_computed_again() -> None:
    cache = PrefixCache(20, SIZE)
    admit(cache, asking("ABC"))
    aligned = asking("ABC", more=0)
    assert cache.find_prefix(aligned, aligned.prompt_tokens) == [1, 2], "a whole block is recomputed for it"
    assert cache.find_prefix(aligned, aligned.prompt_tokens + 1) == [1, 2, 3]
    assert cache.find_prefix(aligned, 1) == []


def test_what_was_stored_stays_stored_when_less_is_stored_later() -> None:
    """Asynchronous scheduling stores again, up to the tokens that are sure, when a step's outcome arrives."""
    cache = PrefixCache(20, SIZE)
    request = asking("ABC", more=0)
    admit(cache, request)
    cache.store(request, SIZE)
    cache.store(request, 3 * SIZE)
    assert found(cache, "ABCD") == [1, 2, 3]
    cache.release(request)
    for _ in range(17):
        admit(cache, asking((), more=1))
    assert cache.free_blocks == 3
    admit(cache, asking((), more=3 * SIZE))
    assert found(cache, "ABCD") == [], "each content was stored once and went with its block"


def test_of_equal_blocks_the_first_one_is_found_and_then_the_next() -> None:
    """Two requests that compute the same at once: both keep their blocks (BlockHashToBlockMap)."""
    cache = PrefixCache(4, SIZE)
    twins = [asking("A", more=0) for _ in range(2)]
    for twin in twins:
        cache.adopt(twin, [])
        cache.take(twin, 1)
    for twin in twins:
        cache.store(twin, SIZE)
    assert found(cache, "A") == [1]
    cache.release(twins[0])
    admit(cache, asking((), more=3 * SIZE))  # blocks 3, 4 and 1
    assert found(cache, "A") == [2]
    cache.release(twins[1])
    admit(cache, asking((), more=1))
    assert found(cache, "A") == []


# --- sharing (BlockPool.touch)


def test_a_shared_block_is_free_only_when_nobody_holds_it() -> None:
    cache = PrefixCache(10, SIZE)
    one, other = asking("AB"), asking("AB")
    admit(cache, one)
    assert cache.free_blocks == 7
    assert cache.unreferenced([1, 2]) == 0
    assert admit(cache, other) == [1, 2]
    assert (other.blocks, cache.free_blocks) == (3, 6)
    cache.release(one)
    assert (one.blocks, cache.free_blocks) == (0, 7)
    cache.release(other)
    assert cache.free_blocks == 10


def test_a_cached_block_that_nobody_holds_leaves_the_free_list_when_it_is_shared() -> None:
    cache = PrefixCache(10, SIZE)
    request = asking("AB")
    admit(cache, request)
    cache.release(request)
    assert cache.free_blocks == 10
    assert cache.unreferenced([1, 2]) == 2
    assert admit(cache, asking("AB")) == [1, 2]
    assert cache.free_blocks == 7
    assert admit(cache, asking("AB")) == [1, 2]
    assert cache.free_blocks == 6
    assert cache.unreferenced([1, 2, 10]) == 1


def test_adopting_leaves_the_list_that_was_found_alone() -> None:
    cache = PrefixCache(10, SIZE)
    admit(cache, asking("AB"))
    blocks = found(cache, "AB")
    request = asking("AB")
    cache.adopt(request, blocks)
    cache.take(request, 1)
    assert blocks == [1, 2]


def test_a_request_without_blocks_can_be_released() -> None:
    cache = PrefixCache(10, SIZE)
    cache.release(asking("AB"))
    assert cache.free_blocks == 10


def test_a_released_request_is_forgotten() -> None:
    """A long run would keep every request otherwise."""
    cache = PrefixCache(10, SIZE)
    request = asking("AB")
    references = sys.getrefcount(request)
    admit(cache, request)
    assert sys.getrefcount(request) > references
    cache.release(request)
    assert sys.getrefcount(request) == references


def test_a_request_that_comes_back_stores_anew() -> None:
    """Preempted, its content lost, and resumed: nothing of what it stored before counts."""
    cache = PrefixCache(3, SIZE)
    request = asking("AB")
    admit(cache, request)
    cache.release(request)
    other = asking((), more=3 * SIZE)
    admit(cache, other)
    assert found(cache, "AB") == []
    cache.release(other)
    admit(cache, request)
    assert len(found(cache, "AB")) == 2


# --- the order in which blocks are taken (FreeKVCacheBlockQueue, BlockPool.free_blocks)


def taken_next(cache: PrefixCache, blocks: int) -> list[int]:
    """The blocks that a request gets, in their order; it keeps them."""
    names = tuple(f"next {number}" for number in range(blocks))
    request = asking(names, more=0)
    cache.adopt(request, [])
    cache.take(request, blocks)
    cache.store(request, blocks * SIZE)
    return found(cache, names)


def test_every_block_of_a_new_pool_can_be_taken_once_from_the_first_to_the_last() -> None:
    cache = PrefixCache(6, SIZE)
    assert cache.free_blocks == 6
    assert taken_next(cache, 6) == [1, 2, 3, 4, 5, 6]
    assert cache.free_blocks == 0


@pytest.mark.parametrize(("plain_first", "order"), [(True, [3, 4, 5, 6, 2, 1]), (False, [4, 5, 6, 3, 2, 1])])
def test_released_blocks_that_can_be_found_are_taken_last_and_long_prefixes_lose_their_ends_first(
    plain_first: bool, order: list[int]
) -> None:
    """The unfinished third block goes to the head, where vLLM 0.11 does not look at what a block holds."""
    cache = PrefixCache(6, SIZE, plain_first)
    request = asking("AB")
    admit(cache, request)
    cache.release(request)
    assert taken_next(cache, 6) == order


def test_plain_blocks_are_reused_first_unless_told_otherwise() -> None:
    cache = PrefixCache(6, SIZE)
    request = asking((), more=1)
    admit(cache, request)
    cache.release(request)
    assert taken_next(cache, 2) == [1, 2]


def test_a_taken_block_loses_its_content() -> None:
    cache = PrefixCache(4, SIZE)
    request = asking("AB")
    admit(cache, request)
    cache.release(request)
    taken_next(cache, 3)  # the third block, the fourth and the second
    assert found(cache, "AB") == [1]


def test_blocks_released_longest_ago_are_taken_first() -> None:
    cache = PrefixCache(4, SIZE)
    requests = [asking(name, more=0) for name in "ABCD"]
    for request in requests:
        admit(cache, request)
    for number in (2, 0, 3, 1):
        cache.release(requests[number])
    assert admit(cache, asking("CX", more=0)) == [3], "used again: the last to go now"
    assert [bool(found(cache, name)) for name in "ABCD"] == [False, True, True, True]
