"""The detection's settings: thresholds for all and for some, verdicts switched off, planned silence, plain errors."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from oomwatch.config import Config, load
from oomwatch.detection import ConfiguredPolicy, DetectionConfig, WindowConfig
from oomwatch.detectors.base import Finding, Sample, Subject
from oomwatch.detectors.leak import KvBlockLeakSettings
from oomwatch.detectors.registry import KINDS, Kind
from oomwatch.judge import Judge
from oomwatch.node import Node
from oomwatch.observations import EngineFacts, EngineScrape, EngineUpdate, RankReading, Tick
from oomwatch.settings import ConfigError, Section

(KV_LEAK,) = (kind for kind in KINDS if kind.verdict == "kv-block-leak")
CHAT = Subject(engine="chat", rank="0")
BATCH = Subject(engine="batch-1", rank="0")
CARD = Subject(gpu="GPU-1")
MONDAY = datetime(2026, 11, 30, 12, tzinfo=ZoneInfo("UTC")).timestamp()


def loaded(tmp_path: Path, text: str) -> Config:
    file = tmp_path / "oomwatch.yaml"
    file.write_text(text, encoding="utf-8")
    return load(file, {}, {})


def policy(tmp_path: Path, text: str) -> ConfiguredPolicy:
    return ConfiguredPolicy(loaded(tmp_path, text).detection)


def leak(**changed: float) -> Section:
    """The thresholds of kv-block-leak with some changes."""
    return KvBlockLeakSettings.model_validate(changed)


def errors(tmp_path: Path, text: str) -> list[str]:
    """What is wrong, as it is printed, without the folder."""
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, text)
    return [str(problem).replace(f"{tmp_path}/", "") for problem in caught.value.problems]


def at(text: str, zone: str) -> float:
    """Unix time of a local moment; the first one where the clock shows it twice."""
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


class TestThresholds:
    def test_without_any_every_default_holds(self) -> None:
        plain = ConfiguredPolicy(DetectionConfig())
        for kind in KINDS:
            assert plain.settings(kind, CHAT) == kind.settings()

    def test_those_for_all_hold_for_all_and_the_rest_keeps_its_default(self, tmp_path: Path) -> None:
        found = policy(tmp_path, "detection: {thresholds: {kv_block_leak: {ticket_share: 0.07}}}")
        assert found.settings(KV_LEAK, CHAT) == leak(ticket_share=0.07)
        assert found.settings(KV_LEAK, BATCH) == leak(ticket_share=0.07)

    def test_an_environment_variable_sets_one(self) -> None:
        config = load(None, {"OOMWATCH_DETECTION__THRESHOLDS__KV_BLOCK_LEAK__HOLD_TIME": "20m"}, {})
        assert ConfiguredPolicy(config.detection).settings(KV_LEAK, CHAT) == leak(hold_time=1200)

    def test_an_override_changes_only_what_it_names_where_it_fits(self, tmp_path: Path) -> None:
        found = policy(
            tmp_path,
            """
detection:
  thresholds: {kv_block_leak: {ticket_share: 0.07, page_share: 0.3}}
  overrides:
    - engine: batch-*
      thresholds: {kv_block_leak: {ticket_share: 0.2}}
""",
        )
        assert found.settings(KV_LEAK, BATCH) == leak(ticket_share=0.2, page_share=0.3)
        assert found.settings(KV_LEAK, CHAT) == leak(ticket_share=0.07, page_share=0.3)

    def test_a_later_override_wins(self, tmp_path: Path) -> None:
        found = policy(
            tmp_path,
            """
detection:
  overrides:
    - engine: "*"
      thresholds: {kv_block_leak: {ticket_share: 0.2, page_share: 0.4}}
    - engine: batch-?
      thresholds: {kv_block_leak: {ticket_share: 0.3}}
""",
        )
        assert found.settings(KV_LEAK, BATCH) == leak(ticket_share=0.3, page_share=0.4)
        assert found.settings(KV_LEAK, CHAT) == leak(ticket_share=0.2, page_share=0.4)

    def test_a_default_that_is_written_out_overrides_too(self, tmp_path: Path) -> None:
        default = KvBlockLeakSettings.model_fields["ticket_share"].default
        found = policy(
            tmp_path,
            f"""
detection:
  thresholds: {{kv_block_leak: {{ticket_share: 0.5}}}}
  overrides:
    - engine: chat
      thresholds: {{kv_block_leak: {{ticket_share: {default}}}}}
