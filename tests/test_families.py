"""What the table of families says of other things is true of them."""

from __future__ import annotations

import re

import pynvml
import pytest

from oomwatch.config import Config
from oomwatch.families import FAMILIES, Family, metrics_markdown
from oomwatch.settings import find_field
from oomwatch.sources.vllm.names import MEANINGS

every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
VLLM_NAMES = {name for meaning in MEANINGS for name in meaning.names}


def words(family: Family) -> str:
    return " ".join((family.help, family.versions, family.absent))


@every_family
def test_a_setting_that_it_names_exists(family: Family) -> None:
    sections = "|".join(Config.model_fields)
    for key in re.findall(rf"\b(?:{sections})\.[a-z_]+", words(family)):
        _, found = find_field(Config, tuple(key.split(".")))
        assert found is not None, key


@every_family
def test_a_vllm_series_that_it_names_is_one_that_is_read(family: Family) -> None:
    assert set(re.findall(r"vllm:\w+", words(family))) <= VLLM_NAMES


@every_family
def test_an_nvml_function_that_it_names_is_one_of_the_library(family: Family) -> None:
    """nvidia-ml-py has a function of that name, without the version at its end."""
    for function in re.findall(r"\bnvml[A-Z]\w+", words(family)):
        assert hasattr(pynvml, re.sub(r"_v\d$", "", function)), function


@every_family
def test_a_family_of_its_own_that_it_names_exists(family: Family) -> None:
    named = set(re.findall(r"\boomwatch_\w+", words(family)))
    assert named <= {other.name for other in FAMILIES}


@every_family
def test_it_is_written_in_sentences(family: Family) -> None:
    assert re.fullmatch(r"[A-Z0-9].*\.", family.meaning)
    assert not family.source.endswith(".")
    assert "\n" not in family.help
    assert len(family.help) < 400


@every_family
def test_the_document_has_it_with_all_that_is_known_of_it(family: Family) -> None:
    (entry,) = re.findall(rf"^### `{family.name}`\n(.*?)(?=^##|\Z)", metrics_markdown(), re.MULTILINE | re.DOTALL)
    for fact in (family.meaning, family.source, family.cadence, family.versions, family.absent, *family.labels):
        assert fact in entry


def test_the_document_names_each_section_once() -> None:
    headings = re.findall(r"^## (.*)$", metrics_markdown(), re.MULTILINE)
    assert headings == list(dict.fromkeys(family.section for family in FAMILIES))
