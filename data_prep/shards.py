"""Prepared rows on disk, as Arrow shards with a manifest, and their reader. A kill never leaves a half-written file.

A split's folder holds `manifest.json` and `shard-*.arrow` (Arrow streams with the `datasets` library's schema, so
`datasets.Dataset.from_file` can open them too). A row of a shard:

tokens      int32 [seq_len], padded with EOS after the used length
borders     int32 [n_pieces + 1], where each piece starts; the last entry is the used length
loss_spans  int32 [2 n_spans], start and end of each span of tokens that the loss counts
documents   string [n_pieces], the document of each piece
pieces      int32 [n_pieces], the piece's number within its document
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from longdraft.models.files import damage_named, file_digest, write_atomically

MANIFEST = "manifest.json"
SPLITS = ("train", "heldout")
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Row:
    """One row to write. `tokens` holds only the used tokens; the module's docstring describes the other fields."""

    tokens: np.ndarray
    borders: Sequence[int]
    loss_spans: Sequence[int]
    documents: Sequence[str]
    pieces: Sequence[int]


def write_shard(path: Path, rows: Sequence[Row], seq_len: int, fill_id: int) -> dict:
    """Write the rows to `path` atomically. Returns {"file", "rows", "bytes", "sha256"} for the manifest."""
    tokens = np.full((len(rows), seq_len), fill_id, dtype=np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row.tokens)] = row.tokens
    columns = {name: [getattr(row, name) for row in rows] for name in ("borders", "loss_spans", "documents", "pieces")}
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(tokens.ravel()), seq_len)
    table = pa.table({"tokens": fixed, **columns}, schema=shard_schema(seq_len))

    def write(temporary: Path) -> None:
        with pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)  # one batch, so that the reader gets each column as one array

    write_atomically(path, write)
    return {"file": path.name, "rows": len(rows), "bytes": path.stat().st_size, "sha256": file_digest(path)}


def shard_schema(seq_len: int) -> pa.Schema:
    """The schema that `datasets.Features(...).arrow_schema` gives for a shard's columns, with its metadata.

    It is made without that library, which takes each worker process seconds to import. A test compares the two.
    """
    fields, features = [], {}
    for name in ("tokens", "borders", "loss_spans", "documents", "pieces"):
        dtype, length = "string" if name == "documents" else "int32", seq_len if name == "tokens" else None
        fields.append(pa.field(name, pa.list_(pa.type_for_alias(dtype), length or -1)))
        feature = {"feature": {"dtype": dtype, "_type": "Value"}, "length": length, "_type": "List"}
        features[name] = {key: value for key, value in feature.items() if value is not None}
    return pa.schema(fields, metadata={"huggingface": json.dumps({"info": {"features": features}})})


