"""Recordings with what oomwatch-probe tells: the lines of the format lead to the verdicts that need them."""

from __future__ import annotations

from typing import Any

from tests.test_replay import rows_of

GIB, MIB = 1 << 30, 1 << 20
HOUR, MINUTE = 3600, 60
PID, GPU, TOTAL = 4712, "GPU-aaaa", 80 * GIB
HEADER = {
    "oomwatch_recording": 1,
    "start": "2026-11-01T00:00:00Z",
    "engines": [{"name": "chat", "target": "http://127.0.0.1:8000/metrics", "pids": [PID], "gpus": [GPU]}],
}
Line = dict[str, Any]


def page(t: float) -> Line:
    samples = {"num_requests_running": 6, "num_requests_waiting": 0, "kv_cache_usage_perc": 0.3}
    samples |= {"prompt_tokens_total": t, "generation_tokens_total": t, "iteration_tokens_total_count": t}
    named = {f'vllm:{name}{{engine="0",model_name="m"}}': value for name, value in samples.items()}
    named['vllm:request_success_total{engine="0",model_name="m",finished_reason="stop"}'] = round(t / 10)
    named['vllm:cache_config_info{engine="0",num_gpu_blocks="1001",block_size="16"}'] = 1
    return {"t": t, "scrape": {"engine": "chat", "ok": True, "seconds": 0.01, "samples": named}}


def device(t: float, held: int) -> Line:
    memory = {"total": TOTAL, "reserved": 0, "used": held, "free": TOTAL - held}
    listed = [{"pid": PID, "used": held}]
    return {"t": t, "gpu": {"uuid": GPU, "index": 0, "name": "H100", "memory": memory, "processes": listed}}


def allocator(t: float, allocated: int, reserved: int, largest: int, retries: int = 0) -> Line:
    stats = {
        "allocated_bytes.all.current": allocated,
        "reserved_bytes.all.current": reserved,
        "inactive_split_bytes.all.current": reserved - allocated - largest,
        "num_alloc_retries": retries,
        "num_ooms": 0,
    }
    return {"t": t, "allocator": {"pid": PID, "gpu": GPU, "stats": stats, "largest_free_block": largest}}


def concluded(lines: list[Line]) -> dict[str, list[tuple[str, str]]]:
    """By verdict: each state with its killer, in their order."""
    course: dict[str, list[tuple[str, str]]] = {}
    for row in rows_of(lines, HEADER):
        if "verdict" in row:
            course.setdefault(row["verdict"], []).append((row["state"], row["killer"]))
    return course


def test_retries_and_ever_smaller_blocks_are_fragmentation() -> None:
    lines: list[Line] = []
    for t in range(0, 3 * HOUR, 60):
        broken = max(0, t - HOUR)
        largest = GIB if not broken else 64 * MIB
        reserved = 70 * GIB + (2 * GIB if broken else GIB)
        lines += [page(t), device(t, reserved + 700 * MIB), allocator(t, 70 * GIB, reserved, largest, broken // 600)]
        lines[-2]["gpu"]["memory"] |= {"used": TOTAL - 300 * MIB, "free": 300 * MIB}
    states = concluded(lines)["allocator-fragmentation"]
    assert ("ticket", "fragmentation") in states
    assert states[-1] == ("page", "fragmentation")


def test_growth_that_is_reserved_and_not_handed_out_is_named_so() -> None:
    def growth(live_share: float) -> dict[str, list[tuple[str, str]]]:
        lines: list[Line] = []
        for t in range(0, 20 * HOUR, 450):
            grown = max(0, t - 8 * HOUR) * 512 * MIB // HOUR // (2 * MIB) * 2 * MIB
            live = int(live_share * grown)
            held = 60 * GIB + grown
            lines += [page(t), device(t, held), allocator(t, 55 * GIB + live, 58 * GIB + grown, GIB)]
        return concluded(lines)

    in_pieces = growth(0.1)
    assert ("ticket", "fragmentation") in in_pieces["unaccounted-growth"]
    assert not {state for state, _ in in_pieces["gpu-memory-leak"]} & {"ticket", "page"}
    in_tensors = growth(0.9)
    assert ("ticket", "leak") in in_tensors["gpu-memory-leak"]
    assert "unaccounted-growth" not in in_tensors


def test_blocks_of_nobody_are_a_proven_leak_within_seconds() -> None:
    lines: list[Line] = []
    for t in range(0, 10 * MINUTE, 5):
        lost = 200 if t >= 5 * MINUTE else 0
        owners = {"pid": PID, "rank": "0", "age": 1, "total": 1000, "free": 600 - lost, "living": 400, "finished": 0}
        lines += [page(t)] if t % 15 == 0 else []
        lines.append({"t": t, "owners": {**owners, "ownerless": lost}})
    assert concluded(lines)["kv-block-leak"][-2:] == [("clear", "leak"), ("page", "leak")]
