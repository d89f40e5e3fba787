"""Verdicts and incidents for people: causes before symptoms, one statement for one thing, and doubt in words."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from oomwatch.check import exit_status, report
from oomwatch.conclusions import (
    confidence_text,
    evidence_text,
    incident_plain,
    incidents,
    statement,
    subject_text,
    time_left,
    unknown_by_reason,
)
from oomwatch.detectors.base import Eta, Evidence, State, Subject
from oomwatch.observations import Absent, Maybe
from oomwatch.snapshot import Snapshot
from oomwatch.status import device_labels, problems, status
from oomwatch.verdicts import Verdict
from tests import snapshots
from tests.snapshots import (
    GIB,
    NOW,
    engine,
    frozen,
    gpu,
    gpu_uuid,
    host_process,
    judged,
    leaking,
    lost,
    stuck,
    unreachable,
    verdict,
)

RANK = Subject(engine="llama-8b", rank="0")
LABELS = {gpu_uuid(0): "GPU 0"}


def node(*verdicts: Verdict) -> Snapshot:
    """A node on which all is well but what was concluded."""
    return Snapshot(
        t=NOW,
        driver=snapshots.driver(),
        gpus=(replace(gpu(0), unowned=0),),
        engines=(engine("llama-8b"),),
        verdicts=judged(*verdicts),
    )


class TestIncidents:
    def test_a_cause_comes_before_what_it_explains(self) -> None:
        (incident,) = incidents(judged(stuck(), leaking(RANK)))
        assert [one.name for one in incident.causes] == ["kv-block-leak"]
        assert [one.name for one in incident.symptoms] == ["engine-stuck"]
        assert incident.since == NOW - 3 * 3600

    def test_the_worst_comes_first_and_what_is_held_back_last(self) -> None:
        found = incidents(
            judged(
                verdict("kv-tail-waste", "info", RANK),
                replace(verdict("headroom-low", "page", Subject(gpu=gpu_uuid(3))), silenced="update"),
                verdict("budget-overrun", "ticket", Subject(engine="b")),
                verdict("engine-stuck", "page", Subject(engine="c")),
            )
        )
        assert [one.cause.name for one in found] == ["engine-stuck", "budget-overrun", "kv-tail-waste", "headroom-low"]

    def test_of_a_crash_loop_what_says_why_is_acted_on_first(self) -> None:
        about = Subject(engine="llama-8b")
        loop = replace(verdict("crash-loop", "page", about), advice=("Undo what changed.",))
        why = replace(verdict("runtime-oom", "ticket", about), advice=("Lower it.",))
        (incident,) = incidents(judged(loop, why))
        assert incident.advice == ("Lower it.", "Undo what changed.")
        assert incident_plain(incident)["advice"] == ["Lower it.", "Undo what changed."]
        (alone,) = incidents(judged(loop))
        assert alone.advice == ("Undo what changed.",)

    def test_a_symptom_that_pages_makes_a_ticket_critical(self) -> None:
        (incident,) = incidents(judged(leaking(RANK, "ticket"), stuck()))
        assert incident.severity == "critical"

    def test_it_is_held_back_when_all_of_it_is(self) -> None:
        leak, end = replace(leaking(RANK), silenced="update"), replace(stuck(), silenced="update")
        assert incidents(judged(leak, end))[0].silenced == "update"
        (half,) = incidents(judged(leak, stuck()))
        assert (half.silenced, half.severity) == ("", "critical")


class TestWords:
    @pytest.mark.parametrize(
        ("subject", "text"),
        [
            (Subject(engine="chat"), "Engine chat"),
            (RANK, "Engine llama-8b, rank 0"),
            (Subject(engine="chat", gpu=gpu_uuid(0), pid=7), "Engine chat, process 7 on GPU 0"),
            (Subject(engine="chat", pid=7), "Engine chat, process 7"),
            (Subject(gpu=gpu_uuid(0)), "GPU 0"),
            (Subject(gpu="MIG-9"), "MIG-9"),
            (Subject(), "The node"),
        ],
    )
    def test_subjects(self, subject: Subject, text: str) -> None:
        assert subject_text(subject, LABELS) == text

    @pytest.mark.parametrize(
        ("summary", "subject", "text"),
        [
            ("3 requests wait.", Subject(engine="chat"), "Engine chat: 3 requests wait."),
            (
                "chat answers, and its page lacks x.",
                Subject(engine="chat"),
                "Engine chat answers, and its page lacks x.",
            ),
            (f"{gpu_uuid(0)} has not been read.", Subject(gpu=gpu_uuid(0)), "GPU 0 has not been read."),
        ],
    )
    def test_a_statement_names_its_subject_once_and_devices_as_people_do(
        self, summary: str, subject: Subject, text: str
    ) -> None:
        assert statement(verdict("metrics-missing", "ticket", subject, summary=summary), LABELS) == text

    @pytest.mark.parametrize(
        ("confidence", "text"),
        [
            (1.0, "nearly certain (100%)"),
            (0.85, "very likely (85%)"),
            (0.6, "likely (60%)"),
            (0.4, "perhaps (40%)"),
            (0.2, "a hint (20%)"),
        ],
    )
    def test_doubt(self, confidence: float, text: str) -> None:
        assert confidence_text(confidence) == text

    @pytest.mark.parametrize(
        ("eta", "text"),
        [
            (None, ""),
            (Eta(0.0), "none"),
            (Eta(3600.0), "about 1 h"),
            (Eta(3600.0, 1800.0, 7200.0), "about 1 h, between 30 min and 2 h"),
            (Eta(3600.0, 1800.0), "about 1 h, at least 30 min"),
            (Eta(3600.0, 1800.0, float("inf")), "about 1 h, at least 30 min"),
            (Eta(3600.0, None, 7200.0), "about 1 h, at most 2 h"),
            (Eta(float("inf")), ""),
        ],
    )
    def test_time_left(self, eta: Eta | None, text: str) -> None:
        assert time_left(eta) == text

    def test_numbers_are_read_by_what_their_names_say(self) -> None:
        evidence: Evidence = {
            "growth_bytes": 1536 * 1024**2,
            "slope_bytes_per_hour": 96.0 * 1024**2,
            "slope_blocks_per_hour": 12.34,
            "idle_seconds": 90.0,
            "peak_usage": 0.97,
            "floor_ratio": 0.25,
            "floor_blocks": 2000,
            "max_concurrency": 0.894,
            "last_death": NOW,
            "gpu": gpu_uuid(0),
            "pids": [1, 2],
            "bytes_by_pid": [GIB, 2 * GIB],
            "nan": float("nan"),
            "why": "",
        }
        assert evidence_text(verdict("crash-loop", "page", RANK, evidence=evidence), LABELS) == (
            ("growth", "1.5 GiB"),
            ("slope", "96 MiB an hour"),
            ("slope", "12.3 blocks an hour"),
            ("idle", "1 min 30 s"),
            ("peak usage", "97%"),
            ("floor", "25%"),
            ("floor blocks", "2,000"),
            ("max concurrency", "0.894"),
            ("last death", "2026-09-21 14:13:20 UTC"),
            ("gpu", "GPU 0"),
            ("pids", "1, 2"),
            ("bytes by pid", "1 GiB, 2 GiB"),
        )

    def test_what_is_not_known_is_grouped_by_the_reason(self) -> None:
        unknown = [verdict("kv-block-leak", "unknown", Subject(engine=name), reason="warming up") for name in "ab"]
        other = verdict("kv-block-leak", "unknown", Subject(engine="c"), reason="asleep")
        grouped = unknown_by_reason([*unknown, other, leaking(RANK)])
        assert [(key, len(members)) for key, members in grouped.items()] == [
            (("kv-block-leak", "asleep"), 1),
            (("kv-block-leak", "warming up"), 2),
        ]


class TestProblems:
    @pytest.mark.parametrize(("state", "severity"), [("page", "critical"), ("ticket", "warning"), ("info", "info")])
    def test_a_state_is_a_severity(self, state: State, severity: str) -> None:
        (problem,) = problems(node(leaking(RANK, state)))
        assert (problem.severity, problem.kind, problem.name) == (severity, "engine", "llama-8b")
        assert problem.text.startswith("Engine llama-8b, rank 0: 2,000 of 8,000 KV blocks")
        assert problem.action.startswith("Restart the engine")
        assert (problem.incident, problem.verdicts) == ("llama-8b/1", ("kv-block-leak",))

    @pytest.mark.parametrize("state", ["clear", "unknown"])
    def test_clear_and_unknown_are_none(self, state: State) -> None:
        assert problems(node(verdict("kv-block-leak", state, RANK))) == ()

    def test_a_symptom_is_no_problem_of_its_own(self) -> None:
        (problem,) = problems(node(leaking(RANK), stuck()))
        assert problem.verdicts == ("kv-block-leak", "engine-stuck")

    def test_what_is_held_back_is_none(self) -> None:
        assert problems(node(replace(leaking(RANK), silenced="update"))) == ()

    def test_a_frozen_engine_is_told_of_once(self) -> None:
        seen = replace(node(stuck()), engines=(frozen(engine("llama-8b")),))
        (problem,) = problems(seen)
        assert problem.incident == "llama-8b/1"
        assert problem.severity == "critical"

    def test_what_is_seen_at_once_keeps_its_severity(self) -> None:
        silent = verdict("source-stale", "info", Subject(engine="llama-8b"), summary="No page of it for 1 min.")
        (problem,) = problems(replace(node(silent), engines=(unreachable(engine("llama-8b")),)))
        assert (problem.severity, problem.incident) == ("critical", "llama-8b/1")

    def test_a_lost_device_is_told_of_once(self) -> None:
        fallen = verdict("gpu-lost", "page", Subject(gpu=gpu_uuid(0)), summary="gone.")
        (problem,) = problems(replace(node(fallen), gpus=(lost(0),)))
        assert (problem.kind, problem.verdicts) == ("gpu", ("gpu-lost",))
        assert problem.incident

    def test_memory_without_owner_is_told_of_once(self) -> None:
        orphan = verdict("orphan-memory", "ticket", Subject(gpu=gpu_uuid(0)), summary="10 GiB are held by nobody.")
        card = replace(gpu(0, (snapshots.engine_process(1, 60 * GIB, "llama-8b"),)), unowned=10 * GIB)
        (problem,) = problems(replace(node(orphan), gpus=(card,)))
        assert problem.text == "GPU 0: 10 GiB are held by nobody."

    def test_what_no_verdict_tells_of_stays(self) -> None:
        other = verdict("budget-overrun", "ticket", Subject(engine="llama-8b"), summary="over.")
        seen = replace(node(other), engines=(frozen(engine("llama-8b")),))
        assert [problem.incident for problem in problems(seen)] == ["", "llama-8b/1"]

    def test_a_planned_silence_quietens_what_is_seen_too(self) -> None:
        planned = replace(verdict("source-stale", "clear", Subject(engine="llama-8b")), silenced="rollout")
        (problem,) = problems(replace(node(planned), engines=(unreachable(engine("llama-8b")),)))
        assert problem.severity == "info"
        assert problem.text.endswith("Planned silence: rollout.")


class TestStatus:
    def test_verdicts_and_incidents_are_there_in_full(self) -> None:
        plain = json.loads(json.dumps(status(snapshots.full(), NOW), allow_nan=False))
        first = plain["verdicts"][0]
        assert first["subject"] == {"engine": "llama-8b", "rank": "0"}
        assert first["eta"] == {"seconds": 21600.0, "low": 18000.0, "high": 28800.0}
        assert first["evidence"]["floor_blocks"] == 2000
        assert plain["incidents"][0]["causes"] == [
            {"verdict": "kv-block-leak", "state": "page", "subject": {"engine": "llama-8b", "rank": "0"}}
        ]
        assert plain["incidents"][0]["symptoms"][0]["verdict"] == "engine-stuck"

    def test_numbers_that_json_does_not_have_are_null(self) -> None:
        odd = verdict("kv-block-leak", "page", RANK, evidence={"x": float("nan")}, eta=Eta(5.0, 1.0, float("inf")))
        (shown,) = json.loads(json.dumps(status(node(odd), NOW), allow_nan=False))["verdicts"]
        assert shown["evidence"] == {"x": None}
        assert shown["eta"]["high"] is None


class TestCheck:
    def test_it_prints_the_incident_with_its_numbers_and_its_end(self) -> None:
        text = report(snapshots.alarming(), "text")
        for words in (
            "critical: Engine llama-8b, rank 0: 2,000 of 8,000 KV blocks (25%) belong to no request",
            "kv-block-leak (leak), incident llama-8b/1, since 2026-09-21 11:13:20 UTC, nearly certain (97%), time left",
            "about 6 h, between 5 h and 8 h",
            "1. Restart the engine at a quiet moment within 5 h.",
            "floor blocks: 2,000",
            "explains: engine-stuck: Engine llama-8b: No token for 4 min",
            "held back (weekly batch): preemption-pressure: Engine qwen-32b, rank 0: 120 preemptions",
            "2 of 9 verdicts are not known",
        ):
            assert words in text
        assert text.count("is frozen") == 0

    def test_its_exit_status_follows(self) -> None:
        assert exit_status(node(leaking(RANK))) == 2
        assert exit_status(node(leaking(RANK, "ticket"))) == 1
        assert exit_status(node(leaking(RANK, "info"))) == 0
        assert exit_status(node(verdict("kv-block-leak", "unknown", RANK, reason="warming up"))) == 0

    @pytest.mark.parametrize(("missing", "shown"), [(None, "  50 GiB"), (Absent("GPU_IS_LOST"), "at least 50 GiB")])
    def test_a_part_of_an_engines_gpu_memory_is_not_shown_as_the_whole(
        self, missing: Absent | None, shown: str
    ) -> None:
        view = replace(engine(), gpu_memory={gpu_uuid(0): 50 * GIB}, gpu_memory_missing=missing)
        assert shown in report(replace(node(), engines=(view,)), "text")

    @pytest.mark.parametrize(("other", "shown"), [(2 * GIB, "  8 GiB"), (Absent("NO_PERMISSION"), "at least 6 GiB")])
    def test_a_part_of_its_host_memory_neither(self, other: Maybe[int], shown: str) -> None:
        processes = tuple(host_process(pid, "worker", anon=anon) for pid, anon in ((1, 6 * GIB), (2, other)))
        assert shown in report(replace(node(), engines=(replace(engine(), processes=processes),)), "text")

    def test_labels_name_slices_by_their_gpu(self) -> None:
        assert device_labels(snapshots.full())["MIG-00000002-0001"] == "slice 7/0 of GPU 2"
