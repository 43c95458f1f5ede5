"""Finds a suite's files, in a folder or on the hub, and reads their records; fields are checked when they are read.

Not here: which fields a suite's records have (suites.py).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from longdraft.data_prep.documents import Unusable
from longdraft.data_prep.recipe import Source
from longdraft.data_prep.records import all_records, parse_json
from longdraft.data_prep.sources import SourceFile, list_files
from longdraft.models.schema import short_repr

# What the place of a record is called in each kind of file.
PLACES = {"jsonl": "line", "array": "element", "table": "row"}


@dataclass(frozen=True)
class Row:
    """A record and its place, counted from 1. The methods that read a field raise a ValueError that names file, place,
    field and what was expected."""

    file: str
    place: str
    number: int
    fields: dict[str, Any]

    @property
    def stem(self) -> str:
        """The file's name without its ending; for a file called test, as specdec_bench writes them, its folder's."""
        path = PurePosixPath(self.file)
        stem = path.name.partition(".")[0]
        return path.parent.name if stem == "test" and path.parent.name else stem

    def __contains__(self, name: str) -> bool:
        return self.fields.get(name) is not None

    def get(self, name: str, otherwise: Any) -> Any:
        return self.fields.get(name, otherwise)

    def wrong(self, name: str, found: str, expected: str) -> ValueError:
        return ValueError(
            f"--data: {self.file}, {self.place} {self.number}, field {name!r}: {found}; expected {expected}"
        )

    def _field(self, name: str, expected: str, right: Callable[[Any], Any]) -> Any:
        if name not in self.fields:
            raise self.wrong(name, f"missing among {', '.join(map(repr, self.fields)) or 'none'}", expected)
        if not right(value := self.fields[name]):
            raise self.wrong(name, short_repr(value), expected)
        return value

    def text(self, name: str) -> str:
        return self._field(name, "a text that is not empty", _is_text)

    def texts(self, name: str) -> list[str]:
        expected = "a list of texts that are not empty"
        return self._field(name, expected, lambda v: isinstance(v, list) and v and all(map(_is_text, v)))

    def integer(self, name: str) -> int:
        """A whole number, which may be written as text."""
        return int(self._field(name, "a whole number", lambda v: not isinstance(v, bool) and str(v).isdecimal()))

    def id(self, name: str) -> int | str:
        """A number or text that tells records apart."""
        return self._field(name, "a number or a text", lambda v: type(v) is int or (isinstance(v, str) and v))

    def messages(self, name: str, value: Any = None) -> list[dict[str, str]]:
        """A chat, as a list of {"role", "content"}. value: the parsed chat, if the field holds it as JSON."""
        expected = 'a list of messages {"role": "user", "content": "..."}'
        value = self._field(name, expected, lambda _: True) if value is None else value
        if not isinstance(value, list) or not value:
            raise self.wrong(name, short_repr(value), expected)
        for i, message in enumerate(value):
            known = isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
            if not known or message["role"] not in ("system", "user", "assistant"):
                raise self.wrong(name, f"[{i}] is {short_repr(message)}", expected)
        return [{"role": message["role"], "content": message["content"]} for message in value]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def read_rows(data: str, files: Sequence[str], all_files: bool, source: str) -> Iterator[Row]:
    """Read the records of a suite's files in order.

    Args:
        data: a folder, a file or a data set on the hub. files, all_files, source: as in a Suite.

    Raises: ValueError for files that are missing, and for records that are not JSON objects.
    """
    for name in files:
        try:
            found = list_files([Source(path=data, files=(name, f"*/{name}"))])
        except ValueError as error:
            if not all_files and name != files[-1]:
                continue
            reason = str(error).removesuffix("; name other files by --files")
            raise ValueError(f"--data: {reason}; {name} comes from {source}") from error
        for file in found:
            yield from _records(file)
        if not all_files:
            return


def _records(file: SourceFile) -> Iterator[Row]:
    place = PLACES.get(file.kind, "line")
    for number, value in all_records(file):
        try:
            if isinstance(value, Unusable):
                raise value
            fields = parse_json(value) if isinstance(value, bytes) else value
            if not isinstance(fields, dict):
                raise Unusable("missing_field", f"is {type(fields).__name__}")
        except Unusable as error:
            why = error.detail or error.why
            raise ValueError(f"--data: {file.name}, {place} {number} {why}; expected a JSON object of fields") from None
        yield Row(file.name, place, number, fields)
