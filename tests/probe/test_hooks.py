"""How the probe comes to the scheduler: by whoever imports it, and without changing what it does."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from oomwatch_probe.hooks import AfterImport, wrap_scheduler


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package with a module that is not imported yet."""
    (tmp_path / "oomwatch_some").mkdir()
    (tmp_path / "oomwatch_some" / "__init__.py").touch()
    (tmp_path / "oomwatch_some" / "module.py").write_text("value = 1\n", encoding="utf-8")
    (tmp_path / "oomwatch_some" / "broken.py").write_text("raise ValueError('broken')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield "oomwatch_some"
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.startswith("oomwatch_some")]:
        del sys.modules[name]


class TestAfterImport:
    def test_tells_of_the_module_once_it_is_whole(self, package: str) -> None:
        seen: list[Any] = []
        finders = len(sys.meta_path)
        AfterImport(f"{package}.module", lambda module: seen.append(module.value))
        assert (seen, f"{package}.module" in sys.modules) == ([], False)
        importlib.import_module(f"{package}.module")
        assert (seen, len(sys.meta_path)) == ([1], finders)

    def test_tells_at_once_of_one_that_is_there(self, package: str) -> None:
        importlib.import_module(f"{package}.module")
        seen: list[ModuleType] = []
        AfterImport(f"{package}.module", seen.append)
        assert [module.__name__ for module in seen] == [f"{package}.module"]

    def test_a_reload_is_not_told_again(self, package: str) -> None:
        seen: list[ModuleType] = []
        AfterImport(f"{package}.module", seen.append)
        importlib.reload(importlib.import_module(f"{package}.module"))
        assert len(seen) == 1

    def test_lets_the_error_of_a_module_through(self, package: str) -> None:
        seen: list[ModuleType] = []
        AfterImport(f"{package}.broken", seen.append)
        with pytest.raises(ValueError, match="broken"):
            importlib.import_module(f"{package}.broken")
        assert seen == []

    def test_lets_a_module_be_missing(self, package: str) -> None:
        AfterImport(f"{package}.missing", lambda _: None)
        with pytest.raises(ModuleNotFoundError, match=r"oomwatch_some\.missing"):
            importlib.import_module(f"{package}.missing")

    def test_an_error_of_its_own_does_not_reach_the_importer(self, package: str) -> None:
        def fail(_: ModuleType) -> None:
            raise RuntimeError

        AfterImport(f"{package}.module", fail)
        assert importlib.import_module(f"{package}.module").value == 1


class Watching:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def enter(self, is_step: bool) -> None:
        self.calls.append("step" if is_step else "enter")

    def leave(self) -> None:
        self.calls.append("leave")


def scheduler_class() -> type[Any]:
    class Scheduler:
        def __init__(self, limit: int) -> None:
            self.limit = limit

        def schedule(self, throttle: bool = False) -> tuple[int, bool]:
            """Docs."""
            return self.limit, throttle

        def update_from_output(self, output: object) -> object:
            if output is None:
                raise ValueError("no output")
            return output

        def finish_requests(self, names: list[str]) -> int:
            return len(names)

    return Scheduler


class TestWrapping:
    def test_answers_errors_and_signatures_stay_what_they_were(self) -> None:
        plain, wrapped, watching = scheduler_class(), scheduler_class(), Watching()
        wrap_scheduler(wrapped, lambda _: None, lambda _: watching)
        scheduler = wrapped(3)
        assert scheduler.schedule(throttle=True) == (3, True)
        assert scheduler.update_from_output("out") == "out"
        with pytest.raises(ValueError, match="no output"):
            scheduler.update_from_output(None)
        assert scheduler.finish_requests(["a"]) == 1
        assert watching.calls == ["step", "leave", *["enter", "leave"] * 3]
        for name in ("__init__", "schedule", "update_from_output", "finish_requests"):
            assert inspect.signature(getattr(wrapped, name)) == inspect.signature(getattr(plain, name))
        assert wrapped.schedule.__doc__ == "Docs."

    def test_schedulers_derived_from_it_are_seen_too(self) -> None:
        base = scheduler_class()
        made: list[Any] = []
        wrap_scheduler(base, made.append, lambda _: None)

        class Derived(base):  # type: ignore[misc,valid-type]  # the class is made above
            def schedule(self, throttle: bool = False) -> Any:
                return super().schedule(throttle), "derived"

        scheduler = Derived(3)
        assert made == [scheduler]
        assert scheduler.schedule() == ((3, False), "derived")

    def test_a_class_without_one_of_the_calls_stays_as_it_was(self) -> None:
        unknown = scheduler_class()
        del unknown.update_from_output
        before = dict(vars(unknown))
        with pytest.raises(AttributeError, match="update_from_output"):
            wrap_scheduler(unknown, lambda _: None, lambda _: None)
        assert dict(vars(unknown)) == before
