"""Reads tables from any row on: Parquet, Arrow (also as `datasets` saves it) and MDS (mds.py).

Parquet and Arrow are read by pyarrow, which `datasets` uses too, and not through `datasets` itself. Its streams reach a
row only by reading all rows before it, and its Parquet reader decodes a whole row group at once. Measured on 231 MB of
text in one row group (datasets 5.2, pyarrow 26): a process holds 1.0 GB instead of 0.3, and waits 4.6 s instead of 0.3
for its first row (the import brings torch along). Of 10 processes that stopped before the end of a file, as one with a
full budget does, 2 were aborted at exit. `datasets` does say which files a split has (hub.py).
"""

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from longdraft.data_prep import mds
from longdraft.data_prep.hub import REMOTE, open_bytes
from longdraft.data_prep.streams import damaged, is_compressed, open_plain

TABLE_SUFFIXES = (".parquet", ".arrow", *mds.SUFFIXES)
ROWS_AT_ONCE = 64  # of a Parquet file; a row can be a book of PG-19 with half a megabyte


def table_parts(path: str, part_bytes: int, group_bytes: int) -> list[tuple[int, int]]:
    """Cut a table into runs of about `part_bytes`, at least a row each: (rows, uncompressed bytes) of each, in order.

    A row group of a Parquet file can only be read from its beginning, so it is cut only if it has more than
    `group_bytes`. Raises ValueError for a damaged file."""
    with _open(path) as table:
        cut_bytes = group_bytes if isinstance(table, _Parquet) else part_bytes
        return _runs(table.chunks(), part_bytes, cut_bytes)


def table_rows(path: str, first: int, n_rows: int, fields: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows [first, first + n_rows) of a table, with the fields that it has of those named.

    A text that is not UTF-8 becomes b"". Raises ValueError for a damaged file.
    """
    with _open(path) as table:
        yield from table.rows(first, n_rows, fields)


def table_fields(path: str) -> list[str]:
    """The names of a table's fields. Raises ValueError for a damaged file."""
    with _open(path) as table:
        return table.fields


def _runs(chunks: Iterable[tuple[int, int]], part_bytes: int, cut_bytes: int) -> list[tuple[int, int]]:
    """Join chunks of (rows, bytes) until they reach `part_bytes`, after cutting those beyond `cut_bytes` evenly."""
    runs: list[tuple[int, int]] = []
    rows = size = 0
    for n_rows, n_bytes in chunks:
        n_cuts = max(1, min(n_rows, n_bytes // cut_bytes))
        for i in range(n_cuts):
            cut = n_rows * (i + 1) // n_cuts - n_rows * i // n_cuts
            rows, size = rows + cut, size + n_bytes * cut // max(1, n_rows)
            if size >= part_bytes:
                runs.append((rows, size))
                rows = size = 0
    return [*runs, (rows, size)] if rows else runs


@contextmanager
def _open(path: str) -> "Iterator[_Parquet | _Arrow | mds.Shard]":
    """Raises ValueError if the file is damaged, also from inside the block."""
    try:
        if path.lower().endswith(mds.SUFFIXES):
            with open_plain(path) as stream:
                # Samples are read by their offsets, so a compressed shard must be in memory.
                yield mds.Shard(io.BytesIO(stream.read()) if is_compressed(path) else stream)
            return
        is_parquet = path.lower().endswith(".parquet")
        if path.startswith(REMOTE):
            source = pa.PythonFile(open_bytes(path), mode="r")
        else:
            source = pa.OSFile(path) if is_parquet else pa.memory_map(path)
        with source:
            yield _Parquet(source) if is_parquet else _Arrow(source)
    # IndexError, KeyError: an MDS cell without its type or shape.
    except (OSError, ValueError, IndexError, KeyError, pa.ArrowException) as error:
        raise damaged(path, error) from error


class _Parquet:
    def __init__(self, source: pa.NativeFile):
        self._file = pq.ParquetFile(source)
        self.fields = list(self._file.schema_arrow.names)

    def chunks(self) -> list[tuple[int, int]]:
        """(rows, uncompressed bytes) of each row group."""
        groups = [self._file.metadata.row_group(i) for i in range(self._file.num_row_groups)]
        return [(group.num_rows, group.total_byte_size) for group in groups]

    def rows(self, first: int, n_rows: int, fields: Sequence[str]) -> Iterator[dict[str, Any]]:
        # pyarrow makes no batches without a column.
        columns = [name for name in self.fields if name in fields] or self.fields[:1]
        at = 0
        for group, (n_here, _) in enumerate(self.chunks()):
            if first < at + n_here and at < first + n_rows:
                batches = self._file.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=columns)
                yield from _rows_in(batches, at, first, n_rows, fields)
            at += n_here


class _Arrow:
    """An Arrow file, or an Arrow stream, which is what the `datasets` library saves."""

    def __init__(self, source: pa.NativeFile):
        try:
            file = pa.ipc.open_file(source)
        except pa.ArrowInvalid:
            source.seek(0)
            self._batches = stream = pa.ipc.open_stream(source)
            self.fields = list(stream.schema.names)
        else:
            self._batches = (file.get_batch(i) for i in range(file.num_record_batches))
            self.fields = list(file.schema.names)

    def chunks(self) -> list[tuple[int, int]]:
        return [(batch.num_rows, batch.nbytes) for batch in self._batches]

    def rows(self, first: int, n_rows: int, fields: Sequence[str]) -> Iterator[dict[str, Any]]:
        return _rows_in(self._batches, 0, first, n_rows, fields)


def _rows_in(
    batches: Iterable[pa.RecordBatch], at: int, first: int, n_rows: int, fields: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Rows [first, first + n_rows) from batches, the first of which begins with row `at`."""
    for batch in batches:
        if at >= first + n_rows:
            return
        columns = {name: batch.column(name) for name in batch.schema.names if name in fields}
        for i in range(max(first - at, 0), min(first + n_rows - at, batch.num_rows)):
            yield {name: _value(column[i]) for name, column in columns.items()}
        at += batch.num_rows


def _value(value: pa.Scalar) -> Any:
    """A cell's value. Bytes are decoded as a text, since some writers do not declare theirs as one."""
    try:
        cell = value.as_py()
        return cell.decode("utf-8") if isinstance(cell, bytes) else cell
    except UnicodeDecodeError:
        return b""
