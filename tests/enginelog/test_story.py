"""Starts, what each took, and how it ended: the story of a log, whole or begun in the middle."""

from pathlib import Path

import pytest

from oomwatch.enginelog.events import Budget, Refused
from oomwatch.enginelog.reader import parse, read
from oomwatch.enginelog.story import StartUp, Story, clocked, tell

CAPTURES = Path(__file__).parents[1] / "data" / "captures"
GIB = 1 << 30
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU {gpu} has a total capacity of 24.00 "
    "GiB of which 1.00 GiB is free. Including non-PyTorch memory, this process has 22.00 GiB memory in use. Of the "
    "allocated memory 20.00 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated."
)
SERVER = "(APIServer pid=1) INFO {clock} [x.py:1] vLLM API server version 0.11.0"
CORE = (
    "(EngineCore_DP0 pid=2) INFO {clock} [x.py:1] Initializing a V1 LLM engine (v0.11.0) with config: max_seq_len=8192"
)
WEIGHTS = "(EngineCore_DP0 pid=2) INFO {clock} [x.py:1] Model loading took 14.00 GiB and 20.0 seconds"
KV = "(EngineCore_DP0 pid=2) INFO {clock} [x.py:1] Available KV cache memory: 4.00 GiB"
POOL = "(EngineCore_DP0 pid=2) INFO {clock} [x.py:1] GPU KV cache size: 9,000 tokens"
READY = "(APIServer pid=1) INFO:     Application startup complete."
FAILED = "(EngineCore_DP0 pid=2) ERROR {clock} [x.py:1] EngineCore failed to start."
FATAL = "(EngineCore_DP0 pid=2) ERROR {clock} [x.py:1] EngineCore encountered a fatal error."
ERROR = "(EngineCore_DP0 pid=2) ERROR {clock} [x.py:1] "
FRAME = ERROR + '  File "x.py", line 1, in '


def told(*lines: str, step: int = 1) -> Story:
    """The story of lines a second apart (``step``)."""
    entries = []
    for number, line in enumerate(lines):
        at = number * step
        clock = f"11-30 {at // 3600:02d}:{at // 60 % 60:02d}:{at % 60:02d}"
        entry = parse(line.format(clock=clock, gpu=0).encode())
        if entry is not None:
            entries.append(entry)
    return tell(clocked(entries))


def of_capture(name: str) -> list[StartUp]:
    with (CAPTURES / name).open("rb") as log:
        return list(tell(clocked(read(log))).starts)


