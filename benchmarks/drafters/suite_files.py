"""Finds a suite's files, in a folder or on the hub, and reads their records; fields are checked when they are read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, Strict

from longdraft.data_prep.documents import Unusable
from longdraft.data_prep.recipe import Source
from longdraft.data_prep.records import all_records
from longdraft.data_prep.sources import SourceFile, list_files
from longdraft.models.schema import Schema, Str, validate

# What the place of a record is called in each kind of file.
PLACES = {"jsonl": "line", "array": "element", "table": "row"}


Text = Annotated[str, Strict(), Field(pattern=r"\S")]  # not blank
Texts = Annotated[list[Text], Field(min_length=1)]
Id = Annotated[int, Strict()] | Text
Number = int  # which may be written as text


class Message(Schema):
    """A message of a chat; further fields are ignored."""

    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "user", "assistant"]
    content: Str


Messages = Annotated[list[Message], Field(min_length=1)]


@dataclass(frozen=True)
class Row:
    """A record and its place, counted from 1."""

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

    def read(self, name: str, kind: Any) -> Any:
        """A field's value as one of the types above. Raises ValueError that names file, place and field."""
        return self.checked(name, kind, self.fields.get(name))

    def checked(self, name: str, kind: Any, value: Any) -> Any:
        """A value that was made from a field, checked in the same way."""
        return validate(kind, value, f"--data: {self.file}, {self.place} {self.number}, field {name!r}")

    def wrong(self, name: str, why: str) -> ValueError:
        return ValueError(f"--data: {self.file}, {self.place} {self.number}, field {name!r}: {why}")


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
    for number, fields in all_records(file):
        if not isinstance(fields, dict):
            why = (fields.detail or fields.why) if isinstance(fields, Unusable) else f"is {type(fields).__name__}"
            raise ValueError(f"--data: {file.name}, {place} {number} {why}; expected a JSON object of fields")
        yield Row(file.name, place, number, fields)