""",
        )
        assert found.settings(KV_LEAK, CHAT) == leak()

    def test_one_for_a_device_is_not_about_an_engine_without_it(self, tmp_path: Path) -> None:
        found = policy(
            tmp_path, "detection: {overrides: [{gpu: GPU-1, thresholds: {kv_block_leak: {ticket_share: 0.5}}}]}"
        )
        assert found.settings(KV_LEAK, CHAT) == leak()
        on_it = Subject(engine="chat", gpu="GPU-1", pid=7)
        assert found.settings(KV_LEAK, on_it) == leak(ticket_share=0.5)

    def test_engine_and_device_together_mean_both(self, tmp_path: Path) -> None:
        found = policy(
            tmp_path,
            "detection: {overrides: [{engine: chat, gpu: GPU-1, thresholds: {kv_block_leak: {page_share: 0.5}}}]}",
        )
        assert found.settings(KV_LEAK, Subject(engine="chat", gpu="GPU-2")) == leak()
        assert found.settings(KV_LEAK, Subject(engine="chat", gpu="GPU-1")) == leak(page_share=0.5)


class TestSwitchedOff:
    def test_what_is_off_has_no_settings_and_the_rest_has(self, tmp_path: Path) -> None:
        found = policy(tmp_path, "detection: {off: [{engine: batch-*, verdicts: [kv-*]}]}")
        assert found.settings(KV_LEAK, BATCH) is None
        assert found.settings(KV_LEAK, CHAT) is not None
        assert all(found.settings(kind, BATCH) for kind in KINDS if not kind.verdict.startswith("kv-"))

    def test_without_engine_and_device_it_is_off_everywhere(self, tmp_path: Path) -> None:
        found = policy(tmp_path, "detection: {off: [{verdicts: kv-block-leak}]}")
        assert found.settings(KV_LEAK, CHAT) is None
        assert found.settings(KV_LEAK, CARD) is None

    def test_it_shows_as_unknown_with_the_reason(self, tmp_path: Path) -> None:
        found = policy(tmp_path, "detection: {off: [{engine: batch-*, verdicts: [kv-block-leak]}]}")
        judge = Judge(Node(), found, kinds=(Kind("kv-block-leak", "rank", AlwaysPages, KvBlockLeakSettings),))
        for name in ("chat", "batch-1"):
            judge.apply(EngineUpdate(MONDAY, EngineFacts(name)))
            judge.apply(EngineScrape(MONDAY, name, "ok", 0.01, ranks=(RankReading("0"),)))
        judge.apply(Tick(MONDAY))
        shown = {verdict.subject.engine: (verdict.state, verdict.reason) for verdict in judge.verdicts()}
        assert shown == {"chat": ("page", ""), "batch-1": ("unknown", "switched off")}


class AlwaysPages:
    """A detector that has made up its mind."""

    def __init__(self, subject: Subject, settings: Section) -> None:
        self.subject, self.settings = subject, settings

    def observe(self, sample: Sample) -> None:
        """Whatever it is."""

    def conclude(self, _t: float) -> Finding:
        return Finding("page")


class TestWindowsOnce:
    WINDOW = WindowConfig(reason="driver update", start="2026-11-30T02:00:00Z", end="2026-11-30T05:00:00+01:00")

    @pytest.mark.parametrize(
        ("moment", "holds"),
        [("01:59:59", False), ("02:00:00", True), ("03:59:59", True), ("04:00:00", False)],
    )
    def test_it_holds_from_its_start_until_before_its_end(self, moment: str, holds: bool) -> None:
        assert self.WINDOW.holds(at(f"2026-11-30T{moment}", "UTC")) == holds
        assert not self.WINDOW.holds(at(f"2026-12-01T{moment}", "UTC")), "it comes once"

    def test_its_reason_shows_for_the_verdicts_and_subjects_that_it_names(self, tmp_path: Path) -> None:
        found = policy(
            tmp_path,
            """
detection:
  windows:
    - {reason: rollout, engine: batch-*, verdicts: [engine-*], start: 2026-11-30T00:00:00Z, end: 2026-12-01T00:00:00Z}
