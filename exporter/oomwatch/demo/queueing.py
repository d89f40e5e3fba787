"""One rank's scheduler and KV block pool, as vLLM's V1 engine works them, in steps of a fraction of a second.

Kept from the real one: blocks of 16 tokens without the null block, prompts admitted only where all of them fits,
preemption of the last admitted request by recompute, shared prefixes that hold their blocks once, and counters that
count what vLLM's count (vllm/v1/core/sched/scheduler.py, vllm/v1/metrics/stats.py).
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

BLOCK_TOKENS = 16
_SHARED_PREFIXES = 4
_MAX_SEQUENCES = 256
_MAX_STEP_TOKENS = 8192


@dataclass(frozen=True)
class Load:
    """What clients send: requests a second at the peak of the day, mean lengths in tokens.

    ``prompt`` leaves the shared prefix out. Lengths are log-normal with ``spread``, and never above three means.
    """

    rate: float
    prompt: float
    answer: float
    spread: float = 0.35

    def lengths(self, rng: random.Random) -> tuple[int, int]:
        """Tokens of one prompt and of its answer."""
        return self._length(rng, self.prompt), self._length(rng, self.answer)

    def _length(self, rng: random.Random, mean: float) -> int:
        drawn = rng.lognormvariate(math.log(mean) - self.spread**2 / 2, self.spread)
        return max(8, int(min(drawn, 3 * mean)))


@dataclass(frozen=True)
class Pace:
    """How fast the GPUs are: prompt tokens a second, and seconds of a decoding step without and per request."""

    prefill: float
    step: float
    step_per_request: float

    def step_seconds(self, decoding: int) -> float:
        return self.step + self.step_per_request * decoding


class Lengths:
    """A histogram as vLLM keeps it of token counts: upper bounds 1, 2, 5, 10, … up to the longest sequence."""

    def __init__(self, longest: int) -> None:
        steps = (factor * 10**power for power in range(8) for factor in (1, 2, 5))
        self.bounds = tuple(bound for bound in steps if bound <= longest)
        self._counts = [0] * (len(self.bounds) + 1)
        self.total = 0

    def add(self, tokens: int) -> None:
        self._counts[bisect_left(self.bounds, tokens)] += 1
        self.total += tokens

    def cumulative(self) -> list[int]:
        """Counts up to each bound, and up to infinity."""
        so_far, counts = 0, []
        for count in self._counts:
            so_far += count
            counts.append(so_far)
        return counts


@dataclass(eq=False)
class _Request:
    prompt: int  # tokens, the shared prefix included
    answer: int  # tokens to come in all
    prefix: int  # which shared prefix
    reason: str
    generated: int = 0
    to_compute: int = 0  # tokens before the next one can come
    blocks: int = 0  # its own, the shared prefix's left out
    counted: bool = False  # its prompt is in the counters


class Rank:
    """One rank. ``leak`` is the share of freed blocks that is lost; ``lost`` counts them."""

    def __init__(self, blocks: int, longest: int, prefix_tokens: int, pace: Pace, rng: random.Random) -> None:
        self.blocks = blocks
        self.leak = 0.0
        self.lost = 0
        self.waiting: deque[_Request] = deque()
        self.running: list[_Request] = []
        self.preemptions = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.steps = 0
        self.finished = {"stop": 0, "length": 0}
        self.prompt_lengths = Lengths(longest)
        self.generation_lengths = Lengths(longest)
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.stepped = False
        self.busy = 0.0  # share of the last tick in which the GPU worked
        self._longest = longest
        self._prefix_tokens = prefix_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        self._pace = pace
        self._rng = rng
        self._used = 0
        self._prefix_users = [0] * _SHARED_PREFIXES
        self._prefix_cached = [False] * _SHARED_PREFIXES
        self._leaking = 0.0
        self._due = 0.0  # arrivals that the rate so far stands for
        self._next = rng.expovariate(1.0)
        self._time_left = 0.0  # of the last step that did not fit into its tick
        self._preempted = False

    @property
    def used(self) -> int:
        """Blocks in use, lost ones included."""
        return self._used + self.lost

    @property
    def free(self) -> int:
        return self.blocks - self.used

    @property
    def finished_in_all(self) -> int:
        return sum(self.finished.values())

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    def tick(self, seconds: float, load: Load, rate: float) -> None:
        """Let ``seconds`` pass in which requests of ``load`` arrive at ``rate`` a second."""
        self._arrivals(seconds * rate, load)
        self.busy = 0.0
        if self.idle:
            return
        self._admit()
        prefilling = self._prefill(seconds)
        decoding = self._decode(seconds - prefilling)
        self.busy = min(1.0, (prefilling + decoding) / seconds)
        self._finish()
        if self.busy:
            self.stepped = True

    def forget_prefixes(self) -> None:
        """The prefix cache is emptied, as when the engine goes to sleep."""
        self._prefix_cached = [False] * _SHARED_PREFIXES

    def abandon(self) -> None:
        """The clients of all waiting requests give up; vLLM counts nothing for that."""
        self.waiting.clear()

    # --- requests come ---------------------------------------------------------------------------------------

    def _arrivals(self, expected: float, load: Load) -> None:
        self._due += expected
        while self._due >= self._next:
            self._next += self._rng.expovariate(1.0)
            prompt, answer = load.lengths(self._rng)
            prompt = min(self._prefix_tokens + prompt, self._longest - 16)
            reason = "stop" if self._rng.random() < 0.85 else "length"
            prefix = self._rng.randrange(_SHARED_PREFIXES)
            self.waiting.append(_Request(prompt, min(answer, self._longest - prompt), prefix, reason))

    def _admit(self) -> None:
        # In the step that preempted something vLLM admits nothing.
        if self._preempted:
            self._preempted = False
            return
        while self.waiting and len(self.running) < _MAX_SEQUENCES:
            request = self.waiting[0]
            own = _blocks_for(request.prompt + request.generated - self._prefix_tokens)
            shared = 0 if self._prefix_users[request.prefix] else self._prefix_tokens // BLOCK_TOKENS
            if own + shared > self.free:
                return
            self.waiting.popleft()
            self.running.append(request)
            request.blocks = own
            self._used += own + shared
            self._prefix_users[request.prefix] += 1
            hit = self._prefix_tokens if self._prefix_cached[request.prefix] else 0
            request.to_compute = request.prompt + request.generated - hit
            if not request.counted:
                self.prefix_queries += request.prompt
                self.prefix_hits += hit

    # --- the GPU works ---------------------------------------------------------------------------------------

    def _prefill(self, seconds: float) -> float:
        """Compute prompts in the order of admission; the seconds that took. Decoding requests keep a share."""
        pending = [request for request in self.running if request.to_compute]
        if not pending:
            return 0.0
        share = 0.75 if len(pending) < len(self.running) else 1.0
        budget = left = int(seconds * share * self._pace.prefill)
        for request in pending:
            if not request.blocks:  # preempted meanwhile
                continue
            part = min(left, request.to_compute)
            request.to_compute -= part
            left -= part
            if not request.to_compute:
                self._prefix_cached[request.prefix] = True
                self._first_token(request)
            if not left:
                break
        done = budget - left
        self.steps += math.ceil(done / _MAX_STEP_TOKENS)
        return done / self._pace.prefill

    def _first_token(self, request: _Request) -> None:
        if not request.counted:
            request.counted = True
            self.prompt_tokens += request.prompt
        self._extend(request, 1)

    def _decode(self, seconds: float) -> float:
        decoding = [request for request in self.running if not request.to_compute and request.generated]
        if not decoding:
            self._time_left = 0.0
            return 0.0
        one = self._pace.step_seconds(len(decoding))
        steps = int((self._time_left + seconds) / one)
        self._time_left = self._time_left + seconds - steps * one
        self.steps += steps
        for request in decoding:
            if not request.to_compute and request.blocks:  # not preempted meanwhile
                self._extend(request, steps)
        return seconds

    def _extend(self, request: _Request, tokens: int) -> None:
        """Give a request its next tokens, and the blocks for them; the last admitted pay where there are none."""
        tokens = min(tokens, request.answer - request.generated)
        needed = _blocks_for(request.prompt + request.generated + tokens - self._prefix_tokens) - request.blocks
        while needed > self.free:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return
        request.blocks += needed
        self._used += needed
        request.generated += tokens
        self.generation_tokens += tokens

    def _preempt(self, request: _Request) -> None:
        self.running.remove(request)
        self._release(request)
        self.waiting.appendleft(request)
        self.preemptions += 1
        self._preempted = True

    # --- requests go -----------------------------------------------------------------------------------------

    def _finish(self) -> None:
        done = [request for request in self.running if request.generated >= request.answer]
        for request in done:
            self.running.remove(request)
            self._release(request)
            self.finished[request.reason] += 1
            self.prompt_lengths.add(request.prompt)
            self.generation_lengths.add(request.generated)

    def _release(self, request: _Request) -> None:
        self._prefix_users[request.prefix] -= 1
        shared = 0 if self._prefix_users[request.prefix] else self._prefix_tokens // BLOCK_TOKENS
        self._used -= request.blocks + shared
        self._leaking += request.blocks * self.leak
        lost = min(int(self._leaking), self.free)
        self._leaking -= lost
        self.lost += lost
        request.blocks = 0


def _blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
