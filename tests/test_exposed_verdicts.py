"""What is concluded, on /metrics: state, doubt, time left, incident and numbers; nothing for what is not known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oomwatch.detectors.base import Eta, Finding, State, Subject
from oomwatch.detectors.standing import Standing
from oomwatch.exposition import quantile
from oomwatch.families import DERIVED, VERDICT_LABELS, Derived
from oomwatch.observations import NOT_EXPOSED, Histogram, Memory
from oomwatch.snapshot import Snapshot
from oomwatch.verdicts import CATALOGUE, Verdict
from tests.exposed import names, samples, values
from tests.snapshots import GIB, NOW, engine, gpu, gpu_uuid, judged, leaking, sliced_gpu, stuck, verdict

RANK = Subject(engine="llama-8b", rank="0")


def of(*verdicts: Verdict) -> Snapshot:
    return Snapshot(NOW, verdicts=judged(*verdicts))


def labels_of(snapshot: Snapshot, name: str) -> dict[str, str]:
    (labels,) = [dict(labels) for series, labels in samples(snapshot) if series == name]
    return labels


class TestState:
    @pytest.mark.parametrize(("state", "value"), [("clear", 0), ("info", 1), ("ticket", 2), ("page", 3)])
    def test_a_known_state_is_a_number(self, state: State, value: float) -> None:
        assert values(of(verdict("kv-block-leak", state, RANK)), "oomwatch_verdict_state") == [value]

    def test_unknown_is_no_state_and_says_why(self) -> None:
        shown = of(verdict("kv-block-leak", "unknown", RANK, reason="warming up", evidence={"floor_ratio": 0.1}))
        assert values(shown, "oomwatch_verdict_unknown", reason="warming up") == [1]
        assert {name for name in names(shown) if name.startswith("oomwatch_verdict_")} == {
            "oomwatch_verdict_unknown",
            "oomwatch_verdict_state_timestamp_seconds",
        }

    def test_it_says_since_when_and_how_sure(self) -> None:
        shown = of(verdict("kv-block-leak", "ticket", RANK, since=NOW - 60, confidence=0.8))
        assert values(shown, "oomwatch_verdict_state_timestamp_seconds") == [NOW - 60]
        assert values(shown, "oomwatch_verdict_confidence_ratio") == [0.8]

    def test_time_left_with_its_bounds_and_without_a_bound_that_is_not_known(self) -> None:
        known = of(verdict("kv-block-leak", "page", RANK, eta=Eta(100.0, 80.0, None)))
        assert values(known, "oomwatch_verdict_eta_seconds") == [100]
        assert values(known, "oomwatch_verdict_eta_low_seconds") == [80]
        assert values(known, "oomwatch_verdict_eta_high_seconds") == []

    def test_a_clear_forecast_is_exported_too(self) -> None:
        assert values(of(verdict("kv-exhaustion", "clear", RANK, eta=Eta(600.0))), "oomwatch_verdict_eta_seconds") == [
            600
        ]


class TestSubject:
    def test_every_verdict_has_the_same_labels_empty_where_they_do_not_apply(self) -> None:
        shown = of(verdict("gpu-lost", "page", Subject(gpu=gpu_uuid(0))))
        # What parses the page drops nothing: an empty label is there.
        assert labels_of(shown, "oomwatch_verdict_state") == {
            **dict.fromkeys(VERDICT_LABELS, ""),
            "verdict": "gpu-lost",
            "killer": "health",
            "gpu": gpu_uuid(0),
        }

    def test_a_slice_has_its_own_label_beside_its_gpu(self) -> None:
        card = sliced_gpu(2)
        shown = Snapshot(
            NOW, gpus=(card,), verdicts=judged(verdict("margin-thin", "info", Subject(gpu=card.mig[0].uuid)))
        )
        labels = labels_of(shown, "oomwatch_verdict_state")
        assert (labels["gpu"], labels["mig"]) == (card.uuid, card.mig[0].uuid)

    def test_every_verdict_of_the_catalogue_can_be_shown(self) -> None:
        shown = of(*(verdict(name, "info", RANK) for name in CATALOGUE))
        assert len(values(shown, "oomwatch_verdict_state")) == len(CATALOGUE)


class TestIncidents:
    def test_cause_and_symptom_are_one_incident(self) -> None:
        shown = of(leaking(RANK), stuck())
        assert values(shown, "oomwatch_incidents", killer="leak") == [1]
        assert values(shown, "oomwatch_incidents", killer="capacity") == [0]
        assert values(shown, "oomwatch_verdict_symptom", verdict="engine-stuck", cause="kv-block-leak") == [1]
        assert values(shown, "oomwatch_verdict_symptom", verdict="kv-block-leak") == []
        assert len(values(shown, "oomwatch_incident_info", incident="llama-8b/1")) == 2

    def test_ranks_of_one_engine_are_one_incident(self) -> None:
        shown = of(leaking(RANK), leaking(Subject(engine="llama-8b", rank="1")))
        assert values(shown, "oomwatch_incidents", killer="leak") == [1]

    def test_all_is_well_is_no_incident(self) -> None:
        shown = of(verdict("kv-block-leak", "clear", RANK))
        assert set(values(shown, "oomwatch_incidents")) == {0}
        assert "oomwatch_incident_info" not in names(shown)

    def test_a_planned_silence_shows_beside_the_state(self) -> None:
        shown = of(replace(leaking(RANK), silenced="driver update"))
        assert values(shown, "oomwatch_verdict_silenced", reason="driver update") == [1]
        assert values(shown, "oomwatch_verdict_state") == [3]


class TestNumbers:
    def test_evidence_is_numbers_alone_and_only_from_info_on(self) -> None:
        shown = of(leaking(RANK))
        keys = {dict(labels)["key"] for name, labels in samples(shown) if name == "oomwatch_verdict_evidence"}
        assert keys == {"floor_blocks", "floor_ratio", "pool_blocks", "slope_blocks_per_hour", "idle_seconds"}
        assert values(shown, "oomwatch_verdict_evidence", key="floor_blocks") == [2000]
        assert "oomwatch_verdict_evidence" not in names(of(leaking(RANK, "clear")))

    @pytest.mark.parametrize("state", ["clear", "info", "ticket", "page", "unknown"])
    def test_derived_numbers_are_there_whatever_the_state(self, state: State) -> None:
        shown = of(leaking(RANK, state))
        assert values(shown, "oomwatch_engine_kv_floor_blocks", engine="llama-8b", rank="0") == [2000]
        assert values(shown, "oomwatch_engine_kv_floor_slope_blocks_per_second") == [pytest.approx(1000 / 3600)]

    def test_they_are_of_now_while_a_state_outlasts_its_cause(self) -> None:
        standing = Standing()
        standing.settle(NOW, Finding("ticket", evidence={"preemptions_per_finished": 2.0}))
        eased = standing.settle(NOW + 60, Finding("clear", evidence={"preemptions_per_finished": 0.1}))
        assert (eased.state, eased.evidence["preemptions_per_finished"]) == ("ticket", 2.0)
        assert eased.present() == {"preemptions_per_finished": 0.1}

    @pytest.mark.parametrize("derived", DERIVED, ids=lambda derived: derived.family.name)
    def test_each_is_of_a_verdict_of_the_catalogue(self, derived: Derived) -> None:
        assert derived.verdict in CATALOGUE

    def test_a_budget_is_the_share_of_what_the_engine_sees(self) -> None:
        serving = replace(engine(), gpu_memory={gpu_uuid(0): 74 * GIB})
        assert serving.scrape is not None
        (reading,) = serving.scrape.ranks
        told = replace(reading, pool=replace(reading.pool, configured_bytes=NOT_EXPOSED))
        serving = replace(serving, scrape=replace(serving.scrape, ranks=(told,)))
        card = gpu(0, read=Memory(80 * GIB, GIB, 75 * GIB, 4 * GIB))
        shown = Snapshot(NOW, gpus=(card,), engines=(serving,))
        assert values(shown, "oomwatch_engine_device_budget_bytes") == [pytest.approx(0.9 * 79 * GIB)]
        assert values(shown, "oomwatch_engine_device_overrun_bytes") == [pytest.approx(74 * GIB - 0.9 * 79 * GIB)]

    def test_a_fixed_pool_has_no_budget(self) -> None:
        serving = replace(engine(), gpu_memory={gpu_uuid(0): 74 * GIB})
        assert "oomwatch_engine_device_budget_bytes" not in names(Snapshot(NOW, gpus=(gpu(0),), engines=(serving,)))

    @pytest.mark.parametrize(
        ("histogram", "share", "expected"),
        [
            (((100.0, 50.0), (200.0, 100.0), (float("inf"), 100.0)), 0.5, 100.0),
            (((100.0, 50.0), (200.0, 100.0), (float("inf"), 100.0)), 0.75, 150.0),
            (((100.0, 0.0), (200.0, 10.0), (float("inf"), 10.0)), 0.5, 150.0),
            (((100.0, 10.0), (float("inf"), 100.0)), 0.5, None),
            (((100.0, 0.0), (float("inf"), 0.0)), 0.5, None),
            ((), 0.5, None),
        ],
    )
    def test_lengths_are_interpolated_within_buckets(
        self, histogram: Histogram, share: float, expected: float | None
    ) -> None:
        assert quantile(histogram, share) == expected
