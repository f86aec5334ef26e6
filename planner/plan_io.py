"""The plan's file: canonical JSON out, nothing but a sound plan in.

``to_json`` writes sorted keys, minimal separators, ASCII only, finite numbers and one newline at the end, so equal plans are equal
bytes in any process. ``from_json`` reads in five steps, each of which can only raise ``PlanError``::

    bytes ─1 size, UTF-8─→ text ─2 nesting─→ ─3 JSON, no duplicate keys─→ data ─4 migrate─→ version now ─5 types, then sense─→ Plan
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from planner.errors import PlanError
from planner.plan import SCHEMA_VERSION, Plan
from planner.plan_check import check

MAX_BYTES = 8 * 2**20
MAX_DEPTH = 64
MAX_DIGITS = 19
MAX_INTEGER = 2**63 - 1
MAX_STRING = 4096

Data = dict[str, Any]
MIGRATIONS: dict[int, Callable[[Data], Data]] = {}
"""Version -> function that turns a plan's data of that version into data of the next one."""


# ---------------------------------------------------------------- out


def to_json(plan: Plan) -> str:
    """Canonical JSON. Raises PlanError where a value has no JSON form (an infinite constant among the inputs)."""
    try:
        return json.dumps(plan.model_dump(mode="python"), sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n"
    except (ValueError, TypeError) as error:
        raise PlanError(f"plan of {plan.model.name!r} cannot be written as JSON: {error}; only finite plain data may be in it") from None


def save(plan: Plan, path: str | os.PathLike[str]) -> Path:
    """Write a plan aside, then rename it: a reader sees the old file or the new one, never half of one."""
    target = Path(path)
    check(plan)
    data = to_json(plan).encode("ascii")
    if len(data) > MAX_BYTES:
        raise PlanError(f"plan of {plan.model.name!r} is {len(data):,} bytes long, more than the {MAX_BYTES:,} that load_plan reads")
    return write_aside(target, data)


def write_aside(target: Path, data: bytes) -> Path:
    """Write a file aside and rename it. Raises PlanError naming the path where that fails."""
    try:
        handle, aside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(aside, 0o644)
            os.replace(aside, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(aside)
            raise
    except OSError as error:
        raise PlanError(f"cannot write {str(target)!r}: {error.strerror or error}") from None
    return target


def schema_json() -> str:
    """The JSON Schema of a plan file, as shipped in ``plan.schema.json``."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Plan.model_json_schema()}
    return json.dumps(schema, sort_keys=True, indent=1) + "\n"


# ---------------------------------------------------------------- in


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan file. Raises PlanError, naming the file, for anything that is not a sound plan."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise PlanError(f"cannot read the plan {os.fspath(path)!r}: {error.strerror or error}") from None
    try:
        return from_json(data)
    except PlanError as error:
        raise PlanError(f"{os.fspath(path)}: {error}") from None


def from_json(text: str | bytes) -> Plan:
    """A plan from its JSON. Raises PlanError naming the field, its value and what is allowed there."""
    plan = _validated(migrate(_parsed(_decoded(text))))
    check(plan)
    return plan


def migrate(data: Data) -> Data:
    """Bring a plan's data to the present schema version, one version at a time."""
    if "schema_version" not in data:
        raise PlanError(f"schema_version: missing, but required (this release writes {SCHEMA_VERSION}); is this a plan?")
    version = data["schema_version"]
    if type(version) is not int:
        raise PlanError(f"schema_version: {_short(version)}, must be the integer {SCHEMA_VERSION} (or an older one)")
    while version != SCHEMA_VERSION:
        if version not in MIGRATIONS:
            raise PlanError(
                f"schema_version: the plan has {version}, this release reads {_readable_versions()}; make the plan again with this release"
            )
        data = MIGRATIONS[version](data)
        version += 1
        data = {**data, "schema_version": version}
    return data


def _readable_versions() -> str:
    return ", ".join(map(str, sorted({*MIGRATIONS, SCHEMA_VERSION})))


def _decoded(text: str | bytes) -> str:
    size = len(text)
    if size > MAX_BYTES:
        raise PlanError(f"the plan is longer than {MAX_BYTES:,} bytes, the most that is read")
    if isinstance(text, str):
        return text
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PlanError(f"not UTF-8: byte {text[error.start]:#04x} at position {error.start}; the file is damaged or no plan") from None


def _parsed(text: str) -> Data:
    _check_nesting(text)
    try:
        data = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_int=_integer,
            parse_float=_number,
        )
    except PlanError:
        raise
    except (ValueError, RecursionError) as error:
        raise PlanError(f"not JSON: {error}; the file is damaged, cut short, or no plan") from None
    if not isinstance(data, dict):
        raise PlanError(f"a plan is a JSON object, this is {_short(data)}")
    for path, value in _strings(data, ""):
        if len(value) > MAX_STRING:
            raise PlanError(f"{path}: a string of {len(value):,} characters, at most {MAX_STRING:,} are allowed")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise PlanError(f"{path}: {_short(value)} holds half a surrogate pair, which no text has")
    return data


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)


def _check_nesting(text: str) -> None:
    depth = 0
    for match in _TOKEN.finditer(text):
        token = match[0]
        depth += token in "[{"
        depth -= token in "]}"
        if depth > MAX_DEPTH:
            raise PlanError(f"nested deeper than {MAX_DEPTH} levels at character {match.start()}; a plan is not")


def _object(pairs: list[tuple[str, Any]]) -> Data:
    found: Data = {}
    for key, value in pairs:
        if key in found:
            raise PlanError(f"the key {_short(key)} is given twice in one object; keys must be unique")
        found[key] = value
    return found


def _refuse_constant(text: str) -> Any:
    raise PlanError(f"{text} is not a number that JSON has; only finite numbers are allowed")


def _integer(text: str) -> int:
    if len(text.lstrip("-")) > MAX_DIGITS or abs(int(text)) > MAX_INTEGER:
        raise PlanError(f"integer {_short(text)} does not fit into 64 bits")
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise PlanError(f"number {_short(text)} is too large for a float")
    return value


def _strings(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _strings(item, f"{path}[{i}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield f"{path} key", key
            yield from _strings(item, f"{path}.{key}".lstrip("."))


def _validated(data: Data) -> Plan:
    try:
        return Plan.model_validate(data)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        first = problems[0]
        if first["type"] == "missing":
            raise PlanError(f"{_where(first['loc'])}: missing, but required{more}") from None
        if first["type"] == "extra_forbidden":
            raise PlanError(f"{_where(first['loc'])}: no such field in a plan, its value is {_short(first['input'])}{more}") from None
        raise PlanError(f"{_where(first['loc'])}: {_short(first['input'])} is refused: {first['msg']}{more}") from None


def _where(location: tuple[int | str, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.lstrip(".") or "plan"


def _short(value: Any, limit: int = 80) -> str:
    text = ascii(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else text[:limit] + "..."
