"""What an engine's log says of its end: refused, out of memory at the start or later, dead. Its numbers decide."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from oomwatch.detectors.base import Subject
from oomwatch.enginelog.lines import line_of
from oomwatch.enginelog.reader import parse
from oomwatch.judge import Judge
from oomwatch.node import Node
from oomwatch.observations import EngineFacts, EngineScrape, EngineUpdate, LogLine, RankReading, SourceRun, Tick
from oomwatch.verdicts import Verdict

HOUR = 3600.0
GIB = 1 << 30
SERVER = "(APIServer pid=1) INFO 11-30 09:00:00 [x.py:1] vLLM API server version 0.9.1"
CORE = "(EngineCore_0 pid=2) INFO 11-30 09:00:00 [x.py:1] Initializing a V1 LLM engine (v0.9.1) with config: a=1"
WEIGHTS = "(EngineCore_0 pid=2) INFO 11-30 09:00:00 [x.py:1] Model loading took 14.00 GiB and 20.0 seconds"
BUDGET = (
    "INFO 11-30 09:00:00 [x.py:1] Free memory on device (23.2/24.00 GiB) on startup. Desired GPU memory utilization is "
    "(0.9, 21.6 GiB). Actual usage is 14.0 GiB for weight, 2.6 GiB for peak activation, 1.0 GiB for non-torch "
    "memory, and "
    "0.5 GiB for CUDAGraph memory. Current kv cache memory in use is 4.0 GiB."
)
READY = "INFO:     Application startup complete."
FAILED = "(EngineCore_0 pid=2) ERROR 11-30 09:00:00 [x.py:1] EngineCore failed to start."
FATAL = "(EngineCore_0 pid=2) ERROR 11-30 09:00:00 [x.py:1] EngineCore encountered a fatal error."
ABOVE_FREE = (
    "ValueError: Free memory on device (31.44/47.38 GiB) on startup is less than desired GPU memory utilization (0.95, "
    "45.01 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
TOO_LONG_V0 = (
    "ValueError: The model's max seq len (4096) is larger than the maximum number of tokens that can be stored "
    "in KV cache "
    "(3664). Try increasing"
)
TOO_LONG_V1 = (
    "ValueError: To serve at least one request with the models's max seq len (116160), (4.43 GB KV cache is "
    "needed, which "
    "is larger than the available KV cache memory (3.48 GB). Try increasing"
)
DISTURBED = (
    "AssertionError: Error in memory profiling. Initial free memory 82.94 GiB, current free memory 90.17 GiB. This"
)


def ran_out(wanted: float, free: float, reserved: float, gpu: int = 0) -> str:
    """PyTorch's sentence, which always suggests fragmentation; sizes in MiB."""
    return (
        f"(Worker_TP{gpu} pid={10 + gpu}) ERROR 11-30 09:00:00 [x.py:1] torch.OutOfMemoryError: CUDA out of "
        f"memory. Tried "
        f"to allocate {wanted:.2f} MiB. GPU {gpu} has a total capacity of 24.00 GiB of which {free:.2f} MiB is "
        f"free. Of the "
        f"allocated memory 20.00 GiB is allocated by PyTorch, and {reserved:.2f} MiB is reserved by PyTorch but "
        f"unallocated. "
        "If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
        "fragmentation."
    )


@dataclass
class Told:
    """One engine whose log is told line by line, and judged."""

    judge: Judge = field(default_factory=lambda: Judge(Node()))
    t: float = 1_800_000_000.0
    worst: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.judge.apply(EngineUpdate(self.t, EngineFacts("chat", target="http://127.0.0.1:8000/metrics")))

    def log(self, *lines: str, age: float = 0.0) -> Told:
        for line in lines:
            entry = parse(line.encode())
            if entry is not None:
                told = line_of(self.t, "chat", entry)
                fields = {**told.fields, "age": age} if age else told.fields
                self.judge.apply(LogLine(self.t, "chat", event=told.event, fields=fields))
        return self.after(15)

    def after(self, seconds: float) -> Told:
        self.t += seconds
        self.judge.apply(Tick(self.t))
        return self

    def answers(self, seconds: float = 15.0) -> Told:
        self.judge.apply(EngineScrape(self.t, "chat", "ok", 0.01, ranks=(RankReading("0", running=0.0, waiting=0.0),)))
        return self.after(seconds)

    def of(self, verdict: str) -> Verdict:
        (found,) = [one for one in self.judge.verdicts() if one.name == verdict and one.subject == Subject("chat")]
        return found

    def states(self, *verdicts: str) -> list[str]:
        return [self.of(verdict).state for verdict in verdicts]


OF_THE_LOG = ("startup-refused", "startup-oom", "runtime-oom", "crash-loop")


