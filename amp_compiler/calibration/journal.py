"""The journal of a search: every evaluation is written to a file at once, so that a search can be continued.

The file has one JSON value per line: a header that says which search it belongs to, the ops of the model once they are
known, and then one line per evaluation.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ..common.errors import SearchError
from ..common.files import check_target

_KIND, _VERSION = "amp-compiler search", 1


class Journal:
    """Values by what was evaluated. With a path, they are kept in a file; a file that is there already is read first.

    ``header`` identifies the search. A last line that was not written to its end is dropped.
    """

    def __init__(self, path: str | os.PathLike[str] | None, header: dict[str, Any]) -> None:
        self.path = None if path is None else check_target(path, what="The journal", error=SearchError)
        self.header = {"kind": _KIND, "version": _VERSION, **header}
        self.items: list[dict[str, Any]] | None = None
        self.recorded = 0
        self._values: defaultdict[str, deque[tuple[float, float]]] = defaultdict(deque)
        if self.path is not None and self.path.exists():
            self._read(self.path)
        elif self.path is not None:
            self._append(self.header)

    # ------------------------------------------------------------------------------------------- writing

    def set_items(self, items: Sequence[dict[str, Any]]) -> None:
        """Write down the ops of the model."""
        self.items = list(items)
        self._append({"items": self.items})

    def add(self, key: str, value: float, seconds: float) -> None:
        """Write down one evaluation."""
        self.recorded += 1
        self._append({"evaluated": key, "value": value, "seconds": round(seconds, 3)})

    def keep(self, key: str, value: float, seconds: float) -> None:
        """Write down one evaluation that is going to be asked for."""
        self.add(key, value, seconds)
        self._values[key].append((value, seconds))

    def take(self, key: str) -> tuple[float, float] | None:
        """Return the next value (and its seconds) that the file has for ``key``, or None."""
        return self._values[key].popleft() if self._values[key] else None

    def _append(self, line: dict[str, Any]) -> None:
        if self.path is None:
            return
        data = (json.dumps(line, ensure_ascii=False) + "\n").encode()
        try:
            with open(self.path, "ab", buffering=0) as file:
                size = file.tell()
                try:
                    written = file.write(data)
                    if written != len(data):
                        raise OSError(28, "No space left on device")
                    os.fsync(file.fileno())
                except OSError:
                    file.truncate(size)
                    raise
        except OSError as failure:
            raise SearchError(
                f"The journal {self.path} cannot be written: {failure.strerror or failure}. The evaluations before "
                "this one are in it: make room and start the search again with the same journal, and it continues."
            ) from failure

    # ------------------------------------------------------------------------------------------- reading

    def _read(self, path: Path) -> None:
        try:
            data = path.read_bytes()
        except OSError as failure:
            raise SearchError(f"The journal {path} cannot be read: {failure.strerror or failure}.") from failure
        whole = data[: data.rfind(b"\n") + 1]
        if whole and not _is_header(whole):
            raise SearchError(f"{path} is not the journal of a search: choose another path. Nothing was changed.")
        lines = [self._line(number, line) for number, line in enumerate(whole.split(b"\n")[:-1], 1)]
        if not lines and self.header_begins_with(data):
            self._cut(path, 0)
            self._append(self.header)
            return
        if not lines:
            raise SearchError(f"{path} is not the journal of a search: choose another path.")
        self._check(lines[0])
        for number, line in enumerate(lines[1:], 2):
            if isinstance(line.get("items"), list):
                self.items = line["items"]
            elif isinstance(line.get("evaluated"), str) and type(line.get("value")) in (int, float):
                seconds = line.get("seconds")
                spent = seconds if isinstance(seconds, (int, float)) else 0.0
                self._values[line["evaluated"]].append((float(line["value"]), float(spent)))
                self.recorded += 1
            else:
                raise self._damaged(number)
        self._cut(path, len(whole))

    def header_begins_with(self, data: bytes) -> bool:
        """True if ``data`` is the beginning of a header: the search was stopped while it wrote the first line."""
        return json.dumps(self.header, ensure_ascii=False).encode().startswith(data)

    def _line(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            raise self._damaged(number) from None
        if not isinstance(found, dict):
            raise self._damaged(number)
        return found

    def _check(self, found: dict[str, Any]) -> None:
        differ = [key for key, value in self.header.items() if found.get(key) != value]
        if differ:
            raise SearchError(
                f"The journal {self.path} belongs to another search (with another {' and '.join(differ)}): choose "
                "another path, or remove the file."
            )

    def _damaged(self, number: int) -> SearchError:
        return SearchError(
            f"Line {number} of the journal {self.path} is damaged. Nothing was changed: remove that line to evaluate "
            "it again, or remove the file to start anew."
        )

    @staticmethod
    def _cut(path: Path, size: int) -> None:
        """Drop a last line that was not written to its end."""
        if path.stat().st_size > size:
            os.truncate(path, size)


def _is_header(data: bytes) -> bool:
    """True if the first line is the header of a journal, of whatever search."""
    try:
        found = json.loads(data[: data.find(b"\n")])
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("kind") == _KIND


def key_of(fp32: Collection[int], count: int) -> str:
    """Return the text by which the journal knows a trial: the numbers of the ops that stay in fp32."""
    if not fp32:
        return "low"
    text, start, numbers = [], None, sorted(fp32)
    for place, number in enumerate(numbers):
        start = number if start is None else start
        if place + 1 == len(numbers) or numbers[place + 1] != number + 1:
            text.append(f"{start}-{number}" if number != start else f"{number}")
            start = None
    return f"fp32 {','.join(text)} of {count}"