@pytest.mark.parametrize("path", sorted(CAPTURES.glob("*/*.log")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_log_of_a_real_engine_is_one_start_that_ended(path: Path) -> None:
    starts = of_capture(f"{path.parent.name}/{path.name}")
    if path.stem in ("pip-freeze", "plugin-probe", "plugin-blockpool-probe"):
        assert starts == []
        return
    (start,) = starts
    assert start.version is not None
    assert path.parent.name.startswith(start.version.removesuffix(".post2"))
    assert start.phase == "over"
    assert start.failed == path.stem.startswith("failure")
    killed = ("worker-sigkilled", "dp2-then-enginecore-sigkill", "engine-core-exception")
    assert (start.stopped is None) == (start.failed or path.stem in killed)
    assert start.shortages == []


def test_real_refusals_are_told_once_with_their_numbers() -> None:
    (long,) = of_capture("0.32.0/failure-max-model-len-too-large.log")
    (refusal,) = long.refusals
    assert refusal.refused == Refused("context_too_long", 0, 0, max_model_len=4096, fitting_max_model_len=1024)
    (host,) = of_capture("0.32.0/failure-kv-space-exceeds-memory.log")
    assert [r.refused.reason for r in host.refusals] == ["host_memory"]
    (other,) = of_capture("0.32.0/failure-block-size-16.log")
    assert other.refusals == []


def test_the_ranks_of_a_data_parallel_server_are_one_start_with_a_pool_each() -> None:
    (start,) = of_capture("0.32.0/dp2-then-enginecore-sigkill.log")
    assert {rank: pool.tokens for rank, pool in start.pools.items()} == {"0": 1056, "1": 1056}
    assert start.deaths[0].how == "core_died"


def test_lines_of_one_start_add_up_to_its_budget() -> None:
    start = told(SERVER, CORE, WEIGHTS, KV, POOL).now
    assert start is not None
    assert start.budgets == {("0", "0"): Budget(weights=14 * GIB, kv_pool=4 * GIB)}
    assert start.pools["0"].tokens == 9000
    assert start.max_model_len == 8192
    assert start.phase == "starting"


@pytest.mark.parametrize(
    ("lines", "step"),
    [
        ((SERVER, CORE), "load"),
        ((SERVER, CORE, WEIGHTS), "profile"),
        ((SERVER, CORE, WEIGHTS, KV), "kv_pool"),
        ((SERVER, CORE, WEIGHTS, KV, POOL), "graphs"),
        ((SERVER, CORE, WEIGHTS, KV, POOL, FRAME + "compile_or_warm_up_model"), "warm_up"),
        ((CORE, WEIGHTS, FRAME + "profile_run", FRAME + "execute_model"), "profile"),
    ],
)
def test_an_error_before_it_serves_is_the_start_s_with_its_step(lines: tuple[str, ...], step: str) -> None:
    start = told(*lines, ERROR + OOM, FAILED).now
    assert start is not None
    (shortage,) = start.shortages
    assert (shortage.step, shortage.serving) == (step, False)
    assert start.failed


@pytest.mark.parametrize("lines", [(FATAL, ERROR + OOM), (ERROR + OOM, FATAL)])
def test_an_error_of_a_serving_engine_is_no_start_s(lines: tuple[str, ...]) -> None:
    start = told(SERVER, CORE, WEIGHTS, KV, POOL, READY, *lines).now
    assert start is not None
    (shortage,) = start.shortages
    assert (shortage.step, shortage.serving) == ("serve", True)
    assert not start.failed


def test_of_a_log_that_begins_in_the_middle_only_a_traceback_or_a_page_tells() -> None:
    alone = told(FATAL, ERROR + OOM).now
    assert alone is not None
    assert alone.shortages[0].serving is None
    traced = told(FATAL, FRAME + "run_busy_loop", ERROR + OOM).now
    assert traced is not None
    assert traced.shortages[0].serving is True
    story = Story()
    story.answered(100.0, life=0)
    entry = parse((ERROR + OOM).format(clock="11-30 09:00:00", gpu=0).encode())
    assert entry is not None
    story.apply(200.0, entry)
    assert story.now is not None
    assert story.now.shortages[0].serving is True


def test_the_next_start_begins_a_new_one_however_the_last_ended() -> None:
    assert len(told(SERVER, CORE, WEIGHTS, ERROR + OOM, FAILED, SERVER, CORE, WEIGHTS).starts) == 2
    assert len(told(SERVER, CORE, READY, SERVER, CORE).starts) == 2  # killed, without a word
    assert len(told(CORE, WEIGHTS, CORE).starts) == 2  # no server's line: of LLM(...) in a script
    assert len(told(FATAL, KV, step=60).starts) == 2  # lines of a start whose beginning was not read


def test_every_rank_that_runs_out_at_once_is_one_failure_told_by_rank() -> None:
    lines = [f"(Worker_TP{n} pid={10 + n}) ERROR {{clock}} [x.py:1] {OOM.replace('{gpu}', str(n))}" for n in range(4)]
    start = told(SERVER, CORE, READY, *lines, FATAL).now
    assert start is not None
    assert [shortage.error.gpu for shortage in start.shortages] == [0, 1, 2, 3]
    again = told(SERVER, CORE, READY, ERROR + OOM, FATAL, ERROR + OOM, OOM).now
    assert again is not None
    assert len(again.shortages) == 1


def test_an_error_hours_after_a_start_is_not_taken_for_one_of_its_steps_where_the_log_leaves_out_that_it_served() -> (
    None
):
    start = told(SERVER, CORE, WEIGHTS, KV, POOL, ERROR + OOM, step=7200).now
    assert start is not None
    (shortage,) = start.shortages
    assert (shortage.step, shortage.serving) == (None, None)


def test_the_end_of_a_server_that_was_told_to_stop_is_no_death() -> None:
    start = told(SERVER, CORE, READY, "[shutdown] API server: shutdown triggered", FATAL).now
    assert start is not None
    assert (start.died, start.deaths) == (None, [])
    assert start.stopped is not None


def test_a_front_end_that_answers_for_a_dead_engine_revives_nothing() -> None:
    story = told(SERVER, CORE, READY, FATAL)
    assert story.now is not None
    story.now.life = 0
    story.answered(1e9, life=0)
    assert [start.phase for start in story.starts] == ["over"]
    story.answered(1e9, life=1)
    assert [start.phase for start in story.starts] == ["over", "serving"]


def test_lines_that_are_read_after_the_page_has_answered_are_of_the_same_start() -> None:
    story = told(SERVER, CORE)
    assert story.now is not None
    begun = story.now.since
    story.answered(begun + 30)
    for line in (WEIGHTS, KV, POOL):
        entry = parse(line.format(clock="11-30 00:00:31").encode())
        assert entry is not None
        story.apply(begun + 40, entry)
    (start,) = story.starts
    assert start.pools["0"].tokens == 9000
    assert start.budgets["0", "0"].kv_pool == 4 * GIB
    assert start.phase == "serving"


def test_a_new_year_goes_on_from_the_old_one() -> None:
    clocks = ("12-31 23:59:59", "01-01 00:00:01")
    entries = [entry for clock in clocks if (entry := parse(FAILED.format(clock=clock).encode())) is not None]
    first, second = (t for t, _ in clocked(entries))
    assert second - first == 2