""",
        )
        assert found.silence("engine-stuck", BATCH, MONDAY) == "rollout"
        assert found.silence("kv-block-leak", BATCH, MONDAY) == ""
        assert found.silence("engine-stuck", CHAT, MONDAY) == ""
        assert found.silence("engine-stuck", CARD, MONDAY) == "", "a device is no engine"
        assert found.silence("engine-stuck", BATCH, MONDAY + 86400) == ""

    def test_a_silent_verdict_is_concluded_and_says_what_silences_it(self, tmp_path: Path) -> None:
        found = policy(tmp_path, "detection: {windows: [{start: 2026-11-30T00:00:00Z, end: 2026-12-01T00:00:00Z}]}")
        judge = Judge(Node(), found, kinds=(Kind("kv-block-leak", "rank", AlwaysPages, KvBlockLeakSettings),))
        judge.apply(EngineUpdate(MONDAY, EngineFacts("chat")))
        judge.apply(EngineScrape(MONDAY, "chat", "ok", 0.01, ranks=(RankReading("0"),)))
        judge.apply(Tick(MONDAY))
        assert [(verdict.state, verdict.silenced) for verdict in judge.verdicts()] == [("page", "maintenance")]


class TestWeeklyWindows:
    def weekly(self, begins: str, ends: str, days: tuple[str, ...] = ("sun",), zone: str = "UTC") -> WindowConfig:
        return WindowConfig.model_validate({"begins": begins, "ends": ends, "days": days, "zone": zone})

    @pytest.mark.parametrize(
        ("moment", "holds"),
        [
            ("2026-11-29T01:59:59", False),
            ("2026-11-29T02:00:00", True),
            ("2026-11-29T03:59:59", True),
            ("2026-11-29T04:00:00", False),
            ("2026-11-30T03:00:00", False),
            ("2026-12-06T03:00:00", True),
        ],
    )
    def test_it_comes_each_week_on_its_days(self, moment: str, holds: bool) -> None:
        assert self.weekly("02:00", "04:00").holds(at(moment, "UTC")) == holds

    @pytest.mark.parametrize(
        ("moment", "holds"),
        [
            ("2026-11-29T00:30:00", False),  # Sunday's begins in the evening
            ("2026-11-29T23:30:00", True),
            ("2026-11-30T00:59:59", True),  # Monday's first hour belongs to Sunday's window
            ("2026-11-30T01:00:00", False),
            ("2026-11-30T23:45:00", False),
        ],
    )
    def test_it_goes_on_past_midnight(self, moment: str, holds: bool) -> None:
        assert self.weekly("23:30", "01:00").holds(at(moment, "UTC")) == holds

    def test_equal_times_are_a_whole_day(self) -> None:
        window = self.weekly("06:00", "06:00")
        assert window.holds(at("2026-11-30T05:59:59", "UTC"))
        assert not window.holds(at("2026-11-30T06:00:00", "UTC"))

    def test_every_day_unless_days_are_given(self) -> None:
        window = WindowConfig(begins="02:00", ends="03:00")
        assert all(window.holds(at(f"2026-11-{day}T02:30:00", "UTC")) for day in range(23, 30))

    def test_it_is_of_the_clock_on_its_zone_s_walls(self) -> None:
        window = self.weekly("02:00", "04:00", zone="America/New_York")
        assert window.holds(at("2026-11-29T02:30:00", "America/New_York"))
        assert not window.holds(at("2026-11-29T02:30:00", "UTC"))
        late = self.weekly("20:00", "21:00", zone="America/New_York")
        assert late.holds(at("2026-11-30T01:30:00", "UTC")), "Monday in UTC is still Sunday there"

    def test_summer_and_winter_do_not_move_it(self) -> None:
        window = self.weekly("09:00", "10:00", zone="Europe/Berlin")
        assert window.holds(at("2026-07-05T07:30:00", "UTC"))
        assert window.holds(at("2026-12-06T08:30:00", "UTC"))
        assert not window.holds(at("2026-12-06T07:30:00", "UTC"))

    def test_an_hour_that_the_clock_skips_is_missing_from_it(self) -> None:
        window = self.weekly("02:30", "03:30", zone="Europe/Berlin")  # 2026-03-29: 02:00 is followed by 03:00
        assert not window.holds(at("2026-03-29T00:59:59", "UTC"))
        assert window.holds(at("2026-03-29T01:00:00", "UTC"))
        assert window.holds(at("2026-03-29T01:29:59", "UTC"))
        assert not window.holds(at("2026-03-29T01:30:00", "UTC"))

    def test_an_hour_that_the_clock_shows_twice_is_in_it_twice(self) -> None:
        window = self.weekly("02:00", "03:00", zone="Europe/Berlin")  # 2026-10-25: 02:00 to 03:00 comes twice
        held = [
            window.holds(at(f"2026-10-{moment}", "UTC")) for moment in ("24T23:59:59", "25T00:00:00", "25T01:59:59")
        ]
        assert held == [False, True, True]
        assert not window.holds(at("2026-10-25T02:00:00", "UTC"))


class TestErrors:
    def test_a_wrong_name_of_a_verdict_says_what_was_meant(self, tmp_path: Path) -> None:
        (error,) = errors(tmp_path, "detection:\n  off:\n    - verdicts: [kv-block-leek]\n")
        assert error.startswith('oomwatch.yaml:3:7: detection.off[0].verdicts: "kv-block-leek" is no verdict')
        assert 'Did you mean "kv-block-leak"?' in error

    def test_a_name_that_is_like_none_is_told_all_there_are(self, tmp_path: Path) -> None:
        (error,) = errors(tmp_path, "detection: {windows: [{verdicts: [x], begins: '02:00', ends: '03:00'}]}")
        assert "There are: startup-refused, startup-oom," in error

    def test_a_bad_threshold_inside_an_override_names_its_line(self, tmp_path: Path) -> None:
        text = """\
