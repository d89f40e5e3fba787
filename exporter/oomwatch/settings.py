"""What every file of settings shares: YAML with positions, units, and errors that say what, where and what to do.

Durations are seconds (float), sizes bytes (int). No error text ever holds a secret's value.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import ssl
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic_core import InitErrorDetails, PydanticCustomError

from oomwatch.errors import InputError

KeyPath = tuple[str | int, ...]

MASK = "<secret>"
MAX_FILE_BYTES = 1 << 20
MAX_NODES = 100_000  # a small file can expand to more than memory through YAML's aliases


# --- problems --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Origin:
    """Where a setting came from: a file with line and column (from 1), an environment variable, or a flag."""

    source: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return ":".join(str(part) for part in (self.source, self.line, self.column) if part is not None)


@dataclass(frozen=True)
class Problem:
    """One thing wrong with the settings; ``severity`` is ``error`` or ``warning``."""

    origin: Origin
    key: str
    message: str
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        return ": ".join(part for part in (str(self.origin), self.key, self.message) if part)


class ConfigError(InputError):
    """Settings that cannot be used; ``problems`` holds everything wrong with them, in the order of the file."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def key_text(path: KeyPath) -> str:
    """``engines[0].url`` for ("engines", 0, "url")."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` Did you mean "x"?`` for the nearest known word, empty where none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f' Did you mean "{near[0]}"?' if near else ""


# --- YAML ------------------------------------------------------------------------------------------------------


@dataclass
class Layer:
    """Settings from one source, and where each key stands."""

    data: dict[str, Any] = field(default_factory=dict)
    where: dict[KeyPath, Origin] = field(default_factory=dict)

    def put(self, path: KeyPath, value: object, origin: Origin) -> None:
        """Set one nested key; sections on the way are made."""
        section = self.data
        for part in path[:-1]:
            section = section.setdefault(str(part), {})
        section[str(path[-1])] = value
        self.where[path] = origin

    def origin(self, path: KeyPath, otherwise: Origin) -> Origin:
        """The place of a key, or of the nearest section around it that is written somewhere."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.where:
                return self.where[path[:length]]
        return otherwise

    def overlaid(self, other: Layer) -> Layer:
        """This layer with the other's settings on top: sections are merged, everything else is replaced."""
        merged = Layer(dict(self.data), dict(self.where))
        _overlay(merged, merged.data, other, other.data, ())
        return merged


def _overlay(merged: Layer, target: dict[str, Any], top: Layer, source: Mapping[str, Any], path: KeyPath) -> None:
    for key, value in source.items():
        here = (*path, key)
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            target[key] = dict(target[key])
            _overlay(merged, target[key], top, value, here)
            continue
        target[key] = value
        for known in [known for known in merged.where if known[: len(here)] == here]:
            del merged.where[known]
        merged.where.update({known: place for known, place in top.where.items() if known[: len(here)] == here})


class _Loader(yaml.SafeLoader):
    """YAML's scalars as version 1.2 has them: no dates, no base 60 (1:30), no octal by a leading 0."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first))


def _decimal(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    return int(text, 16) if text.startswith("0x") else int(text)


_Loader.add_constructor("tag:yaml.org,2002:int", _decimal)


_PLAIN_TAGS = frozenset(f"tag:yaml.org,2002:{name}" for name in ("map", "seq", "str", "bool", "int", "float", "null"))


class _Dumper(yaml.SafeDumper):
    """Quotes what the loader would not take for text."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: object) -> bool:
        return True


class _Endless(Exception):
    """Aliases that repeat themselves, or far more nodes than a configuration can have."""


