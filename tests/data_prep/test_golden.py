"""Every kind of source and setting makes the shards that version 1 of the format has always had.

golden.json holds, for each preparation, the number of its shards, one digest over all shards' bytes and names, and one
over the documents and their tokens. `python tests/data_prep/test_golden.py` prints it anew.
"""

import bz2
import gzip
import hashlib
import json
import random
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from longdraft.data_prep import prepare as prepare_module
from longdraft.data_prep.inspection import inspect
from longdraft.data_prep.prepare import prepare
from longdraft.data_prep.recipe import PrepareConfig, Source
from longdraft.data_prep.shards import ShardSet

GOLDEN = Path(__file__).with_name("golden.json")
MDS = Path(__file__).with_name("mds")
TEMPLATE = Path(__file__).with_name("chatml.jinja").read_text()
WORDS = ["ship", "é", "longer than the row", "\r\n", "\t", "日本語", "<|end|>", "0", "  ", "🙂", 'a "quote", b;']
CODE = 'def f{0}(x):\n    """Return {0} times x, whatever x may be: a number or a fraction.\n\n    {1}"""\n'

chat = {"chat_field": "messages"}
ids = {"tokens_field": "ids", "tokenizer": "theirs"}
mds_ids = {"tokens_field": "input_ids", "spans_field": "indices", "tokenizer": "theirs"}
pair = {"prompt": "Say {{it}}: {text}", "answer": "{text}"}
# name -> (sources by name, each a path and its settings; settings of the preparation)
PREPARATIONS = {
    **{name: ({"one": {"path": name}}, {}) for name in ("text", "a.jsonl", "a.parquet", "file.arrow", "stream.arrow")},
    **{name: ({"one": {"path": name}}, {}) for name in ("a.jsonl.zst", "a.jsonl.gz", "a.jsonl.bz2", "stdlib")},
    **{name: ({"one": {"path": name}}, {}) for name in ("a.json", "a.json.zst")},
    "mds": ({"one": {"path": str(MDS / "plain")}}, {}),
    "mds.zst ids": ({"one": {"path": str(MDS / "zstd"), **mds_ids}}, {}),
    "ids": ({"one": {"path": "a.jsonl", **ids}}, {}),
    "chat": ({"one": {"path": "a.jsonl", **chat}}, {"seq_len": 48}),
    "prompt and answer": ({"one": {"path": "a.parquet", **pair}}, {}),
    "stdlib-chat": ({"one": {"path": "stdlib-chat"}}, {"seq_len": 256}),
    "first": ({"one": {"path": "text"}}, {"documents": "first", "seq_len": 100}),
    "max_tokens": ({"one": {"path": "a.parquet"}}, {"max_tokens": 4000}),
    "seed": ({"one": {"path": "text"}}, {"heldout_share": 0.3, "seed": 3}),
    "no heldout": ({"one": {"path": "a.jsonl"}}, {"heldout_share": 0.0}),
    "weights": (
        {"a": {"path": "a.jsonl", "weight": 3}, "b": {"path": "text", "weight": 1}},
        {"max_tokens": 6000},
    ),
    "text beside chat": ({"a": {"path": "a.jsonl", **chat}, "b": {"path": "a.parquet", "text_field": "text"}}, {}),
}


def fixed_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE whose vocabulary no trainer decides."""
    words = ["<|end|>", "<|start|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "sh", "ip", "ship", "Ġs"]
    merges = [("s", "h"), ("i", "p"), ("sh", "ip"), ("Ġ", "s")]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(words[:2])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", bos_token="<|start|>")


def make_inputs(root: Path) -> None:
    rng = random.Random(0)
    texts = [f"document {i} " + " ".join(rng.choices(WORDS, k=rng.randint(1, 120))) for i in range(120)]
    turns = [
        [{"role": role, "content": text[:k]} for k in (40, 90) for role in ("user", "assistant")] for text in texts
    ]
    rows = [
        {"text": text, "id": i, "ids": [(7 * i + k) % 250 + 2 for k in range(i + 1)], "messages": messages}
        for i, (text, messages) in enumerate(zip(texts, turns, strict=True))
    ]
    lines = "".join(json.dumps(row) + "\n" + "\n" * (i % 9 == 0) for i, row in enumerate(rows)).encode()
    (root / "a.jsonl").write_bytes(lines)
    (root / "a.jsonl.zst").write_bytes(pa.compress(lines, "zstd", asbytes=True))
    (root / "a.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
    (root / "a.jsonl.bz2").write_bytes(bz2.compress(lines))
    for name in ("a.json", "a.json.zst"):
        content = json.dumps(rows, indent=1, ensure_ascii=False).encode()
        (root / name).write_bytes(pa.compress(content, "zstd", asbytes=True) if name.endswith("zst") else content)
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, root / "a.parquet", row_group_size=30, compression="none", use_dictionary=False)
    for name, opened in (("file.arrow", pa.ipc.new_file), ("stream.arrow", pa.ipc.new_stream)):
        with pa.OSFile(str(root / name), "wb") as file, opened(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=17)
    for i, text in enumerate(texts):
        for path, content in (
            (f"text/{'deep/' * (i % 2)}{i}.txt", text),
            (f"lib/m{i}.py", CODE.format(i, text[:99]) * 2),
        ):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content.replace('"""Return 7 ', "'").encode())
    (root / "template.jinja").write_text(TEMPLATE)


