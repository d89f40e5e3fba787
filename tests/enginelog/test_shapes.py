"""Each line that vLLM and PyTorch write about memory is read to its numbers, whatever stands before it."""

import io
import re
from pathlib import Path

import pytest

from oomwatch.enginelog.events import (
    Budget,
    Died,
    Event,
    Fitted,
    KvPool,
    Load,
    OutOfMemory,
    Preempted,
    Ready,
    Refused,
    Settings,
    Slept,
    Start,
    Step,
    Stopped,
)
from oomwatch.enginelog.reader import parse, read
from oomwatch.enginelog.shapes import SHAPES, TABLE

GIB = 1 << 30
MIB = 1 << 20
CAPTURES = Path(__file__).parents[1] / "data" / "captures"


def gib(number: float) -> int:
    return round(number * GIB)


def mib(number: float) -> int:
    return round(number * MIB)


LINES: list[tuple[str, Event]] = [
    ("vLLM API server version 0.9.1", Start(version="0.9.1")),
    ("  █▄█▀ █     █     █     █  version 0.32.0", Start(version="0.32.0")),
    (
        ("Initializing a V1 LLM engine (v0.29.1rc1.dev41) with config: model='a', max_seq_len=124000, "
        "tensor_parallel_size=2, data_parallel_size=1"),
        Start(True, "0.29.1rc1.dev41", 124000, 2, data_parallel_size=1),
    ),
    ("Initializing an LLM engine (v0.6.3.post1) with config: max_seq_len=4096", Start(True, "0.6.3.post1", 4096)),
    (
        "non-default args: {'model': 'a', 'max_model_len': 4096, 'gpu_memory_utilization': 0.95, 'max_num_seqs': 64}",
        Settings(0.95, 4096, 64),
    ),
    (
        "args: Namespace(api_key='secret', max_model_len=512, gpu_memory_utilization=0.9, max_num_seqs=None)",
        Settings(0.9, 512),
    ),
    ("init engine (profile, create kv cache, warmup model) took 2.91 s", Ready(seconds=2.91)),
    ("Application startup complete.", Ready(server=True)),
    ("[shutdown] API server: shutdown triggered", Stopped()),
    ("Shutting down FastAPI HTTP server.", Stopped()),
    ("Sleep mode freed 61.20 GiB memory, 1.53 GiB memory is still in use.", Slept(gib(61.2), gib(1.53))),
    ("Loading model weights took 14.9888 GB", Budget(weights=gib(14.9888))),
    ("Model loading took 17.4187 GB and 74.802 seconds", Budget(weights=gib(17.4187), seconds=74.802)),
    ("Model loading took 18.71 GiB memory and 82.114 seconds", Budget(weights=gib(18.71), seconds=82.114)),
    (
        "the current vLLM instance can use total_gpu_memory (15.77GiB) x gpu_memory_utilization (0.95) = 14.98GiB",
        Budget(total=gib(15.77), utilization=0.95, promised=gib(14.98)),
    ),
    (
        ("model weights take 12.55GiB; non_torch_memory takes 0.09GiB; PyTorch activation peak memory takes 0.55GiB; "
        "the rest of the memory reserved for KV Cache is 1.79GiB."),
        Budget(weights=gib(12.55), non_torch=gib(0.09), activation=gib(0.55), kv_pool=gib(1.79)),
    ),
    ("Available KV cache memory: -1.27 GiB", Budget(kv_pool=gib(-1.27))),
    (
        ("Free memory on device (78.20/79.11 GiB) on startup. Desired GPU memory utilization is (0.9, 71.2 GiB). "
         "Actual usage is 14.99 GiB for weight, 5.25 GiB for peak activation, 0.14 GiB for non-torch memory, and 0.55 "
         "GiB for CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=53900000000` to fit "
         "into requested memory, or `--kv-cache-memory=61000000000` to fully utilize gpu memory. Current kv cache "
         "memory in use is 54638444544 bytes."),
        Budget(
            total=gib(79.11), free=gib(78.2), utilization=0.9, promised=gib(71.2), weights=gib(14.99),
            activation=gib(5.25), non_torch=gib(0.14), graphs=gib(0.55), kv_pool=54638444544,
        ),
    ),
    (
        ("Free memory on device cuda:0 (78.2/79.11 GiB) on startup. Desired GPU memory utilization is (0.92, 72.78 "
        "GiB). Actual usage is 15.2 GiB for consumed memory (weights + non-torch), 3.1 GiB for peak activation, and "
        "0.6 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with "
        "`--kv-cache-memory-bytes=57000000000` (53.1 GiB) to fit into requested memory. Current kv cache memory in "
        "use is 54.48 GiB."),
        Budget(
            total=gib(79.11), free=gib(78.2), utilization=0.92, promised=gib(72.78), consumed=gib(15.2),
            activation=gib(3.1), graphs=gib(0.6), kv_pool=gib(54.48),
        ),
    ),
    (
        ("Initial free memory 78.20 GiB, reserved 20.00 GiB memory for KV Cache as specified by kv_cache_memory_bytes "
        "config and skipped memory profiling."),
        Budget(free=gib(78.2), kv_pool=gib(20), fixed=True),
    ),
    (
        ("Applying persisted startup plan (fingerprint ab12): kv_cache_memory_bytes=1073741824 (1.00 GiB), "
        "recorded free"),
        Budget(kv_pool=GIB, fixed=True),
    ),
    ("Explicitly set (1.0/14.96) GiB for KV cache on node 0.", Budget(total=gib(14.96), kv_pool=GIB, fixed=True)),
    (
        ("Auto set (2.5/14.96) GiB for KV cache on node 0, with 4.0 GiB requested memory for the worker. 1.5 GiB "
         "memory was consumed by non-kv usages."),
        Budget(total=gib(14.96), kv_pool=gib(2.5), promised=gib(4)),
    ),
    ("Graph capturing finished in 31 secs, took 0.46 GiB", Budget(graphs=gib(0.46), seconds=31)),
    ("Graph capturing finished in 12 secs.", Budget(seconds=12)),
    ("Estimated CUDA graph memory: 0.08 GiB total", Budget(graphs_estimate=gib(0.08))),
    (
        "CUDA graph pool memory: 0.46 GiB (actual), 0.08 GiB (estimated), difference: 0.38 GiB (82.6%).",
        Budget(graphs=gib(0.46), graphs_estimate=gib(0.08)),
    ),
    ("# cuda blocks: 229, # CPU blocks: 512", KvPool(blocks=229, cpu_blocks=512)),
    ("# GPU blocks: 7406, # CPU blocks: 2048", KvPool(blocks=7406, cpu_blocks=2048)),
    ("GPU KV cache size: 86,432 tokens", KvPool(tokens=86432)),
    ("Maximum concurrency for 8,192 tokens per request: 10.55x", KvPool(max_model_len=8192, concurrency=10.55)),
    (
        "CPU KV cache size: 1,056 tokens, Maximum concurrency for 512 tokens per request: 2.06x",
        KvPool(tokens=1056, max_model_len=512, concurrency=2.06),
    ),
    ("Auto-fit max_model_len: reduced from 131072 to 98304 to fit", Fitted(131072, 98304)),
    (
        ("Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 2.0 tokens/s, Running: 3 reqs, Swapped: 1 "
        "reqs, Pending: 18 reqs, GPU KV cache usage: 90.5%, CPU KV cache usage: 10.0%."),
        Load(3, 18, 0.905, swapped=1),
    ),
    (
        ("Engine 000: Avg prompt throughput: 98.0 tokens/s, Avg generation throughput: 194.7 tokens/s, Running: 3 "
         "reqs, Waiting: 18 reqs, Deferred: 2 reqs, Preemptions: 4, GPU KV cache usage: 87.5%, Prefix cache hit rate: "
         "0.0%"),
        Load(3, 18, 0.875, preemptions=4),
    ),
    (
        ("Sequence group cmpl-1 is preempted by PreemptionMode.RECOMPUTE mode because there is not enough KV cache "
        "space. This can affect the end-to-end performance. total_num_cumulative_preemption=51"),
        Preempted(51),
    ),
    (
        ("ValueError: Free memory on device (31.44/47.38 GiB) on startup is less than desired GPU memory utilization "
        "(0.95, 45.01 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."),
        Refused("budget_above_free", gib(45.01), gib(31.44), gib(47.38), 0.95),
    ),
    (
        ("ValueError: Free memory on device cuda:0 (31.44/47.38 GiB) on startup is less than desired GPU memory "
        "utilization (0.95, 45.01 GiB)."),
        Refused("budget_above_free", gib(45.01), gib(31.44), gib(47.38), 0.95),
    ),
    (
        ("ValueError: Free memory on device cuda:0 (10.0/47.38 GiB) on startup is less than the engine's budget after "
        "excluding external process's weights (0.9, 12.64 GiB)."),
        Refused("budget_above_free", gib(12.64), gib(10), gib(47.38), 0.9),
    ),
    (
        ("ValueError: Externally held weights on device cuda:0 (45.0/47.38 GiB) exceed the desired GPU memory "
        "utilization (0.9, 42.64 GiB)."),
        Refused("weights_above_budget", gib(45), gib(42.64), gib(47.38), 0.9),
    ),
    (
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when",
        Refused("no_room"),
    ),
    (
        ("ValueError: The model's max seq len (4096) is larger than the maximum number of tokens that can be stored "
        "in KV cache (3664). Try increasing"),
        Refused("context_too_long", max_model_len=4096, tokens=3664),
    ),
    (
        ("ValueError: To serve at least one request with the models's max seq len (116160), (4.43 GB KV cache is "
        "needed, which is larger than the available KV cache memory (3.48 GB). Try increasing"),
        Refused("context_too_long", gib(4.43), gib(3.48), max_model_len=116160),
    ),
    (
        ("ValueError: To serve at least one request with the model's max seq len (4096), (0.5 GiB KV cache is needed, "
        "which is larger than the available KV cache memory (0.2 GiB). Based on the available memory, the estimated "
        "maximum model length is 1024. Try increasing"),
        Refused("context_too_long", gib(0.5), gib(0.2), max_model_len=4096, fitting_max_model_len=1024),
    ),
    (
        "AssertionError: Error in memory profiling. Initial free memory 82.94 GiB, current free memory 90.17 GiB. This",
        Refused("profiling_disturbed", available=gib(82.94), free_now=gib(90.17)),
    ),
    (
        "AssertionError: Error in memory profiling. Initial free memory 5242880, current free memory 9437184. This",
        Refused("profiling_disturbed", available=5242880, free_now=9437184),
    ),
    (
        "ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (317). Each decode sequence",
        Refused("too_many_sequences", max_num_seqs=1024, blocks=317),
    ),
    (
        ("ValueError: Available memory on node 0 (12.92/14.96 GiB) on kv cache allocation is less than requested "
         "memory for kv (100.0 GiB). Decrease"),
        Refused("host_memory", gib(100), gib(12.92), gib(14.96)),
    ),
    (
        ("ValueError: Too large swap space. 64.00 GiB out of the 31.20 GiB total CPU memory is allocated for the swap "
        "space."),
        Refused("swap_space", gib(64), total=gib(31.2)),
    ),
    (
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 40.00 MiB. GPU 0 has a total capacity of "
        "23.69 GiB of which 26.88 MiB is free. Including non-PyTorch memory, this process has 23.66 GiB memory in "
        "use. Of the allocated memory 23.04 GiB is allocated by PyTorch, with 372.00 MiB allocated in private pools "
        "(e.g., CUDA Graphs), and 9.41 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory "
        "is large try"),
        OutOfMemory(
            mib(40), mib(26.88), gib(23.69), 0, gib(23.66), 0, gib(23.04), mib(372), mib(9.41)
        ),
    ),
    (
        ("torch.cuda.OutOfMemoryError: HIP out of memory. Tried to allocate 1.06 GiB. GPU 3 has a total capacty of "
        "21.99 GiB of which 590.44 MiB is free. Process 77 has 8.00 GiB memory in use. Including non-PyTorch memory, "
        "this process has 13.41 GiB memory in use. Of the allocated memory 12.02 GiB is allocated by PyTorch, and "
        "402.13 MiB is reserved by PyTorch but unallocated."),
        OutOfMemory(
            gib(1.06), mib(590.44), gib(21.99), 3, gib(13.41), gib(8), gib(12.02), reserved=mib(402.13)
        ),
    ),
    (
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.88 GiB. GPU 0 has a total capacity of 21.96 "
        "GiB of which 1.29 GiB is free. Process 2843911 has 0 bytes memory in use. Of the allocated memory 19.02 GiB "
        "is allocated by PyTorch, and 1.32 GiB is reserved by PyTorch but unallocated."),
        OutOfMemory(gib(1.88), gib(1.29), gib(21.96), 0, allocated=gib(19.02), reserved=gib(1.32)),
    ),
    (
        ("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 1; 23.69 GiB total "
        "capacity; 22.01 GiB already allocated; 10.06 MiB free; 22.50 GiB reserved in total by PyTorch) If reserved "
        "memory is >>"),
        OutOfMemory(
            mib(20), mib(10.06), gib(23.69), 1, allocated=gib(22.01), reserved=gib(22.5) - gib(22.01)
        ),
    ),
    (
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try",
        OutOfMemory(dummy_requests=1024),
    ),
    (
        "RuntimeError: CUDA out of memory occurred when warming up pooler (task=embed) with 256 dummy requests.",
        OutOfMemory(dummy_requests=256),
    ),
    ("RuntimeError: CUDA error: out of memory", OutOfMemory()),
    ("torch.OutOfMemoryError: CUDA out of memory.", OutOfMemory()),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU", OutOfMemory(2 * GIB)),
    (
        (
            "OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 "
            "GiB of which 1.00 GiB is free.')"
        ),
        OutOfMemory(2 * GIB, GIB, 24 * GIB, 0),
    ),
    (
        (
            "RuntimeError: Worker failed with error 'CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
            "capacity of 24.00 GiB of which 1.00 GiB is free.', please check the stack trace above for the root cause"
        ),
        OutOfMemory(2 * GIB, GIB, 24 * GIB, 0),
    ),
    ("NCCL WARN Cuda failure 2 'out of memory'", OutOfMemory()),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)", OutOfMemory()),
    (
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 107374182400 bytes. Error code 12 (Cannot allocate memory)"),
        OutOfMemory(100 * GIB, host=True),
    ),
    ("MemoryError", OutOfMemory(host=True)),
    ('  File "<site-packages>/vllm/v1/worker/gpu_worker.py", line 219, in determine_available_memory', Step("profile")),
    ('  File "<site-packages>/vllm/v1/engine/core.py", line 588, in run_busy_loop', Step("serve")),
    ("EngineCore failed to start.", Died("start_failed")),
    (
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        Died("start_failed"),
    ),
    ("RuntimeError: Engine process failed to start. See stack trace for the root cause.", Died("start_failed")),
    ("EngineCore encountered a fatal error.", Died("fatal")),
    ("EngineCore hit an exception: Traceback (most recent call last):", Died("fatal")),
    (
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for",
        Died("fatal"),
    ),
    ("Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor.", Died("worker_died", -9)),
    ("Worker proc VllmWorker-1 died unexpectedly, shutting down executor.", Died("worker_died")),
    ("Engine core proc EngineCore_DP0 died unexpectedly, shutting down client.", Died("core_died")),
    ("[shutdown] MPClient: engine core exited unexpectedly", Died("core_died")),
    ("Worker VllmWorkerProcess pid 4711 died, exit code: -9", Died("worker_died", -9)),
    ("Engine background task failed", Died("loop_ended")),
    ("vllm.engine.async_llm_engine.AsyncEngineDeadError: Task finished unexpectedly. This should never happen!",
     Died("loop_ended")),
]  # fmt: skip