class ShardSet:
    """The rows of a prepared split, by index. Opening reads the manifest; a shard is memory-mapped when first read.

    folder: `train` or `heldout` of a prepared folder. Raises ValueError if the split is not finished, or if a shard is
    missing or its size differs from the manifest's. `verify` also checks the content.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.manifest: dict = read_manifest(self.folder / MANIFEST)
        if (found := self.manifest.get("format_version")) != FORMAT_VERSION:
            raise ValueError(f"{folder} has format {found}, this version reads {FORMAT_VERSION}; prepare it again")
        shards = self.manifest["shards"]
        for shard in shards:
            path = self.folder / shard["file"]
            size = path.stat().st_size if path.exists() else None
            if size != shard["bytes"]:
                found = "is missing" if size is None else f"has {size} bytes instead of {shard['bytes']}"
                raise ValueError(f"{path} {found}: the folder was damaged; remove it and prepare it again")
        self._ends = np.cumsum([shard["rows"] for shard in shards], dtype=np.int64)
        self._opened: dict[int, dict[str, pa.ListArray]] = {}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """A copy of row i: {"tokens": int32 [seq_len], "borders": int32 [n_pieces + 1], "loss": bool [seq_len]}.

        borders: the start of each piece, then the used length; tokens after it are padding and never in `loss`.
        Raises IndexError.
        """
        columns, row = self._locate(i)
        tokens, borders, spans = (columns[name][row].values.to_numpy() for name in ("tokens", "borders", "loss_spans"))
        loss = np.zeros(self.manifest["seq_len"], dtype=bool)
        for start, stop in spans.reshape(-1, 2):
            loss[start:stop] = True
        return {"tokens": tokens.copy(), "borders": borders.copy(), "loss": loss}

    def pieces(self, i: int) -> list[tuple[str, int]]:
        """(document name, piece number) of each piece of row i. This identifies a piece wherever it is packed."""
        columns, row = self._locate(i)
        return list(zip(columns["documents"][row].as_py(), columns["pieces"][row].as_py(), strict=True))

    def used_tokens(self) -> Iterator[np.ndarray]:
        """All tokens except padding, in order, for statistics: an int32 array for each shard."""
        for number in (i for i, shard in enumerate(self.manifest["shards"]) if shard["rows"]):
            columns, seq_len = self._shard(number), self.manifest["seq_len"]
            tokens = columns["tokens"].values.to_numpy().reshape(-1, seq_len)
            used = columns["borders"].values.to_numpy()[columns["borders"].offsets.to_numpy()[1:] - 1]
            yield tokens[np.arange(seq_len) < used[:, None]]

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What identifies these rows and their order: {"rows", "sha256"}, a hash over the manifest's shard hashes."""
        hashes = "\n".join(shard["sha256"] for shard in self.manifest["shards"])
        return {"rows": len(self), "sha256": hashlib.sha256(hashes.encode()).hexdigest()}

    def verify(self, first: int = 0, step: int = 1, vocab_size: int | None = None) -> None:
        """Read every `step`-th shard, starting with number `first`. Raises ValueError if a shard's sha256 is not the
        manifest's, or it holds an id outside the vocabulary."""
        for number in range(first, len(self.manifest["shards"]), step):
            shard = self.manifest["shards"][number]
            path = self.folder / shard["file"]
            if (found := file_digest(path)) != shard["sha256"]:
                why = f"has changed: its sha256 is {found}, not {shard['sha256']}"
                raise ValueError(f"{path} {why}; remove the folder and prepare it again")
            if vocab_size is None:
                continue
            tokens = self._shard(number)["tokens"].values.to_numpy()
            lowest, highest = int(tokens.min()), int(tokens.max())
            if lowest < 0 or highest >= vocab_size:
                raise ValueError(
                    f"{path} holds token ids from {lowest} to {highest}, outside the target's vocabulary of "
                    f"{vocab_size}; prepare it for this target"
                )

    def dropped_share(self) -> tuple[float, dict[str, int]]:
        """The fraction of all documents read that were bad or did not fit, and their number for each reason."""
        reasons = {**self.manifest.get("bad", {}), **self.manifest.get("dropped", {})}
        reasons.pop("beyond_max_tokens", None)  # --max-tokens asked to drop these
        seen = sum(reasons.values()) + self.manifest.get("documents", 0)
        return sum(reasons.values()) / max(1, seen), reasons

    def _locate(self, i: int) -> tuple[dict[str, pa.ListArray], int]:
        """The columns of the shard that holds row i, and the row's index in it."""
        if not -len(self) <= i < len(self):
            raise IndexError(f"row {i} of {len(self)} in {self.folder}")
        i %= len(self)
        number = int(np.searchsorted(self._ends, i, side="right"))
        return self._shard(number), i - (int(self._ends[number - 1]) if number else 0)

    def _shard(self, number: int) -> dict[str, pa.ListArray]:
        """A shard's columns, memory-mapped from its file, so that nothing is read yet."""
        if number not in self._opened:
            path = self.folder / self.manifest["shards"][number]["file"]
            table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
            self._opened[number] = {name: table[name].chunk(0) for name in table.column_names}
        return self._opened[number]


def read_manifest(path: Path) -> dict:
    """Parse a manifest. Raises ValueError if it is missing or damaged."""
    with damage_named(path, remedy="make it with longdraft prepare"):
        return {**json.loads(path.read_text(encoding="utf-8"))}
