"""How fast text becomes shards, how much memory that takes, and what reading the shards costs a training run.

`python benchmarks/checks/prepare.py --megabytes 20` prints a table and one JSON line. The text is made of Python's own
library, so any size is possible. `longdraft prepare`'s work (without its imports) and the tokenizer library alone over
the same texts take turns, and the median of the rounds is shown. Memory is that of all processes together, resident,
beyond what this one had before. Then the shards are opened, as training does before its first step, and rows are read
at random.
"""

import argparse
import json
import random
import shutil
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import psutil

from longdraft.data_prep.prepare import prepare
from longdraft.data_prep.recipe import PrepareConfig, Source, changed, same_way
from longdraft.data_prep.shards import ShardSet
from longdraft.data_prep.sources import list_files

FILE_BYTES = 2_000_000
ALONE = "tokenizer alone, 1 process"


def make_texts(root: Path, megabytes: int) -> list[str]:
    """Write JSONL files with about `megabytes` of text, pages of Python's library in random order; return the texts."""
    pages = []
    for file in list_files([Source(path="stdlib")]):
        text = Path(file.path).read_text(encoding="utf-8")
        pages += [text[i : i + 3000] for i in range(0, len(text), 3000)]
    rng, texts, written = random.Random(0), [], 0
    root.mkdir(parents=True)
    while written < megabytes * 1_000_000:
        texts.append("".join(rng.choices(pages, k=max(1, int(rng.lognormvariate(0.5, 1))))))
        with (root / f"{written // FILE_BYTES:05d}.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"text": texts[-1]}, ensure_ascii=False) + "\n")
        written += len(texts[-1].encode())
    return texts


def watch(peak: list[int], ended: threading.Event) -> None:
    """Keep in `peak` how many bytes this process and its children hold, beyond those of before, until it `ended`."""
    this = psutil.Process()
    before = this.memory_info().rss
    while not ended.wait(0.5):  # looking costs milliseconds
        try:
            held = sum(one.memory_info().rss for one in (this, *this.children(recursive=True))) - before
        except psutil.NoSuchProcess:
            continue
        peak[0] = max(peak[0], held)


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed and memory of `longdraft prepare`.")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--megabytes", type=int, default=20)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    # Here, not above: the worker processes read this file too, and do without.
    from longdraft.models.fingerprint import tokenizer_hash
    from longdraft.models.hf import load_tokenizer

    tokenizer = load_tokenizer(args.target)
    speeds: dict[str, list[float]] = {ALONE: []}
    peaks: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        texts = make_texts(root / "text", args.megabytes)
        config = PrepareConfig(sources=same_way([str(root / "text")]), out=root / "out", seq_len=args.seq_len)
        for _ in range(args.rounds):
            begin = time.perf_counter()
            count = sum(len(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)
            speeds[ALONE].append(count / (time.perf_counter() - begin))
            for workers in (1, args.workers):
                shutil.rmtree(root / "out", ignore_errors=True)
                label, ended = f"prepare, {workers} process{'es' if workers > 1 else ''}", threading.Event()
                watching = threading.Thread(target=watch, args=(peaks.setdefault(label, [0]), ended))
                watching.start()
                begin = time.perf_counter()
                prepare(changed(config, workers=workers), tokenizer, tokenizer_hash(tokenizer))
                speeds.setdefault(label, []).append(count / (time.perf_counter() - begin))
                ended.set()
                watching.join()
        begin = time.perf_counter()
        rows = ShardSet(root / "out" / "train")
        rows.verify(vocab_size=len(tokenizer))
        opening, begin = time.perf_counter() - begin, time.perf_counter()
        for i in random.Random(0).choices(range(len(rows)), k=2000):
            rows[i]
        row_us = (time.perf_counter() - begin) / 2000 * 1e6
    found = {name: median(values) for name, values in speeds.items()}
    for name, value in found.items():
        memory = f"   peak memory {peaks[name][0] / 2**20:,.0f} MiB" if name in peaks else ""
        print(f"{name:28} {value / 1e3:8,.0f} thousand tokens/s{memory}")
    print(f"opening {opening:.2f} s, a row {row_us:.0f} us ({len(rows):,} rows)")
    print(json.dumps({"megabytes": args.megabytes, "tokens_s": found, "peak_bytes": peaks, "opening_s": opening}))


if __name__ == "__main__":
    main()
