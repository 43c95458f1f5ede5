"""Every recipe of configs/data against folders in the published layouts: the same files, fields and types, small.

The sets themselves are on a hub; what each looks like is written here as its page describes it.
"""

import json
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longdraft.data_prep.recipe import Source
from longdraft.data_prep.shards import ShardSet
from longdraft.data_prep.sources import list_files
from longdraft.data_prep.tables import table_rows
from longdraft.launch import prepare as prepare_command
from longdraft.launch.prepare import main
from longdraft.models import hf
from longdraft.train.config_file import read_yaml

RECIPES = Path(__file__).resolve().parents[2] / "configs" / "data"
TARGET = ["--target", "smollm2-135m", "--workers", "1"]
PG19 = [str(RECIPES / "pg19.yaml"), *TARGET]
PROSE = "It was the best of times, it was the worst of times. "


def parquet(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(records), path, row_group_size=20)


def jsonl_zst(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.CompressedOutputStream(str(path), "zstd") as stream:
        stream.write("".join(json.dumps(record) + "\n" for record in records).encode())


@pytest.fixture(autouse=True)
def loaded(smollm2, monkeypatch):
    """SmolLM2's tokenizer is loaded once for all calls."""
    load = hf.load_tokenizer
    monkeypatch.setattr(hf, "load_tokenizer", lambda name: smollm2 if name == "smollm2-135m" else load(name))


@pytest.fixture
def decoded(joined, smollm2):
    """decoded(folder) gives the text of each document, or the part of it that the loss counts, sorted."""

    def read(out, counted=False):
        documents = [[token for token, counts in pairs if counts or not counted] for pairs in joined(out).values()]
        return sorted(map(smollm2.decode, documents))

    return read


def tokens_of(manifest, name):
    return sum(split["mix"].get(name, {"tokens": 0})["tokens"] for split in manifest["splits"].values())


def run(recipe, out, *overrides):
    main([str(RECIPES / f"{recipe}.yaml"), *TARGET, "--out", str(out), *overrides])
    return json.loads((out / "manifest.json").read_text())


def test_there_is_a_test_for_every_recipe():
    names = {path.stem for path in RECIPES.glob("*.yaml")} - {"served"}  # tests/launch/test_serve.py
    assert names == {"pg19", "slimpajama-6b", "prolong-64k", "long-sft", "qwq-longcot", "chat", "text", "smollm2-mixed"}


def test_pg19(tmp_path, decoded):
    books = [PROSE * n for n in (2, 30, 60, 90)]
    fields = {"short_book_title": "A Book", "publication_date": 1859, "url": "http://www.gutenberg.org/ebooks/98"}
    records = [{**fields, "text": f"Book {i}. {book}"} for i, book in enumerate(books)]
    parquet(tmp_path / "hub/data/train-00000-of-00023.parquet", records)
    parquet(tmp_path / "hub/data/test-00000-of-00001.parquet", records)
    given = (f"sources.pg19.path={tmp_path}/hub", "seq_len=512", "heldout_share=0")
    train = run("pg19", tmp_path / "a", *given)["splits"]["train"]
    assert train["dropped"] == {"shorter_than_seq_len": 2}
    found = decoded(tmp_path / "a")
    assert [text[:7] for text in found] == ["Book 2.", "Book 3."]
    assert all(books[int(text[5])].startswith(text[8:]) for text in found)
    train = run("pg19", tmp_path / "c", *given, "documents=pack")["splits"]["train"]
    assert train["documents"] == 4 and not train["dropped"]


def test_slimpajama(tmp_path, decoded):
    names = ["RedPajamaCommonCrawl", "RedPajamaC4", "RedPajamaGithub"]
    meta = [{"redpajama_set_name": names[i % 3]} for i in range(60)]
    records = [{"text": f"{i} {PROSE * (i % 30)}", "meta": meta[i], "__index_level_0__": i} for i in range(60)]
    parquet(tmp_path / "6b/data/train-00000-of-00048-ab2b35705f029d94.parquet", records)
    for part in range(2):
        jsonl_zst(tmp_path / f"627b/train/chunk1/example_train_{part}.jsonl.zst", records[part::2])
    run("slimpajama-6b", tmp_path / "a", f"sources.slimpajama.path={tmp_path}/6b", "heldout_share=0.2")
    files = "sources.slimpajama.files=[train/*.jsonl.zst]"
    run("slimpajama-6b", tmp_path / "b", f"sources.slimpajama.path={tmp_path}/627b", files, "heldout_share=0.2")
    texts = sorted(record["text"] + "<|im_end|>" for record in records)
    assert decoded(tmp_path / "a") == texts == decoded(tmp_path / "b")


def test_prolong(tmp_path, smollm2, decoded):
    root, domains = tmp_path / "prolong-data-64K", ("thestackv1_concat_by_repo-65536", "book-65536", "arxiv", "tuluv2")
    for domain in domains:  # whose samples are those of mds/plain
        shutil.copytree(Path(__file__).parent / "mds" / "plain", root / domain)
    texts = []
    for file in list_files([Source(path=str(root / "arxiv"))]):
        for row in table_rows(file, fields=("input_ids", "indices")):
            documents = (row["input_ids"][start:stop].tolist() for start, stop in row["indices"])
            texts += [smollm2.decode(ids, skip_special_tokens=True).strip("\ufffd") + "<|im_end|>" for ids in documents]
    sources = [f"sources.{name}.{field}" for name in ("code", "books", "arxiv") for field in
               (f"path={root}", "tokenizer=smollm2-135m", "streaming=false")]  # fmt: skip
    manifest = run("prolong-64k", tmp_path / "out", *sources, "seq_len=256", "max_tokens=2100", "heldout_share=0.2")
    for found in decoded(tmp_path / "out"):  # the document that reaches a budget is cut
        assert any(text.startswith(found.rstrip("\ufffd")) for text in texts), "a document came back as another text"
    rows = ShardSet(tmp_path / "out" / "train")
    taken = {name.split("/")[1] for i in range(len(rows)) for name, _ in rows.pieces(i)}
    assert {*domains[:2]} <= taken <= {*domains[:3]}
    tokens = {name: tokens_of(manifest, name) for name in ("code", "books", "arxiv")}
    assert 700 < tokens["code"] <= 1000 and 700 < tokens["books"] <= 1000 and 0 < tokens["arxiv"] <= 100
    assert manifest["sources"]["code"]["tokenizer"] == "smollm2-135m"


def test_long_sft(tmp_path, decoded):
    reports = [{"report": f"report {i} {PROSE}", "summary": f"told {i}"} for i in range(10)]
    parquet(tmp_path / "reports/document/train-00000-of-00002.parquet", reports)
    news = [{"document": f"news {i} ||||| more {PROSE}", "summary": f"heard {i}"} for i in range(10)]
    parquet(tmp_path / "news/default/train/0000.parquet", news)
    meetings = [{"id": i, "uid": f"m_{i}", "summary": f"met {i}", "transcript": f"so {i} {PROSE}"} for i in range(10)]
    (tmp_path / "meetings").mkdir()
    (tmp_path / "meetings/train.json").write_text("".join(json.dumps(record) + "\n" for record in meetings))
    code = [{"context": f"x = {i}\ny = {{}}\n" * 9, "gt": f"print({i})"} for i in range(10)]
    parquet(tmp_path / "code/data/train-00000-of-00001.parquet", code)
    answers = [f"{word} {i}" for word in ("told", "heard", "met") for i in range(10)] + [r["gt"] for r in code]
    sources = [f"sources.{name}.path={tmp_path / name}" for name in ("reports", "news", "meetings", "code")]
    manifest = run("long-sft", tmp_path / "out", *sources, "seq_len=2048", "heldout_share=0.2")
    assert all(tokens_of(manifest, name) for name in ("reports", "news", "meetings", "code"))
    assert decoded(tmp_path / "out", counted=True) == sorted(f"{answer}<|im_end|>" for answer in answers)
    text = "".join(decoded(tmp_path / "out"))
    assert "Read the following report and summarise it.\n\nreport 3 It was" in text and "x = 7\ny = {}\n" in text


def test_qwq_longcot(tmp_path, decoded):
    records = [
        {"problem": f"What is {i} + {i}?", "qwq": f"So {PROSE}It is {2 * i}.", "source": "made"} for i in range(20)
    ]
    (tmp_path / "set").mkdir()
    (tmp_path / "set/qwq.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "set/README.md").write_text("---\nlicense: mit\n---\n")
    run("qwq-longcot", tmp_path / "out", f"sources.longcot.path={tmp_path}/set", "seq_len=1024", "heldout_share=0.2")
    answers = sorted(record["qwq"] + "<|im_end|>" for record in records)
    assert decoded(tmp_path / "out", counted=True) == answers


def test_chat_and_text(tmp_path, decoded):
    chats = [[{"role": "user", "content": f"ask {i}"}, {"role": "assistant", "content": f"say {i}"}] for i in range(20)]
    records = [{"prompt": "ask", "prompt_id": str(i), "messages": chat} for i, chat in enumerate(chats)]
    parquet(tmp_path / "chat/data/train_sft-00000-of-00003.parquet", records)
    run("chat", tmp_path / "a", f"sources.chat.path={tmp_path}/chat", "seq_len=512", "heldout_share=0.2")
    assert decoded(tmp_path / "a", counted=True) == sorted(f"say {i}<|im_end|>" for i in range(20))
    for name, end in (("books", "txt"), ("code", "py")):
        (tmp_path / name).mkdir()
        for i in range(40):
            (tmp_path / name / f"{i}.{end}").write_text(f"{name} {i} {PROSE * 3}")
    sources = [f"sources.{name}.path={tmp_path / name}" for name in ("books", "code")]
    manifest = run("text", tmp_path / "b", *sources, "seq_len=512", "max_tokens=1200", "heldout_share=0.2")
    assert 600 < tokens_of(manifest, "books") <= 900 and 100 < tokens_of(manifest, "code") <= 300


def test_smollm2_mixed(tmp_path):
    """It takes the files of each kind that `launch/fetch_texts.sh` leaves, by weight."""
    names = {"documentation": "intro.rst", "speeches": "1801.txt", "code": "module.py", "library": "queue.py"}
    for kind, name in names.items():
        for i in range(12):
            (tmp_path / kind / str(i)).mkdir(parents=True)
            (tmp_path / kind / str(i) / name).write_text(f"{kind} {i}. {PROSE * 20}")
            (tmp_path / kind / str(i) / "left.bin").write_bytes(b"\0")
    paths = [f"sources.{kind}.path={tmp_path / kind}" for kind in names]
    manifest = run("smollm2-mixed", tmp_path / "out", *paths, "seq_len=128", "max_tokens=4000", "heldout_share=0.2")
    tokens = {kind: tokens_of(manifest, kind) for kind in names}
    assert 1200 < tokens["documentation"] <= 2200 and sum(tokens.values()) <= 4400
    for kind in ("speeches", "code", "library"):
        assert 400 < tokens[kind] <= 1200
    script = (RECIPES.parents[1] / "launch" / "fetch_texts.sh").read_text()
    assert all(f"$folder/{kind}" in script or f"{kind}," in script for kind in ("documentation", "speeches", "code"))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([*PG19, "sources.pg19.pat=x"], "sources.pg19.pat: unknown field; did you mean path?"),
        ([*PG19, "sources.pg19.path=${nope}"], "sources.pg19.path: "),
        ([*PG19, "--text-field", "x"], "--text-field is given with the recipe"),
        ([*PG19, "--source", "stdlib"], "--source is given with the recipe"),
        ([*PG19, "sources.pg19.path=/none/such"], "source '/none/such' "),
        (["--inspect", "nowhere"], "nowhere"),
        (["--inspect", "nowhere", "--target", "x", "--seq-len", "8"], "--inspect: it takes --target alone"),
        ([*PG19, "--inspect", "nowhere"], "--inspect: it takes --target alone"),
        (["--out", "x"], "--target"),
        (["--target", "x"], "without a recipe: --source"),
        (["--target", "x", "--source", "stdlib"], "without a recipe: --seq-len, --out"),
        (["--target", "x", "--out", "x", "--source", "stdlib", "--seq-len", "1"], "seq_len: "),
    ],
)
def test_mistakes_are_named(argv, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2 and said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_a_folder_the_recipe_names_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.txt").write_text(PROSE * 20)
    argv = [*PG19, "sources.pg19.path=corpus", "sources.pg19.files=['*.txt']"]
    main([*argv, "seq_len=1", "heldout_share=0", "--seq-len", "64"])  # an option goes before the recipe
    assert (tmp_path / "data/pg19/manifest.json").exists() and "-> data/pg19" in capsys.readouterr().out


def test_the_commands_in_the_training_recipes_prepare_what_they_read():
    """Each recipe's comment says how its data is made: the recipe is there, folder and length are the stage's."""
    parser, n_commands = prepare_command._parser(), 0
    for path in sorted([*RECIPES.parent.glob("longspec/*.yaml"), *RECIPES.parent.glob("tokenswift/*.yaml")]):
        text = path.read_text()
        raw = read_yaml(path, [])
        stages = list(raw["stages"].values()) if "stages" in raw else [raw]
        data = {
            stage["data"]["path"]: stage["data"].get("seq_len", raw.get("data", {}).get("seq_len")) for stage in stages
        }
        for command in re.findall(r"longdraft prepare (.*)", text):
            args = parser.parse_intermixed_args(command.split())
            if "recipe" not in args:
                seq_len = args.seq_len
            else:
                overrides = vars(args).get("overrides", [])
                seq_len = read_yaml(RECIPES.parents[1] / args.recipe, overrides)["seq_len"]
                for override in overrides:
                    name, _, value = override.partition("=")
                    assert name != "chat_template" or (RECIPES.parents[1] / value).exists()
            assert data.pop(str(args.out)) == seq_len, f"{path.name}: {command}"
            n_commands += 1
        assert not data, f"{path.name} says of {data} nothing"
    assert n_commands > 20
