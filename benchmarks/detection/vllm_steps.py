"""Steps a real vLLM by hand; run with the Python of an environment that has it, and without this package.

Reads ``{"model", "engine": arguments of LLMEngine, "requests": [[step of arrival, prompt's tokens, output tokens],
...], "steps"}`` from standard input, writes what the scheduler holds after each step to the file that its one argument
names: ``[[running, waiting, used blocks, preemptions, finished], ...]``.
"""

from __future__ import annotations

import json
import sys

from vllm import SamplingParams  # type: ignore[import-not-found] # it is in another environment
from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found] # it is in another environment
from vllm.v1.engine.llm_engine import LLMEngine  # type: ignore[import-not-found] # it is in another environment


def main() -> None:
    asked = json.load(sys.stdin)
    engine = LLMEngine.from_engine_args(EngineArgs(model=asked["model"], **asked["engine"]))
    scheduler = engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    usable = pool.num_gpu_blocks - 1
    arrivals = sorted(enumerate(asked["requests"]), key=lambda request: request[1][0])
    preempted: dict[str, int] = {}
    finished, rows = 0, []
    for step in range(asked["steps"]):
        while arrivals and arrivals[0][1][0] <= step:
            number, (_, prompt, output) = arrivals.pop(0)
            parameters = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0, detokenize=False)
            engine.add_request(str(number), {"prompt_token_ids": prompt}, parameters)
        if engine.has_unfinished_requests():
            finished += sum(output.finished for output in engine.step())
        for request in scheduler.requests.values():
            preempted[request.request_id] = request.num_preemptions
        running, waiting = scheduler.get_request_counts()
        rows.append([running, waiting, usable - pool.get_num_free_blocks(), sum(preempted.values()), finished])
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(rows, file)


if __name__ == "__main__":
    main()