def test_without_a_log_what_only_it_tells_is_unknown() -> None:
    told = Told().answers()
    assert told.states("startup-refused", "runtime-oom") == ["unknown", "unknown"]
    assert told.of("runtime-oom").reason == "no log of the engine is read"
    told.judge.apply(SourceRun(told.t, "log", "chat", True, 0.01))
    assert told.after(15).states("startup-refused", "runtime-oom") == ["clear", "clear"]
    told.judge.apply(SourceRun(told.t, "log", "chat", False, 0.01, "permission denied"))
    assert told.after(15).of("runtime-oom").reason == "its log cannot be read"


# --- refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "evidence"),
    [
        (
            ABOVE_FREE,
            {"reason": "budget_above_free", "largest_passing_utilization": 31.44 / 47.38},
        ),
        (TOO_LONG_V0, {"reason": "context_too_long", "largest_max_model_len": 3664, "max_model_len": 4096}),
        (TOO_LONG_V1, {"reason": "context_too_long", "max_model_len": 116160}),
        (DISTURBED, {"reason": "profiling_disturbed"}),
        ("ValueError: No available memory for the cache blocks.", {"reason": "no_room"}),
        (
            "ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (317).",
            {"reason": "too_many_sequences", "largest_max_num_seqs": 317},
        ),
    ],
)
def test_a_refused_start_is_one_ticket_with_the_setting_that_would_pass(line: str, evidence: dict[str, object]) -> None:
    told = Told().log(SERVER, CORE, line, FAILED)
    assert told.states(*OF_THE_LOG) == ["ticket", "clear", "clear", "clear"]
    found = told.of("startup-refused").evidence
    for name, value in evidence.items():
        assert found[name] == (pytest.approx(value, abs=1e-4) if isinstance(value, float) else value)
    assert told.of("startup-refused").advice


def test_a_length_that_vllm_does_not_estimate_is_estimated_on_the_safe_side() -> None:
    evidence = Told().log(CORE, TOO_LONG_V1, FAILED).of("startup-refused").evidence
    fits = evidence["largest_max_model_len"]
    assert isinstance(fits, int)
    assert 90_000 < fits < 116_160 * 3.48 / 4.43


def test_where_more_was_free_the_utilisation_that_makes_room_is_told() -> None:
    line = TOO_LONG_V1.replace("4.43 GB", "4.60 GB").replace("3.48 GB", "4.00 GB")
    evidence = Told().log(CORE, BUDGET, line, FAILED).of("startup-refused").evidence
    assert evidence["smallest_passing_utilization"] == pytest.approx(0.9 + 0.6 / 24, abs=1e-3)
    too_much = TOO_LONG_V1.replace("4.43 GB", "9.00 GB")
    assert (
        "smallest_passing_utilization" not in Told().log(CORE, BUDGET, too_much, FAILED).of("startup-refused").evidence
    )


def test_refusals_in_a_row_are_one_verdict_with_their_count_and_become_a_loop() -> None:
    told = Told()
    for _ in range(3):
        told.log(SERVER, CORE, ABOVE_FREE, FAILED).after(300)
    refused, loop = told.of("startup-refused"), told.of("crash-loop")
    assert refused.evidence["refused_starts"] == 3
    assert loop.state == "page"
    assert refused.symptom_of == "crash-loop"
    assert refused.incident == loop.incident


def test_it_stands_while_the_engine_is_away_and_for_an_hour_after_a_start_that_succeeds() -> None:
    told = Told().log(SERVER, CORE, ABOVE_FREE, FAILED).after(12 * HOUR)
    assert told.of("startup-refused").state == "ticket"
    told.log(SERVER, CORE, WEIGHTS, READY).answers()
    assert told.of("startup-refused").state == "ticket"
    assert told.after(HOUR + 60).of("startup-refused").state == "clear"


# --- out of memory at the start ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "step"),
    [((SERVER, CORE), "load"), ((SERVER, CORE, WEIGHTS), "profile"), ((SERVER, CORE, WEIGHTS, BUDGET), "kv_pool")],
)
def test_an_error_before_it_serves_is_the_start_s(lines: tuple[str, ...], step: str) -> None:
    told = Told().log(*lines, FAILED, ran_out(512, 100, 50))
    assert told.states(*OF_THE_LOG) == ["clear", "ticket", "clear", "clear"]
    assert told.of("startup-oom").evidence["step"] == step
    assert told.of("startup-oom").evidence["cause"] == "too_little"


def test_all_ranks_that_run_out_while_warming_up_are_one_ticket() -> None:
    line = (
        "(VllmWorker rank={n} pid={n}) ERROR 11-30 09:00:00 [x.py:1] RuntimeError: CUDA out of memory occurred "
        "when warming "
        "up sampler with 1024 dummy requests. Please try lowering `max_num_seqs`"
    )
    told = Told().log(SERVER, CORE, WEIGHTS, *(line.format(n=n) for n in range(8)))
    assert told.of("startup-oom").evidence["dummy_requests"] == 1024
    assert told.of("startup-oom").evidence["workers"] == 8
    assert told.of("startup-oom").evidence["failed_starts"] == 1


