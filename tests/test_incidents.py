"""One root cause is one incident, whatever shows it."""

from __future__ import annotations

from collections.abc import Mapping

from oomwatch.detectors.base import State, Subject
from oomwatch.incidents import TABLE, Incidents
from oomwatch.verdicts import CATALOGUE, Verdict

LLM = Subject(engine="llm")
RANK = Subject(engine="llm", rank="0")
OTHER_RANK = Subject(engine="llm", rank="1")
DEVICE = Subject(gpu="GPU-1")
ON = {"llm": frozenset({"GPU-1", "GPU-2"})}


def verdict(name: str, subject: Subject, state: State = "ticket") -> Verdict:
    return Verdict(name, CATALOGUE[name].killer, state, subject, since=0.0)


def assigned(*verdicts: Verdict, on: Mapping[str, frozenset[str]] | None = None) -> list[tuple[str, str | None]]:
    return [(v.incident, v.symptom_of) for v in Incidents().assign(verdicts, ON if on is None else on)]


def test_the_table_names_verdicts_of_the_catalogue_only() -> None:
    names = {name for rule in TABLE for name in (rule.cause, *rule.symptoms)}
    assert names <= CATALOGUE.keys()


def test_a_verdict_alone_is_its_own_incident() -> None:
    assert assigned(verdict("kv-exhaustion", RANK)) == [("llm/1", None)]


def test_what_is_clear_or_unknown_belongs_to_none() -> None:
    assert assigned(verdict("kv-exhaustion", RANK, "clear"), verdict("engine-stuck", LLM, "unknown")) == [
        ("", None),
        ("", None),
    ]


def test_a_symptom_joins_its_causes_incident() -> None:
    assert assigned(verdict("kv-exhaustion", RANK), verdict("kv-block-leak", RANK)) == [
        ("llm/1", "kv-block-leak"),
        ("llm/1", None),
    ]


def test_symptoms_of_symptoms_lead_to_the_root() -> None:
    leak, full, pressure = (verdict(n, RANK) for n in ("kv-block-leak", "kv-exhaustion", "preemption-pressure"))
    assert assigned(pressure, full, leak) == [
        ("llm/1", "kv-block-leak"),
        ("llm/1", "kv-block-leak"),
        ("llm/1", None),
    ]
    assert assigned(pressure, full) == [("llm/1", "kv-exhaustion"), ("llm/1", None)]


def test_what_is_only_info_takes_over_no_ticket() -> None:
    full = verdict("kv-exhaustion", RANK, "info")
    assert assigned(verdict("preemption-pressure", RANK), full) == [("llm/1", None), ("llm/2", None)]
    assert assigned(verdict("preemption-pressure", RANK, "info"), full) == [("llm/1", "kv-exhaustion"), ("llm/1", None)]


def test_a_ticket_takes_over_its_symptoms_page() -> None:
    assert assigned(verdict("engine-stuck", LLM, "page"), verdict("kv-block-leak", RANK)) == [
        ("llm/1", "kv-block-leak"),
        ("llm/1", None),
    ]


def test_what_waits_before_an_engine_that_hangs_is_its_symptom() -> None:
    assert assigned(verdict("engine-stuck", LLM), verdict("admission-stall", RANK))[1] == ("llm/1", "engine-stuck")


def test_another_ranks_symptom_is_its_own_incident() -> None:
    leak, full = verdict("kv-block-leak", RANK), verdict("kv-exhaustion", OTHER_RANK)
    assert assigned(leak, full) == [("llm/1", None), ("llm/2", None)]


def test_a_verdict_about_the_engine_is_a_symptom_of_any_ranks_cause() -> None:
    assert assigned(verdict("kv-block-leak", RANK), verdict("engine-stuck", LLM))[1] == ("llm/1", "kv-block-leak")


def test_the_same_verdict_of_several_ranks_and_devices_is_one_incident() -> None:
    leaks = [verdict("gpu-memory-leak", Subject(engine="llm", gpu=gpu, pid=7)) for gpu in ("GPU-1", "GPU-2")]
    assert assigned(*leaks) == [("llm/1", None), ("llm/1", None)]


def test_a_lost_device_explains_everything_about_it() -> None:
    lost = verdict("gpu-lost", DEVICE, "page")
    held = verdict("gpu-memory-leak", Subject(engine="llm", gpu="GPU-1", pid=7))
    assert assigned(lost, held, verdict("headroom-low", DEVICE)) == [
        ("llm/1", None),
        ("llm/1", "gpu-lost"),
        ("llm/1", "gpu-lost"),
    ]


def test_of_two_that_explain_everything_the_earlier_one_is_the_cause() -> None:
    lost, stuck = verdict("gpu-lost", DEVICE, "page"), verdict("nvml-stuck", DEVICE)
    assert assigned(stuck, lost) == [("llm/1", "gpu-lost"), ("llm/1", None)]


def test_a_lost_device_explains_the_engine_that_ran_on_it() -> None:
    lost, stale = verdict("gpu-lost", DEVICE, "page"), verdict("source-stale", LLM)
    assert assigned(lost, stale)[1] == ("llm/1", "gpu-lost")
    assert assigned(lost, stale, on={"llm": frozenset({"GPU-9"})})[1] == ("llm/1", None)


def test_an_engines_cause_explains_what_its_devices_show() -> None:
    leak = verdict("gpu-memory-leak", Subject(engine="llm", gpu="GPU-1", pid=7))
    assert assigned(leak, verdict("headroom-low", DEVICE))[1] == ("llm/1", "gpu-memory-leak")
    assert assigned(leak, verdict("headroom-low", Subject(gpu="GPU-9")))[1] == ("GPU-9/1", None)


class TestNames:
    def test_the_devices_of_one_engine_are_one_incident_of_its(self) -> None:
        low = [verdict("headroom-low", Subject(gpu=gpu)) for gpu in ("GPU-1", "GPU-2")]
        assert assigned(*low) == [("llm/1", None), ("llm/1", None)]

    def test_a_device_that_engines_share_names_its_own(self) -> None:
        on = {**ON, "other": frozenset({"GPU-1"})}
        assert assigned(verdict("headroom-low", DEVICE), on=on) == [("GPU-1/1", None)]
        assert assigned(verdict("headroom-low", DEVICE), on={}) == [("GPU-1/1", None)]


class TestOverTime:
    def test_an_incident_keeps_its_number_while_it_lasts_and_never_lends_it(self) -> None:
        incidents = Incidents()
        full = verdict("kv-exhaustion", RANK)
        (first,) = incidents.assign([full])
        (same,) = incidents.assign([full])
        incidents.assign([verdict("kv-exhaustion", RANK, "clear")])
        (later,) = incidents.assign([full])
        assert [first.incident, same.incident, later.incident] == ["llm/1", "llm/1", "llm/2"]

    def test_a_cause_that_shows_later_takes_its_symptoms_over(self) -> None:
        incidents = Incidents()
        full, leak = verdict("kv-exhaustion", RANK), verdict("kv-block-leak", RANK)
        (alone,) = incidents.assign([full])
        symptom, cause = incidents.assign([full, leak])
        assert alone.incident == "llm/1"
        assert symptom.incident == cause.incident == "llm/2"
        assert symptom.symptom_of == "kv-block-leak"
