"""What a person on call is told to do: something for each verdict, with values, and nothing that vLLM does not have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from oomwatch import advice as module
from oomwatch.advice import FLAGS, advice
from oomwatch.detectors.base import Eta, Evidence, Finding, State
from oomwatch.enginelog.events import REFUSALS, STEPS
from oomwatch.observations import EngineFacts
from oomwatch.sources.vllm.meaning import release
from oomwatch.verdicts import CATALOGUE
from tests.documents import REPOSITORY

GIB = 1024**3
RUNBOOKS = REPOSITORY / "alerts" / "runbooks"
VERSIONS = (None, "0.6.6", "0.8.5.post1", "0.9.2", "0.10.1", "0.10.2", "0.20.2", "0.21.0", "0.24.0", "0.33.0")

# The numbers that each detector gives, so that every branch that uses them is taken.
EVIDENCE: dict[str, Evidence] = {
    "startup-refused": {"largest_passing_utilization": 0.6636, "largest_max_model_len": 3664},
    "startup-oom": {"least_free_bytes": GIB, "peak_bytes": 70 * GIB},
    "concurrency-low": {"max_concurrency": 0.9, "pool_tokens": 30_000, "max_model_len": 32_768},
    "budget-overrun": {"overrun_bytes": GIB, "total_bytes": 80 * GIB, "gpu": "GPU-1"},
    "margin-thin": {"fitting_utilization": 0.94, "utilization": 0.95, "free_floor_bytes": GIB // 4},
    "headroom-low": {"free_floor_bytes": GIB // 4, "level_bytes": 2 * GIB},
    "kv-exhaustion": {"running": 48.0, "waiting": 100.0},
    "preemption-pressure": {"preemptions_per_finished": 1.5},
    "admission-stall": {"running": 8.0, "waiting": 3.0},
    "ranks-unbalanced": {"rank": "0", "free_rank": "3"},
    "engine-stuck": {"ranks": ["0", "1"], "flat_seconds": 200.0},
    "orphan-memory": {"pids": [2201, 2202], "names": ["python3", "python3"], "orphan_bytes": 15 * GIB},
    "runtime-oom": {"wanted_bytes": 4 * GIB, "free_bytes": 3 * GIB, "total_bytes": 80 * GIB},
    "crash-loop": {"deaths": 4, "first_death": 1_790_000_000.0},
    "allocator-fragmentation": {"largest_transient_bytes": 2 * GIB, "reach_bytes": GIB},
    "unaccounted-growth": {"growth_bytes": GIB},
    "kv-tail-waste": {"block_size": 128},
    "kv-block-leak": {"floor_blocks": 2000, "method": "idle"},
    "gpu-memory-leak": {"growth_bytes": GIB},
    "host-memory-leak": {"left_bytes": 20 * GIB},
    "metrics-missing": {"page": "ok"},
    "source-stale": {"silent_seconds": 400.0},
}

# What an engine's log adds: why it refused, where it ran out, and how.
BY_LOG: dict[str, tuple[Evidence, ...]] = {
    "startup-refused": tuple(
        {"reason": reason, "utilization": 0.9, "smallest_passing_utilization": 0.95, "largest_max_num_seqs": 480}
        for reason in REFUSALS
    ),
    "startup-oom": tuple(
        {"step": step, "dummy_requests": 256, "wanted_bytes": GIB, "free_bytes": 0, "total_bytes": 80 * GIB}
        for step in STEPS
    ),
    "runtime-oom": tuple({**EVIDENCE["runtime-oom"], "cause": cause} for cause in ("too_little", "in_pieces", "race")),
}  # fmt: skip


def facts(
    version: str | None = "0.33.0", connector: bool | None = None, utilization: float | None = 0.9
) -> EngineFacts:
    return EngineFacts("chat", vllm_version=version, kv_connector=connector, gpu_memory_utilization=utilization)


def told(
    verdict: str,
    about: EngineFacts | None = None,
    state: State = "ticket",
    evidence: Evidence | None = None,
    killer: str | None = None,
    eta: Eta | None = None,
) -> str:
    finding = Finding(
        state, evidence=EVIDENCE.get(verdict, {}) if evidence is None else evidence, killer=killer, eta=eta
    )
    return "\n".join(advice(verdict, finding, about or facts()))


def evidence_of(verdict: str) -> tuple[Evidence, ...]:
    """What its detector gives, without a log and with one."""
    return (EVIDENCE.get(verdict, {}), *BY_LOG.get(verdict, ()))


def all_cases() -> Iterator[tuple[str, str | None, tuple[str, ...]]]:
    """Every verdict in every state, with and without numbers, for every version: what is advised."""
    states: tuple[State, ...] = ("info", "ticket", "page")
    for verdict in CATALOGUE:
        given = (*evidence_of(verdict), {"page": "stats_disabled", "method": "wedge"})
        for state, evidence, killer in product(states, given, (None, "fragmentation")):
            finding = Finding(state, evidence=evidence, killer=killer, eta=Eta(7200.0, 3600.0))
            for version, connector in product(VERSIONS, (None, True)):
                for about in (facts(version, connector), facts(version, connector, None), None):
                    yield verdict, version if about else None, advice(verdict, finding, about)


@pytest.mark.parametrize("verdict", CATALOGUE)
def test_every_verdict_has_actions_in_plain_sentences(verdict: str) -> None:
    for evidence in (*evidence_of(verdict), {}):
        actions = advice(verdict, Finding("ticket", evidence=evidence), facts())
        assert 2 <= len(actions) <= 6, evidence
        assert len(set(actions)) == len(actions)
        for action in actions:
            assert re.fullmatch(r"[A-Z].*\.", action), action
            assert "None" not in action


def test_no_flag_is_named_that_the_version_lacks_and_a_limit_is_told_where_the_version_is_not_known() -> None:
    for verdict, version, actions in all_cases():
        for action in actions:
            for flag in re.findall(r"--[a-z][a-z-]+", action):
                first = FLAGS[flag]
                if version is None:
                    assert not first or f"(vLLM {'.'.join(map(str, first))} and newer)" in action, (verdict, action)
                else:
                    assert (release(version) or ()) >= first, (verdict, version, action)


def test_every_flag_of_the_table_is_named_somewhere() -> None:
    named = {flag for _, _, actions in all_cases() for flag in re.findall(r"--[a-z][a-z-]+", "\n".join(actions))}
    assert named == set(FLAGS)


def test_the_runbook_of_a_verdict_has_every_setting_that_its_advice_names() -> None:
    named: dict[str, set[str]] = {}
    for verdict, _, actions in all_cases():
        found = re.findall(r"--[a-z][a-z-]+|expandable_segments|watermark", "\n".join(actions))
        named.setdefault(verdict, set()).update(found)
    for verdict, found_settings in named.items():
        runbook = (RUNBOOKS / f"{CATALOGUE[verdict].alert}.md").read_text(encoding="utf-8")
        assert {setting for setting in found_settings if setting not in runbook} == set(), verdict


def test_nothing_is_advised_both_ways() -> None:
    for verdict, version, actions in all_cases():
        text = "\n".join(actions)
        for flag in ("--gpu-memory-utilization", "--max-num-seqs", "--max-model-len"):
            assert len(set(re.findall(rf"{flag} (?:to|from [0-9.]+ to) ([0-9.]+)\b", text))) <= 1, (verdict, version)
        assert not ("expandable_segments" in text and "too little memory" in text), (verdict, version)


def test_utilization_is_lowered_and_raised_only_where_a_start_lacked_room_and_more_was_free() -> None:
    change = r"(raise )?--gpu-memory-utilization from ([0-9.]+) to ([0-9]\.[0-9]+)"
    for verdict, _, actions in all_cases():
        for raised, before, after in re.findall(change, "\n".join(actions)):
            if raised:
                assert verdict == "startup-refused"
                assert float(before) < float(after) <= 1
            else:
                assert 0 < float(after) < float(before), verdict


# What an action says before a change of a setting, or before something is taken away.
_CHANGE = re.compile(
    r"\b(lower|raise|set|restart|reset|reboot|kill) (it|them|the node|the GPU|--[a-z-]+)\b", re.IGNORECASE
)


@pytest.mark.parametrize("verdict", CATALOGUE)
def test_what_changes_something_says_what_it_costs_or_risks(verdict: str) -> None:
    for evidence in (*evidence_of(verdict), {}, {"method": "wedge"}, {"pids": []}):
        for action in module.actions(verdict, Finding("page", evidence=evidence), facts()):
            assert action.cost or action.risk or not _CHANGE.search(action.do), action.do
            for clause in (action.cost, action.risk):
                assert not clause.endswith(".")


class TestValues:
    def test_a_refused_start_is_told_what_would_pass_rounded_down(self) -> None:
        text = told("startup-refused", facts(utilization=0.95))
        assert "--gpu-memory-utilization 0.66 at most instead of 0.95" in text
        assert "--max-model-len 3664" in text

    def test_a_refused_start_is_told_what_helps_against_its_reason(self) -> None:
        for reason, told_so in (
            ("profiling_disturbed", "while no neighbour starts or stops"),
            ("host_memory", "memory on the host"),
            ("too_many_sequences", "Lower --max-num-seqs to 480 at most"),
            ("no_room", "raise --gpu-memory-utilization from 0.9 to 0.93"),
            ("context_too_long", "raise --gpu-memory-utilization from 0.9 to 0.93"),
        ):
            evidence: Evidence = {"reason": reason, "largest_max_num_seqs": 480, "smallest_passing_utilization": 0.922}
            assert told_so in told("startup-refused", evidence=evidence), reason
        assert "raise" not in told("startup-refused", evidence={"reason": "no_room"})

    def test_a_start_that_ran_out_is_told_of_its_step_alone(self) -> None:
        text = told("startup-oom", evidence={"step": "warm_up", "dummy_requests": 1024})
        assert "--max-num-seqs from 1024 to 256" in text
        assert "graphs" not in text
        assert "weights" not in text
        shortage: Evidence = {"step": "graphs", "wanted_bytes": GIB, "free_bytes": GIB // 2, "total_bytes": 24 * GIB}
        assert "--gpu-memory-utilization from 0.9 to 0.86" in told("startup-oom", evidence=shortage)

    def test_a_race_is_not_told_to_be_a_shortage(self) -> None:
        text = told("runtime-oom", evidence={"cause": "race", "wanted_bytes": GIB, "free_bytes": 2 * GIB})
        assert "a neighbour takes memory now and then" in text
        assert "too little memory" not in text

    def test_a_pool_for_less_than_two_of_the_longest(self) -> None:
        assert "--max-model-len from 32768 to 14848" in told("concurrency-low")

    def test_an_overrun_is_taken_off_the_utilization_and_told_as_an_allowance(self) -> None:
        text = told("budget-overrun")
        assert "--gpu-memory-utilization from 0.9 to 0.88" in text
        assert "budget_overrun.allowance of 1024MiB" in text

    def test_without_the_present_value_it_says_by_how_much(self) -> None:
        assert "--gpu-memory-utilization by 0.02" in told("budget-overrun", facts(utilization=None))

    def test_a_thin_margin_says_which_utilization_leaves_room_and_what_it_costs(self) -> None:
        text = told("margin-thin")
        assert "--gpu-memory-utilization to 0.94 instead of 0.95: 1 GiB stays free" in text
        assert "about 768 MiB smaller" in text

    def test_flags_that_are_known_have_their_values(self) -> None:
        known = replace(facts(), max_num_seqs=1024, max_num_batched_tokens=16384)
        assert "--max-num-batched-tokens from 16384 to 8192" in told("runtime-oom", known)
        assert "--max-num-seqs from 1024 to about 48, as many as run now" in told("kv-exhaustion", known)
        assert "--max-num-seqs from" not in told("kv-exhaustion", replace(known, max_num_seqs=48))
        assert "raise it at the next restart" in told("admission-stall", replace(known, max_num_seqs=8))
        assert "raise it at the next restart" not in told("admission-stall", known)

    def test_an_engine_that_may_only_look_stuck_is_asked_before_it_is_restarted(self) -> None:
        asked, restarted = told("engine-stuck", state="info"), told("engine-stuck", state="page")
        assert asked.startswith("Send it one request")
        assert "Send it one request" not in restarted

    def test_pids_without_owner_are_named(self) -> None:
        assert "-p 2201,2202" in told("orphan-memory")
        assert "fuser" in told("orphan-memory", evidence={"pids": [], "unlisted_bytes": GIB})

    def test_a_leak_says_by_when(self) -> None:
        assert "restart it within 5 h" in told("kv-block-leak", eta=Eta(6 * 3600.0, 5 * 3600.0))
        assert "restart it at a quiet moment" in told("kv-block-leak")

    def test_an_engine_that_serves_no_more_is_restarted_now(self) -> None:
        assert "Restart it now" in told("kv-block-leak", evidence={"method": "wedge"})


class TestVersions:
    @pytest.mark.parametrize(("version", "named"), [("0.10.1", False), ("0.10.2", True), ("0.33.0", True)])
    def test_a_fixed_pool(self, version: str, named: bool) -> None:
        assert ("--kv-cache-memory-bytes" in told("budget-overrun", facts(version))) == named

    @pytest.mark.parametrize(("version", "named"), [("0.23.0", False), ("0.24.0", True)])
    def test_the_watermark(self, version: str, named: bool) -> None:
        assert ("watermark" in told("kv-exhaustion", facts(version))) == named

    @pytest.mark.parametrize(
        ("version", "connector", "named"),
        [("0.20.2", True, True), ("0.21.0", True, False), (None, True, False), ("0.33.0", None, True)],
    )
    def test_expandable_segments(self, version: str | None, connector: bool | None, named: bool) -> None:
        for verdict in ("runtime-oom", "gpu-memory-leak"):
            text = told(verdict, facts(version, connector), killer="fragmentation")
            assert ("expandable_segments" in text) == named
            assert not named or "unless it uses sleep mode" in text
            assert ("sleep mode or a KV connector" in text) == (named and connector is None)

    def test_an_old_engine_may_show_old_numbers(self) -> None:
        assert "send it one request" in told("kv-block-leak", facts("0.9.2"))
        assert "send it one request" not in told("kv-block-leak", facts("0.10.2"))


def test_an_engine_that_grows_from_sleep_to_sleep_is_not_told_what_sleep_mode_forbids() -> None:
    assert "expandable_segments" not in told("gpu-memory-leak", evidence={"sleeps": 3})


def test_a_silent_engine_is_told_what_fits_its_silence() -> None:
    assert "nothing does now" in told("source-stale", evidence={"reason": "connection refused"})
    assert "raise its timeout" in told("source-stale", evidence={"reason": "no answer within 5 s"})


def test_the_error_s_hint_is_contradicted_where_memory_was_short() -> None:
    assert "its hint does not help" in told("runtime-oom", killer="capacity")
    assert "expandable_segments" not in told("runtime-oom", killer="capacity")
