"""Reads tables from any row on: Parquet, Arrow (also as `datasets` saves it), and Mosaic Data Shards (MDS).

pyarrow reads Parquet and Arrow. `datasets` would read all rows before the wanted one, and whole row groups at once.

An MDS shard is uint32 n, uint32 offsets [n + 1] into the file, a JSON header with the names and encodings of the
columns, and n samples. A sample is the sizes of the columns that have no fixed size (uint32), and then the columns. All
numbers are little-endian. `mosaicml-streaming`, which writes the format, needs transformers below 5. Pickled columns
are not read, because unpickling runs any code that they hold.
"""

import io
import json
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from longdraft.data_prep.sources import REMOTE, damage_described, is_compressed, open_plain

ROWS_AT_ONCE = 64  # of a Parquet file; a row can be a book of PG-19 with half a megabyte
SIZE = np.dtype("<u4")  # of MDS
SHAPE_TYPES = ("u1", "<u2", "<u4", "<u8")
# The codes with which an MDS array of any type names its type.
VALUE_TYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
    64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip


def table_parts(path: str, part_bytes: int, group_bytes: int) -> list[tuple[int, int]]:
    """Cut a table into runs of about `part_bytes`, at least a row each: (rows, uncompressed bytes) of each, in order.

    A row group of a Parquet file can only be read from its beginning, so it is cut only if it has more than
    `group_bytes`. Raises ValueError for a damaged file.
    """
    runs: list[tuple[int, int]] = []
    rows = size = 0
    with _open(path) as table:
        cut_bytes = group_bytes if isinstance(table, _Parquet) else part_bytes
        for n_rows, n_bytes in table.chunks():
            n_cuts = max(1, min(n_rows, n_bytes // cut_bytes))
            for i in range(n_cuts):
                cut = n_rows * (i + 1) // n_cuts - n_rows * i // n_cuts
                rows, size = rows + cut, size + n_bytes * cut // max(1, n_rows)
                if size >= part_bytes:
                    runs.append((rows, size))
                    rows = size = 0
    return [*runs, (rows, size)] if rows else runs


def table_rows(
    path: str, first: int, n_rows: int | None = None, fields: Collection[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Rows [first, first + n_rows) of a table, or all from `first` on.

    fields: the ones to read, None for all; a field that is not read is None. A text that is not UTF-8 becomes bytes.
    Raises ValueError for a damaged file.
    """
    with _open(path) as table:
        n_rows = sum(rows for rows, _ in table.chunks()) if n_rows is None else n_rows
        names, empty = [name for name in table.fields if fields is None or name in fields], dict.fromkeys(table.fields)
        for row in table.rows(first, n_rows, names):
            yield empty | row


@contextmanager
def _open(path: str) -> "Iterator[_Parquet | _Arrow | _Mds]":
    kind = path.lower().rpartition(".")[2]
    if kind == "arrow" and not path.startswith(REMOTE):
        with damage_described(path), pa.memory_map(path) as source:
            yield _Arrow(source)
        return
    with open_plain(path) as stream:
        if kind == "parquet":
            yield _Parquet(stream)
        elif kind == "arrow":
            yield _Arrow(pa.PythonFile(stream, mode="r"))
        else:  # samples are read by their offsets, so a compressed shard must be in memory
            yield _Mds(io.BytesIO(stream.read()) if is_compressed(path) else stream)


class _Parquet:
    def __init__(self, source: BinaryIO):
        self._file = pq.ParquetFile(source)
        self.fields = list(self._file.schema_arrow.names)

    def chunks(self) -> list[tuple[int, int]]:
        """(rows, uncompressed bytes) of each row group."""
        groups = [self._file.metadata.row_group(i) for i in range(self._file.num_row_groups)]
        return [(group.num_rows, group.total_byte_size) for group in groups]

    def rows(self, first: int, n_rows: int, fields: list[str]) -> Iterator[dict[str, Any]]:
        at = 0
        for group, (n_here, _) in enumerate(self.chunks()):
            if first < at + n_here and at < first + n_rows:
                # pyarrow makes no batches without a column.
                batches = self._file.iter_batches(ROWS_AT_ONCE, [group], fields or self.fields[:1])
                yield from _rows_in(batches, at, first, n_rows, fields)
            at += n_here


class _Arrow:
    """An Arrow file, or an Arrow stream, which is what the `datasets` library saves."""

    def __init__(self, source: pa.NativeFile):
        try:
            file = pa.ipc.open_file(source)
        except pa.ArrowInvalid:
            source.seek(0)
            file = pa.ipc.open_stream(source)
        self._table: pa.Table = file.read_all()  # a file on this machine is mapped
        self.fields = list(self._table.schema.names)

    def chunks(self) -> list[tuple[int, int]]:
        return [(batch.num_rows, batch.nbytes) for batch in self._table.to_batches()]

    def rows(self, first: int, n_rows: int, fields: list[str]) -> Iterator[dict[str, Any]]:
        return _rows_in(self._table.to_batches(), 0, first, n_rows, fields)


def _rows_in(
    batches: Iterable[pa.RecordBatch], at: int, first: int, n_rows: int, fields: list[str]
) -> Iterator[dict[str, Any]]:
    """Rows [first, first + n_rows) from batches, the first of which begins with row `at`."""
    for batch in batches:
        columns = {name: batch.column(name) for name in fields}
        for i in range(max(first - at, 0), min(first + n_rows - at, batch.num_rows)):
            yield {name: _cell(column[i]) for name, column in columns.items()}
        at += batch.num_rows
        if at >= first + n_rows:
            return


def _cell(value: pa.Scalar) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return b"\xff"  # the format of the record finds that it is no text


class _Mds:
    def __init__(self, stream: BinaryIO):
        self._stream = stream
        n = int(_numbers(stream, 1)[0])
        self._offsets = _numbers(stream, n + 1).astype(np.int64)  # where each sample begins in the file, and the end
        begin = (n + 2) * SIZE.itemsize
        if self._offsets[0] < begin or (np.diff(self._offsets) < 0).any():
            raise ValueError("no MDS shard: its samples overlap")
        header = json.loads(_exactly(stream, int(self._offsets[0]) - begin))
        columns = zip(*(header[f"column_{what}"] for what in ("names", "encodings", "sizes")), strict=True)
        self._columns: list[tuple[str, str, int | None]] = list(columns)  # the size is None if it is not fixed
        self.fields = [name for name, _, _ in self._columns]

    def chunks(self) -> list[tuple[int, int]]:
        """(rows, bytes) of each sample, which is one row."""
        return [(1, size) for size in np.diff(self._offsets).tolist()]

    def rows(self, first: int, n_rows: int, fields: list[str]) -> Iterator[dict[str, Any]]:
        n_variable = sum(size is None for _, _, size in self._columns)
        for row in range(first, min(first + n_rows, len(self._offsets) - 1)):
            begin, end = self._offsets[row : row + 2].tolist()
            self._stream.seek(begin)
            raw = _exactly(self._stream, end - begin)
            variable_sizes = iter(np.frombuffer(raw, SIZE, n_variable).tolist())
            at, sample = n_variable * SIZE.itemsize, {}
            for name, encoding, fixed in self._columns:
                size = next(variable_sizes) if fixed is None else fixed
                if name in fields:
                    sample[name] = _mds_cell(encoding, raw[at : at + size])
                at += size
            yield sample


def _mds_cell(encoding: str, raw: bytes) -> Any:
    kind, *parameters = encoding.split(":")
    if kind == "str":
        return raw
    if kind == "json":
        return json.loads(raw)
    if kind == "int" or kind in VALUE_TYPES.values():
        return np.frombuffer(raw, "<i8" if kind == "int" else kind)[0].item()
    if kind == "ndarray":
        return _array(raw, *parameters)
    raise ValueError(f"a column is encoded as {encoding!r}, which is not read here; known: str, json, numbers, ndarray")


def _array(raw: bytes, kind: str = "", shape: str = "") -> np.ndarray:
    """A cell with an array. The type and the shape stand before the values unless the column's encoding has them."""
    if not kind:
        kind, raw = VALUE_TYPES[raw[0]], raw[1:]
    if shape:
        sizes = [int(size) for size in shape.split(",")]
    else:
        n_axes, size_type = raw[0] >> 2, np.dtype(SHAPE_TYPES[raw[0] & 3])
        stop = 1 + n_axes * size_type.itemsize
        sizes, raw = np.frombuffer(raw[1:stop], size_type).tolist(), raw[stop:]
    return np.frombuffer(raw, np.dtype(kind).newbyteorder("<")).reshape(sizes)


def _numbers(stream: BinaryIO, n: int) -> np.ndarray:
    return np.frombuffer(_exactly(stream, n * SIZE.itemsize), SIZE)


def _exactly(stream: BinaryIO, n: int) -> bytes:
    raw = stream.read(n)
    if len(raw) < n:
        raise ValueError(f"the file ends {n - len(raw)} bytes early")
    return raw
