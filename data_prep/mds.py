"""Reads shards in the Mosaic Data Shard format (MDS), in which Prolong is published.

A shard is uint32 n, uint32 offsets [n + 1] into the file, a JSON header with the names and encodings of the columns,
and n samples. A sample is the sizes of the columns that have no fixed size (uint32), and then the columns. A compressed
shard is the same under zstd, gzip or bz2. All numbers are little-endian.

`mosaicml-streaming`, which writes the format, is not used: it pins transformers below 5 and numpy below 2.2, and brings
torchvision and the clients of five clouds, for a format that takes these few lines. The tests read shards that it
wrote. Pickled columns are not read, because unpickling runs any code that they hold.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, BinaryIO

import numpy as np

SUFFIXES = (".mds", ".mds.zst", ".mds.zstd", ".mds.gz", ".mds.bz2")
SIZE = np.dtype("<u4")
SHAPE_TYPES = ("u1", "<u2", "<u4", "<u8")
# The codes with which an array of any type names its type.
VALUE_TYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
    64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip


class Shard:
    """An open shard. fields: the names of its columns.

    stream: must be seekable. Raises ValueError if it is no MDS shard, or ends within its header.
    """

    def __init__(self, stream: BinaryIO):
        self._stream = stream
        n = int(_numbers(stream, 1)[0])
        self._offsets = _numbers(stream, n + 1).astype(np.int64)  # where each sample begins in the file, and the end
        begin = (n + 2) * SIZE.itemsize
        if self._offsets[0] < begin or (np.diff(self._offsets) < 0).any():
            raise ValueError("no MDS shard: its samples overlap")
        try:
            header = json.loads(_exactly(stream, int(self._offsets[0]) - begin))
            columns = zip(*(header[f"column_{what}"] for what in ("names", "encodings", "sizes")), strict=True)
            self._columns: list[tuple[str, str, int | None]] = list(columns)  # the size is None if it is not fixed
        except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"no MDS shard: its header does not name the columns ({error})") from error
        self.fields = [name for name, _, _ in self._columns]

    def chunks(self) -> list[tuple[int, int]]:
        """(rows, bytes) of each sample, which is one row."""
        return [(1, size) for size in np.diff(self._offsets).tolist()]

    def rows(self, first: int, n_rows: int, fields: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Samples [first, first + n_rows) with these columns, as far as the shard has them.

        Raises ValueError for a column that is pickled or has an unknown encoding, and if the file ends early.
        """
        readers = {name: _reader(encoding) for name, encoding, _ in self._columns if name in fields}
        n_variable = sum(size is None for _, _, size in self._columns)
        for row in range(first, min(first + n_rows, len(self._offsets) - 1)):
            begin, end = self._offsets[row : row + 2].tolist()
            self._stream.seek(begin)
            raw = _exactly(self._stream, end - begin)
            variable_sizes = iter(np.frombuffer(raw, SIZE, n_variable).tolist())
            at, sample = n_variable * SIZE.itemsize, {}
            for name, _, fixed in self._columns:
                size = next(variable_sizes) if fixed is None else fixed
                if name in readers:
                    sample[name] = readers[name](raw[at : at + size])
                at += size
            if at != len(raw):
                raise ValueError(f"sample {row} has {len(raw)} bytes, and its columns {at}")
            yield sample


def _reader(encoding: str) -> Callable[[bytes], Any]:
    kind, *parameters = encoding.split(":")
    if kind == "str":
        return _text
    if kind == "json":
        return json.loads
    if kind == "int":
        return partial(_scalar, "<i8")
    if kind in VALUE_TYPES.values():
        return partial(_scalar, kind)
    if kind == "ndarray" and len(parameters) <= 2:
        shape = tuple(map(int, parameters[1].split(","))) if len(parameters) == 2 else None
        return partial(_array, parameters[0] if parameters and parameters[0] else None, shape)
    raise ValueError(f"a column is encoded as {encoding!r}, which is not read here; known: str, json, numbers, ndarray")


def _text(raw: bytes) -> str | bytes:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return b""  # as tables.py returns for a text that is not UTF-8


def _scalar(kind: str, raw: bytes) -> Any:
    return np.frombuffer(raw, kind)[0].item()


def _array(kind: str | None, shape: tuple[int, ...] | None, raw: bytes) -> np.ndarray:
    if kind is None:
        kind, raw = VALUE_TYPES[raw[0]], raw[1:]
    if shape is None:
        n_axes, shape_type = raw[0] >> 2, np.dtype(SHAPE_TYPES[raw[0] & 3])
        stop = 1 + n_axes * shape_type.itemsize
        shape, raw = tuple(np.frombuffer(raw[1:stop], shape_type).tolist()), raw[stop:]
    return np.frombuffer(raw, np.dtype(kind).newbyteorder("<")).reshape(shape)


def _numbers(stream: BinaryIO, n: int) -> np.ndarray:
    return np.frombuffer(_exactly(stream, n * SIZE.itemsize), SIZE)


def _exactly(stream: BinaryIO, n: int) -> bytes:
    raw = stream.read(n)
    if len(raw) < n:
        raise ValueError(f"the file ends {n - len(raw)} bytes early")
    return raw
