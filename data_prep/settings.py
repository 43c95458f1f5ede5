"""What a preparation is asked for, checked. What it does is in prepare.py."""

from dataclasses import dataclass
from pathlib import Path

from longdraft.data_prep.pack import MODES
from longdraft.data_prep.sources import RECORD_SUFFIXES, TEXT_SUFFIXES


@dataclass(frozen=True)
class PrepareConfig:
    """What to prepare; all but `workers`, `max_bad_share` and `overwrite` decide the content of the shards.

    sources, suffixes: see `sources.list_files`. out: folder. seq_len: tokens of a row. documents: "pack" or "first"
    (see pack.py). text_field: of JSONL and tables. chat_field: of these, their conversations; None: they hold text.
    chat_template: a Jinja file, None: the tokenizer's own. heldout_share: of the documents. max_tokens: of both splits
    together, without filler. max_bad_share: bad documents among those seen, above it nothing is finished. shard_bytes:
    of text, None: from the size of the sources.
    """

    sources: tuple[str, ...]
    out: Path
    seq_len: int
    documents: str = "pack"
    text_field: str = "text"
    chat_field: str | None = None
    chat_template: Path | None = None
    suffixes: tuple[str, ...] = TEXT_SUFFIXES + RECORD_SUFFIXES
    heldout_share: float = 0.05
    max_tokens: int | None = None
    max_bad_share: float = 0.01
    seed: int = 0
    workers: int = 1
    shard_bytes: int | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        checks = [
            ("seq_len", self.seq_len >= 2, "at least 2"),
            ("documents", self.documents in MODES, f"one of {', '.join(MODES)}"),
            ("heldout_share", 0 <= self.heldout_share < 1, "at least 0 and below 1"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            ("max_bad_share", 0 <= self.max_bad_share <= 1, "0 to 1"),
            ("workers", self.workers >= 1, "at least 1"),
            ("shard_bytes", self.shard_bytes is None or self.shard_bytes >= 1, "at least 1"),
        ]
        for name, good, valid in checks:
            if not good:
                raise ValueError(f"{name} is {getattr(self, name)!r}, valid: {valid}")
