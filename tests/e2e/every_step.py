"""Drives a real vLLM scheduler by hand and counts its blocks before and after each of its calls.

    python -m tests.e2e.every_step CLASS STEPS_IN_FLIGHT MODEL

Runs in an environment with vLLM; needs no server, no worker and no weights: every token is 7. With two steps in flight
the next one is scheduled before the output of the last one is there, as asynchronous scheduling does it. Prints one
JSON object. Written against vLLM 0.32.0.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections import deque
from collections.abc import Iterable
from typing import Any

from oomwatch_probe.blocks import Pool

BLOCK_TOKENS, BLOCKS = 32, 33
FIRST_TOKEN = 10
MOST_STEPS = 5000
FORGET_EVERY = 20


def vllm(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"vllm.{module}"), name)


class Driver:
    def __init__(self, class_name: str, in_flight: int, model: str) -> None:
        arguments = vllm("engine.arg_utils", "EngineArgs")(
            model=model, dtype="bfloat16", max_model_len=512, enforce_eager=True, block_size=BLOCK_TOKENS
        )
        config = arguments.create_engine_config()
        config.cache_config.num_gpu_blocks = BLOCKS
        config.scheduler_config.async_scheduling = in_flight > 1
        module = {"Scheduler": "scheduler", "AsyncScheduler": "async_scheduler"}[class_name]
        self.scheduler = vllm(f"v1.core.sched.{module}", class_name)(
            vllm_config=config,
            kv_cache_config=self._kv_cache_config(),
            structured_output_manager=vllm("v1.structured_output", "StructuredOutputManager")(config),
            block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        self._hasher = self._block_hasher(config)
        self._in_flight = in_flight
        self._random = random.Random(1)
        self._names = 0
        self.pool = Pool(self.scheduler)
        self.seen: dict[str, int] = dict.fromkeys(("counts", "wrong", "most", "hits", "preemptions", "steps"), 0)
        self.lost = 0
        preempt = self.scheduler._preempt_request

        def counted(*values: Any, **named: Any) -> Any:
            self.seen["preemptions"] += 1
            return preempt(*values, **named)

        self.scheduler._preempt_request = counted

    def _kv_cache_config(self) -> Any:
        spec = vllm("v1.kv_cache_interface", "FullAttentionSpec")(
            block_size=BLOCK_TOKENS, num_kv_heads=4, head_size=32, dtype=importlib.import_module("torch").bfloat16
        )
        group = vllm("v1.kv_cache_interface", "KVCacheGroupSpec")(["layer"], spec)
        return vllm("v1.kv_cache_interface", "KVCacheConfig")(
            num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[group]
        )

    def _block_hasher(self, config: Any) -> Any:
        hash_function = vllm("utils.hashing", "get_hash_fn_by_name")(config.cache_config.prefix_caching_hash_algo)
        vllm("v1.core.kv_cache_utils", "init_none_hash")(hash_function)
        return vllm("v1.core.kv_cache_utils", "get_request_block_hasher")(BLOCK_TOKENS, hash_function)

    def add(self, n: int, *, shared_prefix: bool = False) -> None:
        for _ in range(n):
            self._names += 1
            own = [FIRST_TOKEN + self._random.randrange(200) for _ in range(62)]
            prompt = [FIRST_TOKEN] * 2 * BLOCK_TOKENS + own[:3] if shared_prefix else own
            parameters = vllm("sampling_params", "SamplingParams")(
                max_tokens=self._random.choice([40, 150, 300]), ignore_eos=True, temperature=0.0
            )
            request = vllm("v1.request", "Request")(
                request_id=str(self._names),
                prompt_token_ids=prompt,
                sampling_params=parameters,
                pooling_params=None,
                block_hasher=self._hasher,
            )
            self.scheduler.add_request(request)

    def abort(self, n: int) -> None:
        names = [request.request_id for request in self.scheduler.running[:n]]
        self.scheduler.finish_requests(names, vllm("v1.request", "RequestStatus").FINISHED_ABORTED)
        self.count()

    def leak(self) -> None:
        """From now on each ``FORGET_EVERY``th block is not given back."""
        pool = self.scheduler.kv_cache_manager.block_pool
        free_blocks = pool.free_blocks
        freed = 0

        def forgetful(blocks: Iterable[Any]) -> Any:
            nonlocal freed
            given_back = []
            for block in blocks:
                freed += 1
                if freed % FORGET_EVERY or block.ref_cnt > 1:
                    given_back.append(block)
                else:
                    self.lost += 1
            return free_blocks(given_back)

        pool.free_blocks = forgetful

    def count(self) -> None:
        copied = self.pool.copy()
        assert copied is not None
        counted = self.pool.count(copied)
        owners = tuple(counted[f"blocks_{name}"] for name in ("living", "finished", "ownerless"))
        referenced = counted["blocks_referenced"]
        assert isinstance(referenced, int)
        self.seen["counts"] += 1
        self.seen["wrong"] += owners != (referenced - self.lost, 0, self.lost)
        self.seen["most"] = max(self.seen["most"], referenced)

    def run(self, until: int = MOST_STEPS) -> None:
        """Steps until nothing is left to do, or so many of them; what is in flight then is brought to its end."""
        flying: deque[tuple[Any, list[list[int]]]] = deque()
        steps = 0
        while (self.scheduler.has_requests() and steps < until) or flying:
            if len(flying) < self._in_flight and self.scheduler.has_requests() and steps < until:
                self.count()
                step = self.scheduler.schedule()
                self.count()
                steps += 1
                self.seen["hits"] += sum(new.num_computed_tokens for new in step.scheduled_new_reqs)
                flying.append((step, [self._sampled(name) for name in step.num_scheduled_tokens]))
                if len(flying) < self._in_flight and step.total_num_scheduled_tokens:
                    continue
            step, sampled = flying.popleft()
            names = list(step.num_scheduled_tokens)
            output = vllm("v1.outputs", "ModelRunnerOutput")(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            )
            self.scheduler.update_from_output(step, output)
            self.count()
        self.seen["steps"] += steps

    def _sampled(self, name: str) -> list[int]:
        request = self.scheduler.requests[name]
        at_its_end = request.num_computed_tokens >= request.num_tokens
        return [7] if at_its_end else []


def main(class_name: str, in_flight: str, model: str) -> None:
    driver = Driver(class_name, int(in_flight), model)
    driver.add(24)
    driver.run(100)
    driver.abort(3)
    driver.add(6, shared_prefix=True)
    driver.run(200)
    driver.add(6, shared_prefix=True)
    driver.run()
    healthy = dict(driver.seen)
    driver.leak()
    for _ in range(5):  # two at a time, so that none is preempted: it could find its own lost blocks again, as cached
        driver.add(2)
        driver.run()
    print(json.dumps({"healthy": healthy, "leaking": driver.seen, "lost": driver.lost}))


if __name__ == "__main__":
    main(*sys.argv[1:])
