"""Reads tables: Parquet, Arrow (also as `datasets` saves it), and Mosaic Data Shards (MDS).

A table is a list of chunks, each of which can be read by itself: a row group, a record batch, a sample. pyarrow reads
Parquet and Arrow.

An MDS shard is uint32 n, uint32 offsets [n + 1] into the file, a JSON header with the names and encodings of the
columns, and n samples. A sample is the sizes of the columns that have no fixed size (uint32), and then the columns. All
numbers are little-endian. `mosaicml-streaming`, which writes the format, needs transformers below 5. Untyped arrays are
not read. Neither are pickled columns, because unpickling runs any code that they hold.
"""

import io
import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from longdraft.data_prep.documents import Unusable
from longdraft.data_prep.sources import REMEDY, SourceFile, is_compressed, open_plain
from longdraft.models.files import damage_named

ROWS_AT_ONCE = 64  # a row can be a book of PG-19 with half a megabyte
SIZE = np.dtype("<u4")  # of MDS
SHAPE_TYPES = ("u1", "<u2", "<u4", "<u8")


class Parquet:
    """fields: names of the columns. chunks: (rows, uncompressed bytes) of each row group."""

    def __init__(self, source: BinaryIO):
        self._file = pq.ParquetFile(source)
        self.fields = list(self._file.schema_arrow.names)
        groups = [self._file.metadata.row_group(i) for i in range(self._file.num_row_groups)]
        self.chunks = [(group.num_rows, group.total_byte_size) for group in groups]

    def rows(self, chunks: range, fields: list[str]) -> Iterator[dict[str, Any] | Unusable]:
        for batch in self._file.iter_batches(ROWS_AT_ONCE, list(chunks), fields):
            yield from _rows(batch)


class Arrow:
    """An Arrow file, or an Arrow stream, which is what the `datasets` library saves. Its chunks are record batches."""

    def __init__(self, source: pa.NativeFile):
        try:
            file = pa.ipc.open_file(source)
        except pa.ArrowInvalid:
            source.seek(0)
            file = pa.ipc.open_stream(source)
        table = file.read_all()  # a local file is memory-mapped
        self.fields = list(table.schema.names)
        self._batches = table.to_batches()
        self.chunks = [(batch.num_rows, batch.nbytes) for batch in self._batches]

    def rows(self, chunks: range, fields: list[str]) -> Iterator[dict[str, Any] | Unusable]:
        for chunk in chunks:
            yield from _rows(self._batches[chunk].select(fields))


class Mds:
    """A shard of MDS. Its chunks are samples."""

    def __init__(self, stream: BinaryIO):
        self._stream = stream
        n = int(np.frombuffer(stream.read(SIZE.itemsize), SIZE)[0])
        end = stream.seek(0, io.SEEK_END)
        stream.seek(SIZE.itemsize)
        # Where each sample begins in the file, and the end. In a file that is no shard, n may be billions.
        offsets = stream.read(min((n + 1) * SIZE.itemsize, end))
        self._offsets = np.frombuffer(offsets, SIZE, n + 1).astype(np.int64)
        begin, sizes = (n + 2) * SIZE.itemsize, np.diff(self._offsets)
        if self._offsets[0] < begin or (sizes < 0).any() or self._offsets[-1] > end:
            raise ValueError("not an MDS shard, or cut off")
        stream.seek(begin)
        header = json.loads(stream.read(int(self._offsets[0]) - begin))
        columns = zip(*(header[f"column_{what}"] for what in ("names", "encodings", "sizes")), strict=True)
        self._columns: list[tuple[str, str, int | None]] = list(columns)  # the size is None if it is not fixed
        self.fields = [name for name, _, _ in self._columns]
        self.chunks = [(1, size) for size in sizes.tolist()]

    def rows(self, chunks: range, fields: list[str]) -> Iterator[dict[str, Any]]:
        n_variable = sum(size is None for _, _, size in self._columns)
        for chunk in chunks:
            begin, end = self._offsets[chunk : chunk + 2].tolist()
            self._stream.seek(begin)
            raw = self._stream.read(end - begin)
            variable_sizes = iter(np.frombuffer(raw, SIZE, n_variable).tolist())
            at, sample = n_variable * SIZE.itemsize, {}
            for name, encoding, fixed in self._columns:
                size = next(variable_sizes) if fixed is None else fixed
                if name in fields:
                    sample[name] = _mds_cell(encoding, raw[at : at + size])
                at += size
            yield sample