class _Reader:
    """Turns composed YAML into data and positions, collecting problems."""

    def __init__(self, loader: _Loader, source: str, layer: Layer) -> None:
        self.loader = loader
        self.source = source
        self.layer = layer
        self.problems: list[Problem] = []
        self.nodes = 0
        self.open: set[int] = set()

    def origin(self, node: yaml.Node) -> Origin:
        return Origin(self.source, node.start_mark.line + 1, node.start_mark.column + 1)

    def problem(self, node: yaml.Node, path: KeyPath, message: str) -> None:
        self.problems.append(Problem(self.origin(node), key_text(path), message))

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        self.nodes += 1
        if self.nodes > MAX_NODES or id(node) in self.open:
            raise _Endless
        self.open.add(id(node))
        try:
            if node.tag not in _PLAIN_TAGS:
                tag = node.tag.replace("tag:yaml.org,2002:", "!!")
                self.problem(node, path, f"a tag ({tag}). Plain values only.")
                return None
            if isinstance(node, yaml.MappingNode):
                return self.mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self.item(child, (*path, index)) for index, child in enumerate(node.value)]
            return self.loader.construct_object(node)
        except (ValueError, KeyError):
            self.problem(node, path, f"not of the type that its tag ({node.tag.rpartition(':')[2]}) says.")
            return None
        finally:
            self.open.discard(id(node))

    def item(self, node: yaml.Node, path: KeyPath) -> Any:
        self.layer.where[path] = self.origin(node)
        return self.value(node, path)

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        first: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            name = key.value if isinstance(key, yaml.ScalarNode) else None
            if name in first:
                line = first[name].start_mark.line + 1
                self.problem(key, (*path, name), f"the key is there twice, the first time in line {line}. Keep one.")
            elif name is not None:
                first[name] = key
        self.loader.flatten_mapping(node)
        data: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.problem(key, path, "a key must be a plain word.")
                continue
            name = str(key.value)
            here = (*path, name)
            self.layer.where[here] = self.origin(key)
            content = self.value(value, here)
            if content is not None:
                data[name] = content
        return data


_YAML_ADVICE = {
    "mapping values are not allowed here": "a second colon in one line, or the line is indented too far. "
    "Put a text that holds a colon in quotes",
    "found character '\\t' that cannot start any token": "a tab. Indent with spaces",
    "but found another document": "a second document after ---. Keep one",
}
_YAML_ENDS = "the text ends in the middle of a value. A bracket or a quote is left open"