# --- out of memory while serving ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "killer", "cause"),
    [
        ((384.0, 329.87, 402.27), "fragmentation", "in_pieces"),
        ((524.0, 137.12, 121.0), "capacity", "too_little"),
        ((304.0, 218.81, 41.55), "capacity", "too_little"),
        ((256.0, 300.0, 10.0), "capacity", "race"),
    ],
)
@pytest.mark.parametrize("fatal_first", [True, False])
def test_its_numbers_name_the_killer_and_a_death_pages(
    sizes: tuple[float, float, float], killer: str, cause: str, fatal_first: bool
) -> None:
    error = ran_out(*sizes)
    told = Told().answers().log(*((FATAL, error) if fatal_first else (error, FATAL)))
    verdict = told.of("runtime-oom")
    assert (verdict.state, verdict.killer, verdict.evidence["cause"]) == ("page", killer, cause)
    assert told.states("startup-refused", "startup-oom", "crash-loop") == ["clear", "clear", "clear"]


def test_an_error_that_the_engine_survives_is_a_ticket() -> None:
    told = Told().answers().log(ran_out(512, 100, 50)).answers()
    assert told.of("runtime-oom").state == "ticket"
    assert told.after(2 * HOUR).of("runtime-oom").state == "clear"


def test_ranks_that_die_at_once_are_one_page_until_the_engine_is_back() -> None:
    told = Told().answers().log(*(ran_out(304, 218.81, 41.55, gpu) for gpu in range(4)), FATAL)
    assert told.of("runtime-oom").evidence["workers"] == 4
    assert told.after(2 * HOUR).of("runtime-oom").state == "page"
    told.log(SERVER, CORE, WEIGHTS, READY).answers()
    assert told.of("runtime-oom").state == "page"
    assert told.after(1000).of("runtime-oom").state == "ticket"


def test_a_log_that_begins_with_the_error_is_judged_by_its_traceback() -> None:
    frame = '(Worker_TP0 pid=10) ERROR 11-30 09:00:00 [x.py:1]   File "x.py", line 1, in {}'
    serving = Told().log(frame.format("execute_model"), ran_out(512, 100, 50), FATAL)
    assert serving.states("startup-oom", "runtime-oom") == ["clear", "page"]
    starting = Told().log(frame.format("profile_run"), ran_out(512, 100, 50), FAILED)
    assert starting.states("startup-oom", "runtime-oom") == ["ticket", "clear"]


@pytest.mark.parametrize("failed_first", [True, False])
@pytest.mark.parametrize("served_before", [True, False])
def test_of_a_start_whose_lines_were_not_read_its_failure_tells(failed_first: bool, served_before: bool) -> None:
    told = Told()
    if served_before:
        told.answers().after(600)
    error = ran_out(512, 100, 50)
    told.log(*((FAILED, error) if failed_first else (error, FAILED)))
    assert told.states("startup-refused", "startup-oom", "runtime-oom") == ["clear", "ticket", "clear"]
    refused = Told()
    if served_before:
        refused.answers().after(600)
    refused.log(*((FAILED, ABOVE_FREE) if failed_first else (ABOVE_FREE, FAILED)))
    assert refused.states("startup-refused", "startup-oom", "runtime-oom") == ["ticket", "clear", "clear"]


# --- deaths ------------------------------------------------------------------------------------------------------


def test_a_death_that_log_and_pages_both_tell_counts_once() -> None:
    told = Told()
    for _ in range(2):
        told.log(SERVER, CORE, WEIGHTS, READY).answers(600).answers()
        told.log(FATAL)
        for _ in range(8):  # the front end answers on, then nothing does
            told.answers()
        for _ in range(8):
            told.judge.apply(EngineScrape(told.t, "chat", "unreachable", 0.01, "connection refused"))
            told.after(15)
    assert told.of("crash-loop").evidence["deaths"] == 2


def test_an_engine_that_fails_for_another_reason_is_no_shortage() -> None:
    told = Told()
    for _ in range(3):
        told.log(SERVER, CORE, WEIGHTS, "ValueError: No common block size for 16", FAILED).after(300)
    assert told.states(*OF_THE_LOG) == ["clear", "clear", "clear", "page"]


# --- read back ---------------------------------------------------------------------------------------------------


def test_what_was_written_before_the_daemon_came_is_judged_by_its_own_time() -> None:
    recent = Told().log(SERVER, CORE, ABOVE_FREE, FAILED, age=600)
    assert recent.of("startup-refused").state == "ticket"
    assert recent.of("startup-refused").evidence["last_failure"] == recent.t - 15 - 600
    old = Told().log(SERVER, CORE, ABOVE_FREE, FAILED, age=3 * 24 * HOUR)
    assert old.of("startup-refused").state == "clear"


def test_what_is_read_back_twice_counts_once() -> None:
    told = Told().answers().log(ran_out(512, 100, 50), FATAL)
    for _ in range(2):
        told.log(SERVER, CORE, READY, age=5000)
        told.log(ran_out(512, 100, 50), FATAL, age=100)
    assert told.judge.node.story("chat").ran_out == {("capacity", "runtime"): 1}