def config_of(name: str, root: Path, out: Path) -> PrepareConfig:
    sources, settings = PREPARATIONS[name]
    made = {}
    for key, how in sources.items():
        path = how["path"] if how["path"].startswith(("stdlib", "/")) else str(root / how["path"])
        made[key] = Source(**{**how, "path": path})
    is_chat = any({"chat_field", "prompt"} & how.keys() or how["path"] == "stdlib-chat" for how in sources.values())
    settings = {"seq_len": 64, "heldout_share": 0.2, **settings}
    return PrepareConfig(sources=made, out=out, chat_template=root / "template.jinja" if is_chat else None, **settings)


def digests(out: Path) -> list:
    shards, documents = hashlib.sha256(), []
    paths = sorted(out.rglob("*.arrow"))
    for path in paths:
        shards.update(path.relative_to(out).as_posix().encode() + hashlib.sha256(path.read_bytes()).digest())
    for split in ("train", "heldout"):
        rows = ShardSet(out / split)
        for i in range(len(rows)):
            row = rows[i]
            for piece, start, stop in zip(rows.pieces(i), row["borders"], row["borders"][1:], strict=False):
                documents.append([split, *piece, row["tokens"][start:stop].tolist(), row["loss"][start:stop].tolist()])
    by_document: dict[tuple, list] = {}
    for split, name, _, tokens, loss in sorted(documents):
        found = by_document.setdefault((split, name), [[], []])
        found[0] += tokens
        found[1] += loss
    content = json.dumps(sorted(by_document.items()))
    return [len(paths), shards.hexdigest()[:20], hashlib.sha256(content.encode()).hexdigest()[:20]]


def made(name: str, root: Path, out: Path, **fields) -> list:
    """The digests of a preparation."""
    tokenizer = fixed_tokenizer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_module, "SEGMENT_BYTES", 3000)
        patch.setattr(prepare_module, "SHARD_TEXT_BYTES", (6000, 6000))
        patch.setattr(sysconfig, "get_path", lambda _: str(root / "lib"))
        config = config_of(name, root, out).model_copy(update=fields)
        prepare(config, tokenizer, "hash", {"theirs": tokenizer}, log=lambda _: None)
    return digests(out)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    make_inputs(folder)
    return folder


@pytest.mark.parametrize("name", PREPARATIONS)
def test_shards_are_as_ever(root, tmp_path, name):
    assert made(name, root, tmp_path / "out") == json.loads(GOLDEN.read_text())[name]


def test_workers_change_nothing(root, tmp_path):
    assert made("chat", root, tmp_path / "out", workers=2) == json.loads(GOLDEN.read_text())["chat"]


def test_a_folder_of_the_first_version_is_read(tmp_path):
    """`prepared` holds two sources, conversations and texts, as this version wrote them."""
    out = tmp_path / "prepared"
    shutil.copytree(Path(__file__).with_name("prepared"), out)
    assert digests(out) == [2, "26e51dbdf9e332cddcd0", "648e71d9ae3aa8c1bf99"]
    for split in ("train", "heldout"):
        ShardSet(out / split).verify(vocab_size=262)
    assert "chats" in inspect(out)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        make_inputs(Path(folder))
        found = {name: made(name, Path(folder), Path(folder, "out", name)) for name in PREPARATIONS}
    sys.stdout.write("{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(found[name])}" for name in found) + "\n}\n")
