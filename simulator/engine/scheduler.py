"""vLLM V1's scheduler: which request gets how many tokens in each step. Pure decisions, no clock.

`Scheduler.schedule` plans a step and `Scheduler.update` takes in its outcome, as in vLLM's
`v1/core/sched/scheduler.py` and `async_scheduler.py`. With synchronous scheduling the caller alternates the two; with
asynchronous scheduling it calls ``schedule()`` for step k+1 before ``update()`` for step k.

Requests that decode steadily are counted together in a `DecodeBatch`; everything else is handled one by one. Whenever
the shortcut could differ from vLLM's own loop (blocks run short, or it matters who takes which), that loop is walked
request by request.
"""

from __future__ import annotations

from collections import deque

from simulator.engine.decode_batch import DecodeBatch
from simulator.engine.engine_flags import EngineFlags
from simulator.engine.engine_rules import rules_of
from simulator.engine.kv_cache import BlockCounter, KVCache, PrefixCache
from simulator.engine.request import Request
from simulator.engine.step import Chunk, Step
from simulator.engine.waiting_queue import FCFSQueue, PriorityQueue


class CannotFit(ValueError):
    """A request that this engine can never serve."""


class Scheduler:
    """Decides, step by step, as vLLM does.

    Attributes
        running: requests in the order of vLLM's running list
        waiting: requests not admitted yet or preempted
        kv_cache: the KV blocks
        batch: the steadily decoding part of `running`
    """

    def __init__(self, flags: EngineFlags) -> None:
        self.flags = flags
        self._rules = rules_of(flags.engine_version)
        self.running: dict[Request, None] = {}
        self.waiting = PriorityQueue() if flags.scheduling_policy == "priority" else FCFSQueue()
        self.kv_cache: KVCache = (
            PrefixCache(flags.usable_blocks, flags.block_size, self._rules.reuses_plain_blocks_first)
            if flags.enable_prefix_caching
            else BlockCounter(flags.usable_blocks)
        )
        self.batch = DecodeBatch(flags.block_size)
        self.preemptions = 0
        self._others: list[Request] = []  # running requests outside the batch that still need tokens, in running order
        self._exhausted: list[Request] = []  # running requests whose last token is in flight, by `max_tokens`
        self._unprocessed: deque[Step] = deque()  # scheduled steps whose outcome is not known yet
        self._positions = 0
        self._flush = False
        self._reserves_all = flags.scheduler_reserve_full_isl and self._rules.reserves_full_sequence
        self._watermark = int(flags.watermark * flags.num_gpu_blocks) if self._rules.reserves_full_sequence else 0

    # --- what the engine asks

    @property
    def has_requests(self) -> bool:
        """Whether another ``schedule()`` is due: unfinished requests, or finished ones that vLLM has yet to flush."""
        return bool(self.running) or bool(self.waiting) or self._flush

    @property
    def used_blocks(self) -> int:
        return self.flags.usable_blocks - self.kv_cache.free_blocks

    @property
    def active_tokens(self) -> int:
        """Prompt and generated tokens (in flight included) of all running requests."""
        tokens = self.batch.kv_tokens + self.batch.size
        for request in self._others:
            tokens += request.prompt_tokens + request.output + request.in_flight
        for request in self._exhausted:
            if request in self.running:
                tokens += request.prompt_tokens + request.output_tokens
        return tokens

    def check(self, request: Request) -> None:
        """Raise `CannotFit` if the request can never be served with these flags."""
        flags = self.flags
        if request.prompt_tokens >= flags.max_model_len:
            raise CannotFit(
                f"a prompt of {request.prompt_tokens} tokens does not fit --max-model-len {flags.max_model_len}"
            )
        longest = min(request.prompt_tokens + request.output_tokens - 1, flags.max_model_len)
        if -(-longest // flags.block_size) > flags.usable_blocks:
            raise CannotFit(
                f"a request of {request.prompt_tokens} prompt and {request.output_tokens} output tokens needs "
                f"{-(-longest // flags.block_size)} KV blocks of {flags.block_size}, the pool has {flags.usable_blocks}"
            )

    def add(self, request: Request) -> None:
        """Take in a request that has arrived. Raises `CannotFit`."""
        self.check(request)
        room = self.flags.max_model_len - request.prompt_tokens
        request.max_tokens = min(request.max_tokens, room)
        request.output_tokens = min(request.output_tokens, room)
        self.waiting.append(request)

    # --- planning a step

    def schedule(self) -> Step:
        """Plan the next step: running requests first, then admissions, as `Scheduler.schedule` of vLLM."""
        step = Step()
        self._flush = False
        self._release_exhausted()
        threshold = self._prefill_threshold()
        budget = self._schedule_running(step, threshold)
        if self.waiting and not step.preempted:
            self._admit(step, budget, threshold)
        self._commit(step)
        self._unprocessed.append(step)
        return step

    def _release_exhausted(self) -> None:
        """Take out of the batch whoever has its last token in flight by `max_tokens`: vLLM schedules it no more."""
        self._exhausted = []
        if not self._unprocessed:
            return
        for request in self._unprocessed[-1].finishing:
            if request.decoding and request.output_tokens == request.max_tokens and self._stops_in_time(request):
                self._exhausted.append(request)
                self.batch.leave(request)
                self.kv_cache.store(request, request.computed - 1)
                request.output = request.output_tokens - 1
                request.in_flight = 1

    def _stops_in_time(self, request: Request) -> bool:
        """Whether vLLM knows that no token is to be computed after the one in flight."""
        full = request.prompt_tokens + request.max_tokens >= self.flags.max_model_len
        return self._rules.stops_in_time or full

    def _prefill_threshold(self) -> int:
        """Most tokens a request may get in this step, 0 for no limit (`long_prefill_token_threshold`)."""
        flags = self.flags
        threshold = flags.long_prefill_token_threshold
        if threshold == 0:
            return 0
        requests = len(self.running) + len(self.waiting)
        if self._rules.lone_request_is_exempt and requests == 1:
            return 0
        if flags.long_prefill_token_threshold_adaptive and requests:
            return max(threshold, flags.max_num_batched_tokens // requests)
        return threshold

    def _schedule_running(self, step: Step, threshold: int) -> int:
        """Give tokens to running requests; returns what is left of the step's token budget."""
        decodes = self.batch.size
        needed = needed_by_batch = self.batch.blocks_needed()
        plan: list[Chunk] = []
        budget_left = self.flags.max_num_batched_tokens - decodes
        for request in self._others:
            # only the last of the running list can be cut by the budget, so the batch may take its part first
            tokens = min(self._tokens_wanted(request, threshold), budget_left)
            if tokens > 0:
                plan.append(Chunk(request, tokens, request.computed))
                needed += self._blocks_for(request, tokens)
                budget_left -= tokens
        if needed > self.kv_cache.free_blocks or (plan and self.kv_cache.ordered):
            return self._schedule_one_by_one(step, threshold)
        if needed_by_batch:
            self.kv_cache.take_for_batch(self.batch, 1)
        for chunk in plan:
            self.kv_cache.take(chunk.request, self._blocks_for(chunk.request, chunk.tokens))
        step.chunks = plan
        step.decodes = decodes
        return budget_left

    def _tokens_wanted(self, request: Request, threshold: int) -> int:
        """Tokens that a running request outside the batch lacks, within all limits but the step's budget."""
        in_flight = request.in_flight
        last = request.computed + 2 - in_flight >= request.prompt_tokens + request.max_tokens
        if in_flight and last and self._rules.stops_in_time:
            return 0  # its last token is in flight already
        tokens = request.prompt_tokens + request.output + in_flight - request.computed
        if 0 < threshold < tokens:
            tokens = threshold
        return min(tokens, self.flags.max_model_len - request.computed - 1)

    def _blocks_for(self, request: Request, tokens: int) -> int:
        """Blocks that `request` must take to compute `tokens` more tokens."""
        return -(-(request.computed + tokens) // self.flags.block_size) - request.blocks

    def _schedule_one_by_one(self, step: Step, threshold: int) -> int:
        """vLLM's loop over the running list, with preemption: the general case of `_schedule_running`."""
        budget = self.flags.max_num_batched_tokens
        order = list(self.running)
        granted: dict[Request, Chunk] = {}
        index = 0
        while index < len(order) and budget > 0:
            request = order[index]
            decoding = request.decoding
            tokens = 1 if decoding else self._tokens_wanted(request, threshold)
            tokens = min(tokens, budget)
            if tokens <= 0:
                index += 1
                continue
            stop = False
            while (needed := self._blocks_of(request, tokens)) > self.kv_cache.free_blocks:
                victim = self._choose_victim(order)
                at = order.index(victim)
                order.pop(at)
                taken = granted.pop(victim, None)
                if taken is not None:
                    budget += taken.tokens
                if at < index and (taken is not None or self._rules.corrects_index_always):
                    index -= 1
                self._preempt(step, victim, taken.tokens if taken else 0)
                if victim is request:
                    stop = True
                    break
            if stop:
                break
            self.kv_cache.take(request, needed)
            if not decoding:
                self.kv_cache.store(request, min(request.computed + tokens, request.prompt_tokens + request.output))
            granted[request] = Chunk(request, tokens, request.computed)
            budget -= tokens
            index += 1
        self._drop_missed(step, granted)
        step.decodes = self.batch.size
        step.chunks = [chunk for request, chunk in granted.items() if not request.decoding]
        return budget

    def _blocks_of(self, request: Request, tokens: int) -> int:
        if request.decoding:
            return int(self.batch.needs_block(request))
        return self._blocks_for(request, tokens)

    def _choose_victim(self, order: list[Request]) -> Request:
        if self.flags.scheduling_policy == "priority":
            return max(order, key=lambda request: (request.priority, request.arrival_time))
        return order[-1]

    def _preempt(self, step: Step, request: Request, granted: int) -> None:
        """Take everything from a running request, the blocks for the tokens `granted` to it in this step included, and
        send it back to wait; its output so far is kept."""
        if request.decoding:
            self._leave_batch(step, request)
            if granted:
                request.blocks += self._blocks_for(request, granted)
                self.kv_cache.store(request, request.computed + granted - len(self._unprocessed))
        self.kv_cache.release(request)
        request.computed = request.in_flight = 0
        request.preempted = True
        request.preemptions += 1
        self.preemptions += 1
        del self.running[request]
        if request in self._others:
            self._others.remove(request)
        self.waiting.prepend(request)
        step.preempted.append(request)

    def _drop_missed(self, step: Step, granted: dict[Request, Chunk]) -> None:
        """Decoding requests that got nothing in this step are counted one by one until they sample again."""
        missed = [request for request in self.running if request.decoding and request not in granted]
        for request in missed:
            self._leave_batch(step, request)
            self._others.append(request)
        if missed:
            self._others.sort(key=lambda request: request.position)

    def _leave_batch(self, step: Step, request: Request) -> None:
        """Take a request out of the batch before its end, its output brought up to date."""
        self.batch.leave(request)
        sampled = request.computed + 1 - request.prompt_tokens
        request.output = sampled
        self.kv_cache.store(request, request.computed - len(self._unprocessed))
        if not self._unprocessed:
            step.left.append(request)
            return
        before = self._unprocessed[-1]
        if request in before.finishing:
            return  # it ends when that step is processed, wherever it is by then
        request.output -= 1
        request.in_flight = 1
        before.samplers.append(request)
        if request in before.joined:
            before.joined.remove(request)
        else:
            before.tokens_out -= 1
            step.left.append(request)

    def _admit(self, step: Step, budget: int, threshold: int) -> None:
        """Move waiting requests to the running list, strictly from the head of the queue."""
        flags = self.flags
        skipped: list[Request] = []
        while budget > 0 and self.waiting and len(self.running) < flags.max_num_seqs:
            request = self.waiting.head
            known = request.prompt_tokens + request.output
            prefix = self.kv_cache.find_prefix(request, known)
            cached = len(prefix) * flags.block_size
            tokens = known - cached
            if 0 < threshold < tokens:
                tokens = threshold
            if tokens > budget:
                if not flags.enable_chunked_prefill:
                    if self._rules.oversized_prompt_blocks:
                        break
                    skipped.append(self.waiting.popleft())
                    continue
                tokens = budget
            if not self._has_room(known, cached + tokens, prefix):
                break
            self.waiting.popleft()
            self._positions += 1
            request.position = self._positions
            request.preempted = False
            request.computed = cached
            if not request.preemptions:
                request.cached = cached
            self.kv_cache.adopt(request, prefix)
            self.kv_cache.take(request, self._blocks_for(request, tokens))
            self.kv_cache.store(request, min(cached + tokens, known))
            self.running[request] = None
            self._others.append(request)
            step.admitted.append(request)
            step.chunks.append(Chunk(request, tokens, cached))
            budget -= tokens
        for request in reversed(skipped):
            self.waiting.prepend(request)

    def _has_room(self, known: int, computed: int, prefix: list[int]) -> bool:
        """vLLM's admission rule: room for `computed` tokens after this step, for all `known` ones if they are reserved,
        and a watermark unless nothing runs."""
        length = known if self._reserves_all else computed
        blocks = -(-length // self.flags.block_size) - len(prefix)
        blocks += self.kv_cache.unreferenced(prefix)
        return blocks + (self._watermark if self.running else 0) <= self.kv_cache.free_blocks

    def _commit(self, step: Step) -> None:
        """Advance what every scheduled request has computed and note who samples."""
        if step.decodes:
            step.decode_kv_tokens = self.batch.kv_tokens
            step.tokens_out = step.decodes
            self.batch.advance()
            step.finishing = self.batch.pop_due()
        for chunk in step.chunks:
            request = chunk.request
            request.computed = chunk.context + chunk.tokens
            if request.computed >= request.prompt_tokens + request.output + request.in_flight:
                self._sample(step, request)

    def _sample(self, step: Step, request: Request) -> None:
        """Note that a request samples a token in this step; it decodes in the batch if tokens remain."""
        sampled = request.computed + 1 - request.prompt_tokens
        remaining = request.output_tokens - sampled
        if remaining <= 0:
            step.samplers.append(request)
            request.in_flight += 1
            return
        self._others.remove(request)
        request.in_flight = 0
        self.batch.join(request, self.batch.clock + remaining)
        step.joined.append(request)

    # --- taking in what a step produced

    def update(self, step: Step) -> list[Request]:
        """Process the oldest scheduled step; returns the requests that ended with it, in the order of the step."""
        oldest = self._unprocessed.popleft()
        if step is not oldest:
            raise ValueError("steps are processed in the order they were scheduled")
        ended = step.finishing
        if step.samplers:
            ended = list(ended)
            for request in step.samplers:
                if request.finished:
                    continue
                request.output += 1
                if request.in_flight:
                    request.in_flight -= 1
                    self.kv_cache.store(request, request.computed - request.in_flight)
                if request.output >= request.output_tokens:
                    ended.append(request)
        if len(ended) > 1:
            ended.sort(key=lambda request: request.position)
        for request in ended:
            self._finish(request)
        return ended

    def _finish(self, request: Request) -> None:
        """Free the slot and the blocks of a request that has all its tokens."""
        if request.decoding:
            self.batch.leave(request)
            if self._unprocessed:
                self._unprocessed[0].tokens_out -= 1  # the token after a stop token is computed and thrown away
        request.output = request.output_tokens
        if not request.preempted:
            self.kv_cache.store(request, request.prompt_tokens + request.output - 1)
            self.kv_cache.release(request)
        request.finished = True
        self._flush = True
        if request.preempted:
            self.waiting.remove(request)
            return
        del self.running[request]
        if request in self._others:
            self._others.remove(request)

    # --- many equal steps at once

    def repeatable(self) -> int:
        """How many further steps would be exactly like the last one, had it been steady: no admission, no end, no
        preemption. Arrivals are the caller's to watch for."""
        batch = self.batch
        steps = batch.steps_until_due() - 1
        if steps <= 0 or self._others:
            return 0
        free = self.kv_cache.free_blocks
        if batch.blocks_needed(steps) <= free:
            return steps
        low, high = 0, steps  # blocks for `low` steps are free, for `high` they are not
        while high - low > 1:
            middle = (low + high) // 2
            if batch.blocks_needed(middle) <= free:
                low = middle
            else:
                high = middle
        return low

    def repeat(self, steps: int) -> None:
        """Schedule and process `steps` further steady steps; the step in flight, if any, becomes the last of them."""
        self.kv_cache.take_for_batch(self.batch, steps)
        self.batch.advance(steps)
        for step in self._unprocessed:
            step.decode_kv_tokens += steps * step.decodes
