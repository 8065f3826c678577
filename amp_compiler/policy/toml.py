"""Policies as TOML text: writing, reading, and checking files that people have edited."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..common.errors import PolicyError
from ..common.messages import suggestion

FILE_VERSION = 1
_KEYS = ("version", "level", "dtype", "autocast_device", "ops", "module", "call", "conditional")


def text(
    head: Mapping[str, str | None], lists: Mapping[str, Sequence[str]],
    tables: Mapping[str, Sequence[Mapping[str, Any]]],
) -> str:  # fmt: skip
    """Return the text of a policy file: single values, the op lists, and a ``[[table]]`` for each rule."""
    lines = [
        "# amp-compiler policy: edit, version and diff it; load it with Policy.from_file",
        f"version = {FILE_VERSION}",
    ]
    lines += [f"{key} = {_value(value)}" for key, value in head.items() if value is not None]
    lines += ["", "[ops]", *(f"{key} = {_value(names)}" for key, names in lists.items())]
    for name, rules in tables.items():
        for rule in rules:
            lines += ["", f"[[{name}]]", *(f"{key} = {_value(value)}" for key, value in rule.items())]
    return "\n".join(lines) + "\n"


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the parsed text of a file."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PolicyError(f"The policy file {path} cannot be read: {error.strerror or error}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PolicyError(
            f"The policy file {path} is not TOML: {error}. Compare it with a file that Policy.to_file wrote."
        ) from None


def check_document(data: Mapping[str, Any]) -> None:
    """Raise for unknown keys and for files of another version."""
    check_keys("the file", data, _KEYS)
    version = data.get("version", FILE_VERSION)
    if version != FILE_VERSION:
        raise PolicyError(f"version is {version!r}; this release reads {FILE_VERSION}. Update amp-compiler.")


def check_keys(where: str, data: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise for a key that is not known, with the closest known one as a hint."""
    for key in data:
        if key not in known:
            hint = suggestion(key, known, otherwise=f"Known: {', '.join(known)}.")
            raise PolicyError(f"Unknown key '{key}' in {where}.", hint=hint)


def tables(
    data: Mapping[str, Any], key: str, fields: tuple[str, ...], required: tuple[str, ...] | None = None
) -> list[Mapping[str, Any]]:
    """Return the ``[[key]]`` tables of a document, each with these fields: all of them, or at least ``required``."""
    found = data.get(key, [])
    if not isinstance(found, list) or not all(isinstance(t, dict) for t in found):
        raise PolicyError(f"'{key}' must be written as [[{key}]] tables.")
    for table in found:
        check_keys(f"[[{key}]]", table, fields)
        missing = [f for f in (fields if required is None else required) if f not in table]
        if missing:
            raise PolicyError(f"A [[{key}]] table lacks '{missing[0]}'.")
    return found


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    raise PolicyError(
        f"{value!r} cannot be written to a policy file: use texts, numbers, booleans or lists of them."
    )