PREFIXES = [
    "INFO 11-30 09:00:00 [file.py:12] ",
    "ERROR 11-01 00:40:08 async_llm_engine.py:61] ",
    "(EngineCore_DP0 pid=3310) ERROR 11-01 00:02:52 [v1/engine/core.py:1121] ",
    "\x1b[1;36m(EngineCore_DP0 pid=3310)\x1b[0;0m \x1b[31mERROR\x1b[0m 11-01 00:02:52 [core.py:1121] ",
    "(APIServer pid=29351) (EngineCore pid=29542) INFO 11-29 16:58:19 [core.py:1468] ",
]


@pytest.mark.parametrize(("line", "event"), LINES)
def test_a_line_is_read_to_its_numbers_whatever_stands_before_it(line: str, event: Event) -> None:
    entries = [parse(f"{prefix}{line}\n".encode()) for prefix in PREFIXES]
    assert [entry and entry.event for entry in entries] == [event] * len(PREFIXES)


def test_a_line_is_found_in_a_stream_as_well_as_alone() -> None:
    for line, event in LINES:
        level = "ERROR" if isinstance(event, Refused | OutOfMemory | Step | Died) else "INFO"
        stream = io.BytesIO(f"noise\n{level} 11-30 09:00:00 [x.py:1] {line}\nnoise\n".encode())
        assert [entry.event for entry in read(stream)] == [event], line


def test_every_shape_is_read_from_some_line() -> None:
    def shape_of(line: bytes) -> str:
        return next(one.shape.template for one in SHAPES if one.shape.literal in line and one.read(line) is not None)

    read = {shape_of(f"] {line}".encode()) for line, _ in LINES}
    assert {shape.template for shape in TABLE} - read <= {r"MQEngineDeadError", r"std::bad_alloc"}


CAPTURED = sorted(path for path in CAPTURES.glob("*/*.log") if path.name != "pip-freeze.log")


@pytest.mark.parametrize("path", CAPTURED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_a_release_wrote_is_within_the_range_of_its_shape(path: Path) -> None:
    release = tuple(map(int, re.findall(r"\d+", path.parent.name)[:3]))
    for line in path.read_bytes().splitlines():
        for shape in SHAPES:
            if shape.shape.literal in line and shape.read(line) is not None and parse(line) is not None:
                assert shape.shape.in_release(release), (shape.shape.template, line[:200])
                break
