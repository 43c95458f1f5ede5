"""Reads CSV and TSV with a header from a stream, so that every row knows its line and its bytes."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import BinaryIO

from longdraft.data_prep.documents import Unusable

RECORD_BYTES = 1 << 28  # a longer record is a quote that was never closed


@dataclass(frozen=True)
class CsvHeader:
    """names: of the fields. n_bytes, n_lines: what the header takes of the file."""

    names: list[str]
    delimiter: str
    n_bytes: int
    n_lines: int


class _Lines:
    """A binary stream's lines as text, counted. Bytes that are not UTF-8 become lone surrogates."""

    def __init__(self, stream: BinaryIO):
        self._stream, self.n_bytes, self.n_lines = stream, 0, 0

    def __iter__(self) -> Iterator[str]:
        for raw in self._stream:
            self.n_bytes, self.n_lines = self.n_bytes + len(raw), self.n_lines + 1
            yield raw.decode("utf-8", "surrogateescape")


def read_header(stream: BinaryIO, path: str) -> CsvHeader | None:
    """Read the header from the beginning of a file; None if the file is empty.

    A .tsv is separated by tabs, a .csv by commas or, if its header has none, by semicolons or tabs. Raises ValueError
    if the first row is no list of different names."""
    lines = _Lines(stream)
    first = next(iter(lines), "").removeprefix("\ufeff")
    if not lines.n_bytes:
        return None
    is_tsv = ".tsv" in path.lower().rpartition("/")[2]
    delimiter = "\t" if is_tsv else next((c for c in ",;\t" if c in first), ",")
    try:
        names = next(csv.reader(chain([first], lines), delimiter=delimiter, strict=True), [])
        "".join(names).encode()
    except csv.Error as error:
        raise ValueError(f"{path}, line 1 cannot be read as a header of CSV ({error}); give a row of names") from error
    except UnicodeEncodeError as error:
        raise ValueError(f"{path}, line 1 is no UTF-8; convert the file, by iconv -t UTF-8 for one") from error
    if not any(names):
        raise ValueError(f"{path}, line 1 is blank; a file of CSV begins with the names of its fields")
    if doubled := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{path}, line 1 names the field {doubled[0]!r} twice; give each a name of its own")
    return CsvHeader(names, delimiter, lines.n_bytes, lines.n_lines)


def csv_rows(
    stream: BinaryIO, path: str, header: CsvHeader, number: int
) -> Iterator[tuple[dict[str, str] | Unusable, int, int, int]]:
    """The rows from the stream's position on, which is the beginning of line `number`. Each is (field name -> text or
    why it cannot be used, number of its first line, number of the line after it, bytes with blank lines before it).
    Raises ValueError if a quote does not close."""
    csv.field_size_limit(max(RECORD_BYTES, csv.field_size_limit()))
    lines = _Lines(stream)
    start = 0  # bytes before the row
    never_closes = "a quote opens that does not close"

    def bounded() -> Iterator[str]:
        for line in lines:
            if lines.n_bytes - start > RECORD_BYTES:
                raise ValueError(f"{path}, line {number}: {never_closes}; mend it")
            yield line

    first_line = number
    rows = csv.reader(bounded(), delimiter=header.delimiter, strict=True)
    while True:
        try:
            values = next(rows, None)
        except csv.Error as error:
            if "end of data" in str(error):
                raise ValueError(
                    f"{path}, line {number}: {never_closes} before the file's end; mend it, or fetch the file again"
                ) from error
            value = Unusable("bad_csv", f"is no row of CSV ({error})")
        else:
            if values is None:
                return
            if not values:  # a blank line
                number = first_line + lines.n_lines
                continue
            if len(values) == len(header.names):
                value = dict(zip(header.names, values, strict=True))
            else:
                value = Unusable("bad_csv", f"has {len(values)} values, and the header {len(header.names)} names")
        next_number = first_line + lines.n_lines
        yield value, number, next_number, lines.n_bytes - start
        start, number = lines.n_bytes, next_number
