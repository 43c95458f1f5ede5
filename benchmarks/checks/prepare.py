"""How fast text becomes shards, how much memory that takes, and what reading the shards costs a training run.

`python benchmarks/checks/prepare.py --target smollm2-135m --megabytes 20` prints a table and one JSON line. The text is
made from Python's own library, so any size is possible; its files have `--file-megabytes` each. All runs share one
process tree and alternate, so that a slow moment of the machine affects them equally. Measured are:

  tokenizer alone  the tokenizer library over the same texts, one after another, in 1 and in `--workers` processes
  prepare          the whole of `longdraft prepare` but the imports: reading, hashing, tokenising, packing, writing
  peak memory      of all its processes together (resident, without what the parent had before)
  opening          what a training does before its first step: manifest, checksums, ids against the vocabulary
  a row            reading one row of the shards at random
"""

import argparse
import json
import multiprocessing
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil

from longdraft.data_prep.prepare import PrepareConfig, prepare
from longdraft.data_prep.settings import Source, same_way
from longdraft.data_prep.shards import ShardSet
from longdraft.data_prep.sources import list_files
from longdraft.data_prep.tokenize import Encoder, make_encoder, rust_tokenizer


def make_texts(root: Path, megabytes: int, file_megabytes: float, seed: int = 0) -> list[Path]:
    """Write JSONL files with about `megabytes` of text: pages of Python's library in random order."""
    pages = []
    for file in list_files([Source("stdlib")]):
        text = Path(file.path).read_text(encoding="utf-8")
        pages += [text[i : i + 3000] for i in range(0, len(text), 3000)]
    rng, paths, rest = random.Random(seed), [], megabytes * 1_000_000
    root.mkdir(parents=True)
    while rest > 0:
        paths.append(root / f"{len(paths):05d}.jsonl")
        size = 0
        with paths[-1].open("w", encoding="utf-8") as stream:
            while size < min(rest, file_megabytes * 1e6):
                text = "".join(rng.choices(pages, k=max(1, int(rng.lognormvariate(0.5, 1)))))
                stream.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                size += len(text.encode())
        rest -= size
    return paths


def _tokenize(encoder: Encoder, paths: Sequence[Path]) -> tuple[int, float]:
    """(Tokens, seconds in the tokenizer library alone) of these files."""
    rust, n, seconds = rust_tokenizer(encoder.serialised), 0, 0.0
    for path in paths:
        with path.open(encoding="utf-8") as stream:
            texts = [json.loads(line)["text"] for line in stream]
        start = time.perf_counter()
        for text in texts:
            n += len(rust.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        seconds += time.perf_counter() - start
    return n, seconds


def tokenizer_alone(paths: Sequence[Path], encoder: Encoder, workers: int) -> float:
    """Tokens a second of the library, over all processes; each has an equal part of the text."""
    context = multiprocessing.get_context("spawn")
    count = partial(_tokenize, encoder)
    with ProcessPoolExecutor(workers, context) as pool:
        list(pool.map(count, [paths[:1]] * workers))  # each has started
        done = list(pool.map(count, [paths[i::workers] for i in range(workers)]))
    return sum(n for n, _ in done) / max(seconds for _, seconds in done)


def with_peak(work: Callable[[], object]) -> tuple[float, float]:
    """(Seconds, most bytes resident of this process and its children beyond those of before)."""
    process, ended, most = psutil.Process(), threading.Event(), 0
    before = process.memory_info().rss

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.5):  # looking costs milliseconds
            try:
                family = [process, *process.children(recursive=True)]
                most = max(most, sum(one.memory_info().rss for one in family))
            except psutil.NoSuchProcess:
                continue

    thread = threading.Thread(target=watch)
    thread.start()
    start = time.perf_counter()
    try:
        work()
    finally:
        seconds = time.perf_counter() - start
        ended.set()
        thread.join()
    return seconds, most - before


def reading(folder: Path, vocab_size: int) -> dict[str, float]:
    start = time.perf_counter()
    rows = ShardSet(folder / "train")
    rows.verify(vocab_size=vocab_size)
    opened = time.perf_counter() - start
    order = random.Random(0).choices(range(len(rows)), k=2000)
    start = time.perf_counter()
    for i in order:
        rows[i]
    return {"opening_s": opened, "row_us": (time.perf_counter() - start) / len(order) * 1e6, "rows": len(rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed and memory of `longdraft prepare`.")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--megabytes", type=int, default=20)
    parser.add_argument("--file-megabytes", type=float, default=2)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory-only", action="store_true", help="one preparation with --workers, and the reading")
    args = parser.parse_args()
    # Here, not above: the worker processes read this file too, and do without.
    from longdraft.models.fingerprint import tokenizer_hash
    from longdraft.models.hf import load_tokenizer

    tokenizer = load_tokenizer(args.target)
    encoder = make_encoder(tokenizer, ends_documents=True)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        paths = make_texts(root / "text", args.megabytes, args.file_megabytes)
        config = PrepareConfig(same_way([str(root / "text")]), root / "out", args.seq_len)
        counts = (args.workers,) if args.memory_only else (1, args.workers)
        speeds: dict[str, list[float]] = {}
        peaks: dict[str, float] = {}
        for _ in range(1 if args.memory_only else args.rounds):
            for workers in counts:
                if not args.memory_only:
                    alone = tokenizer_alone(paths, encoder, workers)
                    speeds.setdefault(f"tokenizer alone, {workers}", []).append(alone)
                shutil.rmtree(root / "out", ignore_errors=True)
                changed = replace(config, workers=workers)
                seconds, peak = with_peak(lambda config=changed: prepare(config, tokenizer, tokenizer_hash(tokenizer)))
                manifest = json.loads((root / "out" / "manifest.json").read_text())
                n = sum(split["tokens"] for split in manifest["splits"].values())
                speeds.setdefault(f"prepare, {workers}", []).append(n / seconds)
                peaks[f"prepare, {workers}"] = max(peak, peaks.get(f"prepare, {workers}", 0))
        found = {name: statistics.median(values) for name, values in speeds.items()}
        read = reading(root / "out", len(tokenizer))
    for name, value in found.items():
        memory = f"   peak memory {peaks[name] / 2**20:,.0f} MiB" if name in peaks else ""
        print(f"{name:24} {value / 1e3:10,.0f} thousand tokens/s{memory}")
    if not args.memory_only:
        one, several = counts[0], counts[-1]
        print(f"prepare over the tokenizer alone: {found[f'prepare, {one}'] / found[f'tokenizer alone, {one}']:.2f}")
        for name in ("tokenizer alone", "prepare"):
            print(f"{name}, {several} processes over 1: {found[f'{name}, {several}'] / found[f'{name}, {one}']:.2f}")
    print(f"opening {read['opening_s']:.2f} s, a row {read['row_us']:.0f} us ({read['rows']:,.0f} rows)")
    print(json.dumps({"megabytes": args.megabytes, "tokens_s": found, "peak_bytes": peaks, **read}))


if __name__ == "__main__":
    main()