detection:
  overrides:
    - engine: chat
      thresholds:
        kv_block_leak:
          ticket_share: 3
          hold_time: soon
"""
        share, hold = errors(tmp_path, text)
        where = "detection.overrides[0].thresholds.kv_block_leak"
        assert share == f"oomwatch.yaml:6:11: {where}.ticket_share: 3 is not allowed. Allowed: 0 to 1."
        assert hold.startswith(f'oomwatch.yaml:7:11: {where}.hold_time: "soon" is not a duration. Allowed: above 0s')

    def test_an_unknown_threshold_and_an_unknown_verdict_say_what_was_meant(self, tmp_path: Path) -> None:
        text = "detection:\n  thresholds:\n    kv_block_leak: {tickets_share: 1}\n    kv_blocks_leak: {}\n"
        first, second = errors(tmp_path, text)
        assert 'unknown key. Did you mean "ticket_share"?' in first
        assert first.startswith("oomwatch.yaml:3:")
        assert 'unknown key. Did you mean "kv_block_leak"?' in second

    def test_an_override_for_nobody_belongs_elsewhere(self, tmp_path: Path) -> None:
        (error,) = errors(tmp_path, "detection: {overrides: [{thresholds: {kv_block_leak: {ticket_share: 0.1}}}]}")
        assert "engine or gpu is required. What is for all belongs in detection.thresholds." in error

    @pytest.mark.parametrize(
        ("window", "words"),
        [
            ("{reason: x}", "give either start and end (once) or begins and ends (every week)"),
            ("{begins: '02:00'}", "half a window"),
            ("{start: 2026-11-30T02:00:00Z}", "half a window"),
            (
                "{begins: '02:00', ends: '03:00', start: 2026-11-30T02:00:00Z, end: 2026-11-30T03:00:00Z}",
                "give either start and end",
            ),
            ("{start: 2026-11-30T02:00:00Z, end: 2026-11-30T02:00:00Z}", "not later than start"),
            ("{start: 2026-11-30T02:00:00, end: 2026-11-30T03:00:00Z}", "a moment without a time zone. Add Z for UTC"),
            ("{start: tomorrow, end: 2026-11-30T03:00:00Z}", "not a moment. Write it as 2026-11-30T02:00:00Z"),
            ("{begins: 2 pm, ends: '03:00'}", "not a time of day. Write it as 02:00"),
            ("{begins: '02:00+01:00', ends: '03:00'}", "a time of day with a time zone"),
            (
                "{begins: '02:00', ends: '03:00', zone: Mars/Olympus}",
                "not a known time zone. Write it as Europe/Berlin",
            ),
            ("{begins: '02:00', ends: '03:00', days: [sunday]}", "Allowed: mon, tue, wed, thu, fri, sat, sun"),
        ],
    )
    def test_a_window_that_cannot_be_meant(self, tmp_path: Path, window: str, words: str) -> None:
        (error,) = errors(tmp_path, f"detection:\n  windows:\n    - {window}\n")
        assert error.startswith("oomwatch.yaml:3:")
        assert words in error