TABLES = {"parquet": Parquet, "arrow": Arrow, "mds": Mds}


@contextmanager
def open_table(file: SourceFile) -> Iterator[Parquet | Arrow | Mds]:
    """Open a file of a kind in TABLES. Raises ValueError, also inside the block, if it is damaged."""
    if file.kind == "arrow" and file.is_cheap_to_seek:
        with damage_named(file.path, remedy=REMEDY), pa.memory_map(file.path) as source:
            yield Arrow(source)
        return
    with open_plain(file.path) as stream:
        # A table is not read sequentially, so a compressed one must be held in memory.
        plain = io.BytesIO(stream.read()) if is_compressed(file.path) else stream
        yield TABLES[file.kind](pa.PythonFile(plain, mode="r") if file.kind == "arrow" else plain)


def table_rows(
    file: SourceFile, start: int = 0, stop: int | None = None, fields: Collection[str] | None = None
) -> Iterator[dict[str, Any] | Unusable]:
    """The rows of chunks [start, stop); for an unusable row, the reason. fields: the columns to read; all if this is
    None or the table has none of them.

    Raises ValueError for a damaged file.
    """
    with open_table(file) as table:
        present = [name for name in table.fields if fields is None or name in fields]
        yield from table.rows(range(len(table.chunks))[start:stop], present or table.fields)


def _rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | Unusable]:
    """The rows of a batch. Texts of Arrow's JSON type are parsed: `datasets` stores values of mixed types in this way,
    such as messages of which some call tools, or content that is sometimes a text and sometimes a list of parts. A row
    is `Unusable` if one of them is not JSON: pyarrow does not check it."""
    kinds = {field.name: field.type for field in batch.schema if "arrow.json" in str(field.type)}
    for row in batch.to_pylist():
        try:
            parsed = {name: _parsed(row[name], kind) for name, kind in kinds.items()}
        except (ValueError, RecursionError) as error:
            yield Unusable("bad_json", f"({error})")
        else:
            yield row | parsed


def _parsed(value: Any, kind: pa.DataType) -> Any:
    """A value of this type, in which every text of Arrow's JSON type is parsed, except in maps."""
    if isinstance(kind, pa.JsonType) and value is not None:
        return json.loads(value)
    if isinstance(value, list) and not isinstance(kind, pa.MapType):
        return [_parsed(one, kind.value_type) for one in value]
    return {field.name: _parsed(value[field.name], field.type) for field in kind} if isinstance(value, dict) else value


def _mds_cell(encoding: str, raw: bytes) -> Any:
    kind, *parameters = encoding.split(":")
    if kind in ("str", "bytes"):
        return raw
    if kind == "json":
        return json.loads(raw)
    if kind == "ndarray":
        return _array(raw, *parameters)
    return np.frombuffer(raw, "<i8" if kind == "int" else kind)[0].item()  # numpy refuses types that are not numbers


def _array(raw: bytes, kind: str, shape: str = "") -> np.ndarray:
    """A cell with an array. The shape precedes the values unless the column's encoding gives it."""
    if shape:
        sizes = [int(size) for size in shape.split(",")]
    else:
        n_axes, size_type = raw[0] >> 2, np.dtype(SHAPE_TYPES[raw[0] & 3])
        stop = 1 + n_axes * size_type.itemsize
        sizes, raw = np.frombuffer(raw[1:stop], size_type).tolist(), raw[stop:]
    return np.frombuffer(raw, np.dtype(kind).newbyteorder("<")).reshape(sizes)