def _plain(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "it cannot be understood"
    ends = "<stream end>" in problem or "unexpected end of stream" in problem
    text = _YAML_ENDS if ends else _YAML_ADVICE.get(problem, problem)
    begun = error.context_mark
    if problem not in _YAML_ADVICE and error.context and begun is not None:
        text += f" ({error.context} that starts in line {begun.line + 1})"
    return f"not valid YAML: {text}."


def read_yaml(text: str, source: str) -> tuple[Layer, list[Problem]]:
    """The mapping in a YAML text, empty for an empty text, and everything wrong with its form.

    A key without a value counts as absent.
    """
    data, layer, problems = read_yaml_value(text, source)
    if isinstance(data, dict):
        layer.data = data
    elif data is not None:
        what = "a list" if isinstance(data, list) else "a single value"
        problems.append(Problem(Origin(source, 1), "", f"{what} where keys and values are expected."))
    return layer, problems


def read_yaml_value(text: str, source: str, at: KeyPath = ()) -> tuple[Any, Layer, list[Problem]]:
    """Any YAML value, a layer with the places of its keys (their paths start with ``at``), and what is wrong."""
    layer = Layer()
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, layer, []
        reader = _Reader(loader, source, layer)
        data = reader.value(node, at)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Origin(source, mark.line + 1, mark.column + 1) if mark else Origin(source)
        return None, layer, [Problem(place, key_text(at), _plain(error))]
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"not valid YAML: the character U+{error.character:04X} is not allowed."
        return None, layer, [Problem(Origin(source, line), key_text(at), message)]
    except (RecursionError, _Endless):
        return None, layer, [Problem(Origin(source), key_text(at), "not usable: nested or repeated without end.")]
    return data, layer, reader.problems


def dump_yaml(data: Mapping[str, Any]) -> str:
    """YAML that read_yaml reads back to the same data."""
    return yaml.dump(
        dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=120
    )


def read_text(path: Path) -> str:
    """A settings file's text; ConfigError where it cannot be read, is too large, or is not UTF-8."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        message = f"cannot be read: {(error.strerror or str(error)).lower()}."
        raise ConfigError([Problem(Origin(str(path)), "", message)]) from error
    if len(raw) > MAX_FILE_BYTES:
        message = f"larger than {format_size(MAX_FILE_BYTES)}: not a configuration file."
        raise ConfigError([Problem(Origin(str(path)), "", message)])
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError([Problem(Origin(str(path), line), "", "not UTF-8 text.")]) from error


def read_secret(path: Path) -> str:
    """The one line in a file with a token or a password, without the line end; OSError or ValueError."""
    with path.open("rb") as file:
        raw = file.read(MAX_FILE_BYTES + 1)
    try:
        text = raw.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8 text") from error
    if not text.strip():
        raise ValueError("empty")
    if re.search(r"[\x00-\x1f]", text):
        raise ValueError("more than one line")
    return text


def load_certificate(context: ssl.SSLContext, certificate: Path, key: Path | None) -> str:
    """Loads a certificate and its key (None: in the same file); what is wrong with them, empty when nothing is."""
    asked = False

    def no_password() -> str:
        nonlocal asked
        asked = True
        return ""

    try:
        # Without this function OpenSSL would ask at the terminal and wait.
        context.load_cert_chain(certificate, key, password=no_password)
    except ssl.SSLError as error:
        if asked:
            return "the key is protected by a password. Give one without"
        if "KEY_VALUES_MISMATCH" in str(error.reason):
            return "certificate and key do not belong together"
        return f"{key or certificate} holds no certificate with its key in PEM form"
    except OSError as error:
        return f"certificate or key cannot be read: {(error.strerror or str(error)).lower()}"
    return ""


# --- units -----------------------------------------------------------------------------------------------------


_MILLISECONDS = {"w": 604_800_000, "d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}
_DURATION = re.compile("".join(rf"(?:(?P<{unit}>\d+(?:\.\d+)?){unit})?" for unit in _MILLISECONDS))
_SIZE_UNITS = {
    "b": 1,
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}i": 1024**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
}
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def _wrong(message: str) -> PydanticCustomError:
    """A problem in plain words; braces would be taken for placeholders."""
    return PydanticCustomError("plain", "{message}", {"message": message})


def parse_duration(value: object) -> float:
    """Seconds from ``15s``, ``1m30s``, ``250ms``, ``2h``, ``1d`` or a plain number of seconds."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if isinstance(value, str):
        text = value.strip()
        if _NUMBER.fullmatch(text):
            return float(text)
        match = _DURATION.fullmatch(text)
        if text and match:
            # Thousandths are added up whole, so that 1.5s and 1s500ms are the same number.
            parts = [float(number) * _MILLISECONDS[unit] for unit, number in match.groupdict().items() if number]
            return math.fsum(parts) / 1000
    raise _wrong("not a duration")


def format_duration(seconds: float) -> str:
    """``1m30s`` for 90; what parse_duration reads back to the same number."""
    rest = round(seconds * 1000)
    if rest / 1000 != seconds or rest < 0:
        return f"{seconds!r}"
    text = ""
    for unit, length in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, rest = divmod(rest, length)
        text += f"{count}{unit}" if count else ""
    return text or "0s"


def parse_size(value: object) -> int:
    """Bytes from ``16MiB``, ``1.5GiB``, ``80GB`` or a plain number."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", value.strip())
        factor = _SIZE_UNITS.get(match[2].lower() or "b") if match else None
        if match and factor is None and match[2].lower() in tuple("kmgt"):
            letter = match[2].upper()
            raise _wrong(f"ambiguous: write {letter}iB (powers of 1024) or {letter}B (powers of 1000)")
        if match and factor is not None:
            size = float(match[1]) * factor if "." in match[1] else int(match[1]) * factor
            if size == int(size):
                return int(size)
    raise _wrong("not a size")


def format_size(size: int) -> str:
    """``16MiB``; what parse_size reads back to the same number."""
    for unit, factor in (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


# --- kinds of values -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """What a value is, for documents and errors: a type's name, what is allowed, how a value is written."""

    name: str
    allowed: str = ""
    show: Callable[[Any], str] | None = None
    secret: bool = False


DURATION = Kind("duration", "such as 15s, 1m30s, 250ms, 2h or a plain number of seconds", format_duration)
SIZE = Kind("size", "such as 16MiB, 1GiB, 80GB or a plain number of bytes", format_size)
FILE = Kind("file", "a path, relative to the file that names it")
FOLDER = Kind("folder", FILE.allowed)  # of our own: made where it is missing


def _named_file(value: object) -> object:
    if value == "":
        raise _wrong("not a file's name. Leave the key out where there is none")
    return value


Duration = Annotated[
    float, BeforeValidator(parse_duration), PlainSerializer(format_duration, when_used="json"), DURATION
]
Size = Annotated[int, BeforeValidator(parse_size), PlainSerializer(format_size, when_used="json"), SIZE]
File = Annotated[Path, BeforeValidator(_named_file), FILE]
Folder = Annotated[Path, BeforeValidator(_named_file), FOLDER]


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


Texts = Annotated[tuple[str, ...], BeforeValidator(_one_or_many), Kind("list of texts")]


# --- sections --------------------------------------------------------------------------------------------------

S = TypeVar("S", bound="Section")


@dataclass(frozen=True)
class Contradiction:
    """Keys that are fine alone and wrong together; ``path`` is relative to the section."""

    path: KeyPath
    message: str


class Section(BaseModel):
    """A part of the settings: immutable, and with no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False)

    @classmethod
    def contradictions(cls, data: Mapping[str, Any]) -> Iterator[Contradiction]:
        """Problems between keys, found in what was written, so that they show beside problems of single keys."""
        yield from ()

    @model_validator(mode="wrap")
    @classmethod
    def _report_all(cls: type[S], data: object, handler: ModelWrapValidatorHandler[S]) -> S:
        lines: list[InitErrorDetails] = []
        section: S | None = None
        try:
            section = handler(data)
        except ValidationError as error:
            lines = [_again(line) for line in error.errors(include_url=False)]
        if isinstance(data, Mapping):
            for found in cls.contradictions(data):
                kind = PydanticCustomError("contradiction", "{message}", {"message": found.message})
                lines.append(InitErrorDetails(type=kind, loc=found.path, input=None))
        if section is None or lines:
            raise ValidationError.from_exception_data(cls.__name__, lines)
        return section


def _again(line: Any) -> InitErrorDetails:
    """A reported error in the form in which it can be reported once more."""
    kind = line["type"]
    if kind == "value_error":
        kind, line = "plain", {**line, "ctx": {"message": str(line["ctx"]["error"])}}
    if kind in ("plain", "contradiction"):
        kind = PydanticCustomError(kind, "{message}", line["ctx"])
        return InitErrorDetails(type=kind, loc=line["loc"], input=line["input"])
    return InitErrorDetails(type=kind, loc=line["loc"], input=line["input"], ctx=line.get("ctx", {}))


def _plain_type(annotation: Any) -> Any:
    """The type without Optional."""
    if get_origin(annotation) in (Union, types.UnionType):
        inner = [part for part in get_args(annotation) if part is not type(None)]
        return inner[0] if len(inner) == 1 else annotation
    return annotation


def _section_type(kind: Any) -> type[Section] | None:
    # Python 3.10 takes tuple[str, ...] for a class until it is asked about subclasses.
    is_class = isinstance(kind, type) and get_origin(kind) is None
    return kind if is_class and issubclass(kind, Section) else None


@dataclass(frozen=True)
class Described:
    """A field as documents and errors see it."""

    name: str
    info: FieldInfo
    type: Any
    metadata: tuple[Any, ...]

    @property
    def kind(self) -> Kind | None:
        return next((item for item in reversed(self.metadata) if isinstance(item, Kind)), None)

    @property
    def section(self) -> type[Section] | None:
        """The section that the field holds, if it holds one."""
        return _section_type(self.type)

    @property
    def sections(self) -> type[Section] | None:
        """What the field is a list of, if it is a list of sections."""
        return _section_type(get_args(self.type)[0]) if self.many else None

    @property
    def many(self) -> bool:
        """Whether the field is a list."""
        return get_origin(self.type) is tuple

    @property
    def type_name(self) -> str:
        if self.kind:
            return self.kind.name
        if self.sections:
            return "list of sections"
        if self.section:
            return "section"
        if get_origin(self.type) is Literal:
            return "word"
        names: dict[Hashable, str] = {bool: "boolean", int: "integer", float: "number", str: "text"}
        if self.many:
            item = get_args(self.type)[0]
            return f"list of {names[get_args(item)[0] if get_origin(item) is Annotated else item]}s"
        return names.get(self.type, "mapping of texts")

    def shown(self, value: object) -> str:
        """A value as it is written in a file."""
        if value is None:
            return ""
        if isinstance(value, bool):
            return "true" if value else "false"
        if self.kind and self.kind.show:
            return self.kind.show(value)
        if isinstance(value, tuple):
            return "[" + ", ".join(str(item) for item in value) + "]"
        if isinstance(value, Mapping):
            return "{}" if not value else str(dict(value))
        return str(value)

    @property
    def allowed(self) -> str:
        """What may be written here, in words."""
        form = self.kind.allowed if self.kind else ""
        return ", ".join(part for part in (self.limits, form) if part)

    @property
    def limits(self) -> str:
        """The range or the words that are allowed, empty where anything of the type is."""
        low = next((self.shown(item.ge) for item in self.metadata if isinstance(item, Ge)), "")
        above = next((self.shown(item.gt) for item in self.metadata if isinstance(item, Gt)), "")
        high = next((self.shown(item.le) for item in self.metadata if isinstance(item, Le)), "")
        below = next((self.shown(item.lt) for item in self.metadata if isinstance(item, Lt)), "")
        parts = [f"above {above}"] if above else []
        if low and high:
            parts.append(f"{low} to {high}")
        elif low:
            parts.append(f"{low} or more")
        elif high:
            parts.append(f"up to {high}")
        if below:
            parts.append(f"below {below}")
        text = " and ".join(parts)
        if get_origin(self.type) is Literal:
            text = ", ".join(str(word) for word in get_args(self.type))
        elif self.type is bool:
            text = "true or false"
        return text


def described(section: type[Section]) -> dict[str, Described]:
    """The fields of a section by name."""
    return {name: _describe(name, info) for name, info in section.model_fields.items()}


def _describe(name: str, info: FieldInfo) -> Described:
    inner = _plain_type(info.annotation)
    metadata = tuple(info.metadata)
    if get_origin(inner) is Annotated:
        inner, *more = get_args(inner)
        metadata += tuple(more)
    return Described(name, info, inner, metadata)


def find_field(section: type[Section], path: KeyPath) -> tuple[type[Section] | None, Described | None]:
    """The innermost section along a path, and the field that the path ends at or in; None where there is none."""
    inside: type[Section] | None = section
    last: Described | None = None
    for part in path:
        if isinstance(part, int):
            inside = last.sections if last else None
            continue
        if inside is None:
            break
        last = described(inside).get(part)
        if last is None:
            return inside, None
        inside = last.section
    return inside, last


# --- from validation errors to problems ------------------------------------------------------------------------


def validate(section: type[S], layer: Layer, otherwise: Origin) -> tuple[S | None, list[Problem]]:
    """A section from a layer's data, or every problem in the order of their places."""
    try:
        return section.model_validate(layer.data), []
    except ValidationError as error:
        problems = [_problem(section, layer, line, otherwise) for line in error.errors(include_url=False)]
    return None, in_order(problems)


def in_order(problems: Iterable[Problem]) -> list[Problem]:
    """By line and column, those of environment variables and flags last."""
    return sorted(problems, key=_by_place)


def _by_place(problem: Problem) -> tuple[bool, str, int, int]:
    origin = problem.origin
    return origin.line is None, origin.source, origin.line or 0, origin.column or 0


def _problem(section: type[Section], layer: Layer, line: Any, otherwise: Origin) -> Problem:
    path: KeyPath = tuple(line["loc"])
    kind: str = line["type"]
    origin = layer.origin(path, otherwise)
    if kind == "extra_forbidden":
        parent, _ = find_field(section, path[:-1])
        known = list(described(parent)) if parent else []
        hint = did_you_mean(str(path[-1]), known) or f" Known here: {', '.join(known)}."
        return Problem(origin, key_text(path), f"unknown key.{hint}")
    if kind == "missing":
        return Problem(layer.origin(path[:-1], otherwise), key_text(path), "this key is required.")
    if kind == "contradiction":
        return Problem(origin, key_text(path), f"{line['ctx']['message']}.")
    _, found = find_field(section, path)
    return Problem(origin, key_text(path), _sentence(kind, line, _written(layer.data, path, line["input"]), found))


def _written(data: Any, path: KeyPath, otherwise: object) -> object:
    """The value at a path as it was written, before it was understood as seconds or bytes."""
    try:
        for part in path:
            data = data[part]
    except (TypeError, LookupError):
        return otherwise
    return data


_SHAPES = {
    "model_type": "keys and values are expected here",
    "model_attributes_type": "keys and values are expected here",
    "dict_type": "keys and values are expected here",
    "tuple_type": "a list is expected here",
}
_TYPES = {
    "int": "not a whole number",
    "float": "not a number",
    "finite_number": "not a number",
    "bool": "not a boolean",
    "path": "not a file's name",
}


def without_credentials(text: str) -> str:
    """The text with what stands before the @ and after the ? in URLs masked."""
    text = re.sub(r"//[^/\s]*@", f"//{MASK}@", text)
    return re.sub(r"(//[^?\s]*\?)\S+", rf"\1{MASK}", text)


def _quoted(value: object) -> str:
    text = without_credentials(value) if isinstance(value, str) else str(value).lower()
    text = text if len(text) <= 120 else f"{text[:100]}…"
    return json.dumps(text, ensure_ascii=False) if isinstance(value, str) else text


def _sentence(kind: str, line: Any, value: object, found: Described | None) -> str:
    of_type = next((text for name, text in _TYPES.items() if kind.startswith(name)), "not allowed")
    said: str = line["ctx"]["message"] if kind == "plain" else _SHAPES.get(kind, of_type)
    tellable = isinstance(value, (str, int, float)) and not (found and found.kind and found.kind.secret)
    shown = _quoted(value) if tellable else ""
    if kind == "string_type" and shown:
        return f'{shown} is not text. Write it in quotes: "{shown}".'
    if shown and kind not in _SHAPES:
        text = f"{shown} is {said}" if said.startswith(("not ", "ambiguous")) else f"{shown}: {said}"
    else:
        text = said
    allowed = found.allowed if found and kind not in _SHAPES else ""
    return f"{text}. Allowed: {allowed}." if allowed else f"{text}."


def resolve_files(section: type[Section], data: dict[str, Any], base: Path) -> None:
    """Makes the names of files in raw data relative to a folder."""
    for name, found in described(section).items():
        value = data.get(name)
        if found.section and isinstance(value, dict):
            resolve_files(found.section, value, base)
        elif found.sections:
            for item in sequence(value):
                if isinstance(item, dict):
                    resolve_files(found.sections, item, base)
        elif found.kind in (FILE, FOLDER) and isinstance(value, str) and value:
            data[name] = str(base / value)


def named_files(section: Section, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Path]]:
    """Every file to be read that a section names, with its key."""
    for name, found in described(type(section)).items():
        value = getattr(section, name)
        if isinstance(value, Path) and found.kind is FILE:
            yield (*path, name), value
        elif isinstance(value, Section):
            yield from named_files(value, (*path, name))
        for index, item in enumerate(sequence(value)):
            if isinstance(item, Section):
                yield from named_files(item, (*path, name, index))


def as_written(section: Section) -> dict[str, Any]:
    """A section as it would stand in a file, defaults included, secrets masked."""
    return {name: _as_written(found, getattr(section, name)) for name, found in described(type(section)).items()}


def _as_written(found: Described, value: Any) -> Any:
    if isinstance(value, Section):
        return as_written(value)
    if isinstance(value, tuple):
        return [as_written(item) if isinstance(item, Section) else item for item in value]
    if value is None or isinstance(value, bool):
        return value
    if found.kind and found.kind.secret:
        return dict.fromkeys(value, MASK) if isinstance(value, Mapping) else without_credentials(value)
    if found.kind and found.kind.show:
        return found.kind.show(value)
    return str(value) if isinstance(value, Path) else value


def sequence(value: object) -> Sequence[Any]:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, (list, tuple)) else ()
