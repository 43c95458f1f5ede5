"""Files that hold a record a document: lines of JSON, plain or compressed, and tables (Parquet, Arrow, MDS).

Both are cut into runs of records that are read alone. Not here: which files there are (sources.py), what a record must
hold (record_formats.py), the bytes of an MDS shard (mds.py).
"""

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from longdraft.data_prep import mds
from longdraft.data_prep.hub import REMOTE, open_bytes

COMPRESSED = {".zst": "zstd", ".zstd": "zstd", ".gz": "gzip", ".bz2": "bz2"}
LINES_SUFFIXES = tuple(f"{lines}{end}" for lines in (".jsonl", ".ndjson") for end in ("", *COMPRESSED))
TABLE_SUFFIXES = (".parquet", ".arrow", *mds.SUFFIXES)
SKIP_BYTES = 1 << 20
ROWS_AT_ONCE = 64  # of a Parquet file: a book of PG-19 has half a megabyte


def is_compressed(path: str) -> bool:
    return Path(path).suffix.lower() in COMPRESSED


@contextmanager
def open_plain(path: str, offset: int = 0) -> Iterator[BinaryIO]:
    """The file's bytes from `offset` on, uncompressed. A compressed file is read up to there: it has no other way.

    Raises:
        ValueError: inside, where the compressed file ends early or is damaged.
    """
    with open_bytes(path) as raw:
        if not is_compressed(path):
            raw.seek(offset)
            yield raw
            return
        try:
            with pa.CompressedInputStream(
                pa.PythonFile(raw, mode="r"), COMPRESSED[Path(path).suffix.lower()]
            ) as native:
                stream = cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, native)))
                while offset and (skipped := len(stream.read(min(offset, SKIP_BYTES)))):
                    offset -= skipped
                yield stream
        except (OSError, pa.ArrowInvalid) as error:
            raise _damaged(path, error) from error


def table_parts(path: str, part_bytes: int, group_bytes: int) -> list[tuple[int, int]]:
    """(rows, bytes uncompressed) of runs of a table's rows, in order, each of about `part_bytes` or a row; a row group
    of a Parquet file, which is read from its beginning, is cut only where it has more than `group_bytes`.

    Raises ValueError for a damaged file."""
    try:
        if _is_parquet(path):
            with _parquet(path) as file:
                groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
                chunks = [(group.num_rows, group.total_byte_size) for group in groups]
        elif _is_mds(path):
            with _shard(path) as (_, header):
                chunks = [(1, int(end - begin)) for begin, end in zip(header.offsets, header.offsets[1:], strict=False)]
        else:
            chunks = [(batch.num_rows, batch.nbytes) for batch in _batches(path)]
    except (OSError, ValueError) as error:  # pyarrow's are both
        raise _damaged(path, error) from error
    return _runs(chunks, part_bytes, group_bytes if _is_parquet(path) else part_bytes)


def table_rows(path: str, first: int, n_rows: int, fields: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows [first, first + n_rows) of a table, with those of the fields that it has.

    A text that is no UTF-8 comes as b"". Raises ValueError for a damaged file.
    """
    try:
        if _is_mds(path):
            with _shard(path) as (stream, header):
                yield from mds.read_samples(stream, header, range(first, first + n_rows), fields)
            return
        for batch in _rows_in(_table_batches(path, first, fields), first, n_rows):
            columns = {name: batch.column(name) for name in batch.schema.names if name in fields}
            for i in range(batch.num_rows):
                yield {name: _value(column[i]) for name, column in columns.items()}
    except (OSError, ValueError, IndexError, KeyError) as error:  # the last two: an MDS cell without its type or shape
        raise _damaged(path, error) from error


def table_fields(path: str) -> list[str]:
    """Names of a table's fields. Raises ValueError for a damaged file."""
    try:
        if _is_parquet(path):
            with _parquet(path) as file:
                return list(file.schema_arrow.names)
        if _is_mds(path):
            with _shard(path) as (_, header):
                return [name for name, _, _ in header.columns]
        return next((list(batch.schema.names) for batch in _batches(path)), [])
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error


def _runs(chunks: Iterable[tuple[int, int]], part_bytes: int, cut_bytes: int) -> list[tuple[int, int]]:
    """Chunks of (rows, bytes) joined up to `part_bytes`, and cut evenly where they have more than `cut_bytes`."""
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


def _table_batches(path: str, first: int, fields: Sequence[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """(Number of its first row, batch), in order; leaves out what clearly lies before row `first`."""
    at = 0
    if not _is_parquet(path):
        for batch in _batches(path):
            yield at, batch
            at += batch.num_rows
        return
    with _parquet(path) as file:
        columns = [name for name in file.schema_arrow.names if name in fields]
        for number in range(file.num_row_groups):
            n_rows = file.metadata.row_group(number).num_rows
            if at + n_rows > first:
                start = at
                if not columns:  # pyarrow makes no batches of no columns
                    columns = file.schema_arrow.names[:1]
                for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=[number], columns=columns):
                    yield start, batch
                    start += batch.num_rows
            at += n_rows


def _rows_in(batches: Iterator[tuple[int, pa.RecordBatch]], first: int, n_rows: int) -> Iterator[pa.RecordBatch]:
    for start, batch in batches:
        if start >= first + n_rows:
            return
        low, high = max(first - start, 0), min(first + n_rows - start, batch.num_rows)
        if low < high:
            yield batch.slice(low, high - low)


def _value(value: pa.Scalar) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return b""


def _is_parquet(path: str) -> bool:
    return path.lower().endswith(".parquet")


def _is_mds(path: str) -> bool:
    return path.lower().endswith(mds.SUFFIXES)


@contextmanager
def _parquet(path: str) -> Iterator[pq.ParquetFile]:
    if not path.startswith(REMOTE):
        with pq.ParquetFile(path) as file:
            yield file
        return
    with open_bytes(path) as stream, pq.ParquetFile(stream) as file:
        yield file


@contextmanager
def _shard(path: str) -> Iterator[tuple[BinaryIO, mds.Header]]:
    with open_plain(path) as stream:
        if is_compressed(path):  # samples are read by their place in it
            stream = io.BytesIO(stream.read())
        yield stream, mds.read_header(stream)


def _batches(path: str) -> Iterator[pa.RecordBatch]:
    """Of an Arrow file, which is a stream where the `datasets` library saved it; mapped where it is here."""
    with pa.PythonFile(open_bytes(path), mode="r") if path.startswith(REMOTE) else pa.memory_map(path) as source:
        try:
            file = pa.ipc.open_file(source)
        except pa.ArrowInvalid:
            source.seek(0)
            yield from pa.ipc.open_stream(source)
            return
        for i in range(file.num_record_batches):
            yield file.get_batch(i)


def _damaged(path: str, error: Exception) -> ValueError:
    return ValueError(f"{path} cannot be read ({error}); it is damaged or was not fetched whole: fetch it again")
