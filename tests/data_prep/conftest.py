"""Small tokenizers, a corpus of distinct documents, and readers of prepared folders."""

import json
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from longdraft.data_prep.shards import ShardSet

WORDS = [
    "ship", "é", "longer than the row", "\r\n", "\t", "日本語", "<|end|>", "0", "  ", "🙂",
    "def f(x):\n    return x\n",
]  # fmt: skip
Joined = dict[str, list[tuple[int, bool]]]


def byte_level_tokenizer(sets_bos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE of some 300 ids with EOS `<|end|>`; with `sets_bos` it puts `<|start|>` before each text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|start|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    if sets_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|start|> $A", special_tokens=[("<|start|>", 1)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", bos_token="<|start|>")


LIGHT = """
from tokenizers import Tokenizer

class Light:  # what prepare uses of a transformers tokenizer, without the seconds transformers takes to import
    is_fast, eos_token_id, bos_token_id = True, 0, None
    def __init__(self, path):
        self.backend_tokenizer = Tokenizer.from_file(path)
    def __len__(self):
        return self.backend_tokenizer.get_vocab_size()
"""


@pytest.fixture(scope="session")
def light() -> str:
    """Source of class `Light`, a tokenizer read from a file, to begin the programs that tests start."""
    return LIGHT


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerBase:
    return byte_level_tokenizer()


@pytest.fixture(scope="session")
def bos_tokenizer() -> PreTrainedTokenizerBase:
    return byte_level_tokenizer(sets_bos=True)


def make_sentencepiece(kind: str, words: Sequence[str], strips: bool = True) -> PreTrainedTokenizerFast:
    """Like Llama 2's tokenizer: words begin with ▁, and bytes are tokens.

    kind: "always": a normalizer puts ▁ before every text; "first" and "never": prepend schemes of a pre-tokenizer.
    words: tokens, each merged letter by letter. strips: whether decoding removes the first blank.
    """
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "\n", *map(chr, range(33, 127))]
    tokens = dict.fromkeys([*tokens, *(word[:i] for word in words for i in range(2, len(word) + 1))])
    merges = [(word[:i], word[i]) for word in words for i in range(1, len(word))]
    ids = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True))
    if kind == "always":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    steps: list = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strips else [])])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def sentencepiece() -> Callable[..., PreTrainedTokenizerFast]:
    return make_sentencepiece


@pytest.fixture(scope="session")
def smollm2():
    from longdraft.models.hf import load_tokenizer

    return load_tokenizer("smollm2-135m")


@pytest.fixture(scope="session")
def make_corpus() -> Callable[..., dict[str, bytes]]:
    """make_corpus(folder, n) writes n text files and a JSONL file of n lines; returns name -> text's bytes."""

    def make(folder: Path, n: int) -> dict[str, bytes]:
        rng = random.Random(0)
        texts = [f"document {i} " + " ".join(rng.choices(WORDS, k=rng.randint(1, 400))) for i in range(2 * n)]
        (folder / "deep").mkdir(parents=True, exist_ok=True)
        written = {}
        for i, text in enumerate(texts[:n]):
            path = folder / ("deep" if i % 2 else ".") / f"file{i:03d}.txt"
            path.write_bytes(text.encode())
            written[f"{folder.name}/{path.relative_to(folder).as_posix()}"] = text.encode()
        lines = [json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts[n:])]
        (folder / "lines.jsonl").write_text("".join(lines))
        written |= {f"{folder.name}/lines.jsonl:{i}": text.encode() for i, text in enumerate(texts[n:], start=1)}
        return written

    return make


@pytest.fixture(scope="session")
def joined() -> Callable[..., Joined]:
    """joined(folder) returns the documents of both splits with their pieces joined: name -> (token, whether the loss
    counts it). It also checks that pieces are numbered 0.., that no document is in both splits, and that the loss
    counts no filler."""

    def read(folder: Path) -> Joined:
        found: dict[str, dict[int, list[tuple[int, bool]]]] = {}
        for split in ("train", "heldout"):
            shards, of_others = ShardSet(folder / split), set(found)
            for i in range(len(shards)):
                row = shards[i]
                assert not row["loss"][row["borders"][-1] :].any()
                pairs = list(zip(row["tokens"].tolist(), row["loss"].tolist(), strict=True))
                for (name, number), (start, stop) in zip(shards.pieces(i), pairwise(row["borders"]), strict=True):
                    assert name not in of_others, f"{name} is in both splits"
                    assert number not in found.setdefault(name, {}), f"{name} piece {number} is there twice"
                    found[name][number] = pairs[start:stop]
        for pieces in found.values():
            assert sorted(pieces) == list(range(len(pieces)))
        return {name: [pair for _, piece in sorted(pieces.items()) for pair in piece] for name, pieces in found.items()}

    return read


@pytest.fixture(scope="session")
def read_back(joined) -> Callable[..., dict[str, bytes]]:
    """read_back(folder, tokenizer, bos) decodes the documents of both splits: name -> bytes. Checks that BOS and EOS
    are only at the ends."""

    def read(folder: Path, tokenizer: PreTrainedTokenizerBase, bos: Sequence[int] = ()) -> dict[str, bytes]:
        texts = {}
        for name, pairs in joined(folder).items():
            *ids, end = [token for token, _ in pairs]
            assert ids[: len(bos)] == list(bos) and end == tokenizer.eos_token_id not in ids
            decoded = tokenizer.decode(ids[len(bos) :], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            assert isinstance(decoded, str)
            texts[name] = decoded.encode()
        return texts

    return read
