"""Files that hold a record a document: lines of JSON, plain or compressed, and tables (Parquet, Arrow).

Lines are cut anywhere at a line end, tables where they are cut already (row groups, record batches). Not here: which
files there are and what a record must hold (sources.py).
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

COMPRESSED = {".zst": "zstd", ".gz": "gzip", ".bz2": "bz2"}
LINES_SUFFIXES = tuple(f"{lines}{end}" for lines in (".jsonl", ".ndjson") for end in ("", *COMPRESSED))
TABLE_SUFFIXES = (".parquet", ".arrow")
SKIP_BYTES = 1 << 20


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in COMPRESSED


@contextmanager
def open_lines(path: Path, offset: int = 0) -> Iterator[BinaryIO]:
    """The file's bytes from `offset` on, uncompressed. A compressed file is read up to there: it has no other way.

    Raises:
        ValueError: inside, where the compressed file ends early or is damaged.
    """
    if not is_compressed(path):
        with path.open("rb") as stream:
            stream.seek(offset)
            yield stream
        return
    try:
        with pa.OSFile(str(path)) as raw, pa.CompressedInputStream(raw, COMPRESSED[path.suffix.lower()]) as native:
            stream = cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, native)))
            while offset and (skipped := len(stream.read(min(offset, SKIP_BYTES)))):
                offset -= skipped
            yield stream
    except (OSError, pa.ArrowInvalid) as error:
        raise _damaged(path, error) from error


def table_parts(path: Path) -> list[tuple[int, int]]:
    """(rows, bytes in memory) of each part of a table, in order. Raises ValueError for a damaged file."""
    try:
        if path.suffix.lower() == ".parquet":
            with pq.ParquetFile(path) as file:
                groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
                return [(group.num_rows, group.total_byte_size) for group in groups]
        return [(batch.num_rows, batch.nbytes) for batch in _batches(path)]
    except (OSError, pa.ArrowInvalid) as error:
        raise _damaged(path, error) from error


def table_records(path: Path, part: int, field: str) -> Iterator[Any]:
    """The field's values in a part's rows. Raises KeyError where the table has no such field, and ValueError for a
    damaged file; a text that is no UTF-8 comes as b""."""
    try:
        if path.suffix.lower() == ".parquet":
            with pq.ParquetFile(path) as file:
                if field not in file.schema_arrow.names:
                    raise KeyError(field)
                batches = file.read_row_group(part, columns=[field]).to_batches()
        else:
            batches = [list(_batches(path))[part]]
            if field not in batches[0].schema.names:
                raise KeyError(field)
    except (OSError, pa.ArrowInvalid) as error:
        raise _damaged(path, error) from error
    for batch in batches:
        for value in batch.column(field):
            try:
                yield value.as_py()
            except UnicodeDecodeError:
                yield b""


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Of an Arrow file, which is a stream where the `datasets` library saved it; mapped, not read."""
    with pa.memory_map(str(path)) as source:
        try:
            file = pa.ipc.open_file(source)
        except pa.ArrowInvalid:
            source.seek(0)
            yield from pa.ipc.open_stream(source)
            return
        for i in range(file.num_record_batches):
            yield file.get_batch(i)


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} cannot be read ({error}); it is damaged or was not fetched whole: fetch it again")
