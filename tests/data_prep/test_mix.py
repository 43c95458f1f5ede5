"""Several sources in one folder: forms of records, weights, ids."""

import json
from collections import Counter

import pytest

from longdraft.data_prep.prepare import prepare
from longdraft.data_prep.recipe import PrepareConfig, Source, same_way
from longdraft.data_prep.shards import ShardSet


def write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def books(tmp_path):
    """Three data sets, each with 300 texts of one word in three files."""
    words = ("alpha", "beta", "gamma")
    for word in words:
        for part in range(3):
            records = [{"text": f"{word} {part} {i} " + "word " * 20} for i in range(100)]
            write(tmp_path / word / f"{part}.jsonl", records)
    return {word: Source(path=str(tmp_path / word)) for word in words}


def total(manifest, name, key="tokens"):
    return sum(split["mix"].get(name, {}).get(key, 0) for split in manifest["splits"].values())


def test_weights_share_out_the_tokens(books, tmp_path, tiny_tokenizer, monkeypatch, capsys):
    monkeypatch.setattr("longdraft.data_prep.prepare.SEGMENT_BYTES", 2000)
    monkeypatch.setattr("longdraft.data_prep.prepare.SHARD_TEXT_BYTES", (15_000, 15_000))
    weights = {"alpha": 6, "beta": 3, "gamma": 1}
    sources = {name: source.model_copy(update={"weight": weights[name]}) for name, source in books.items()}
    config = PrepareConfig(sources=sources, out=tmp_path / "out", seq_len=64, heldout_share=0.2, max_tokens=10_000)
    manifest = prepare(config, tiny_tokenizer, "hash")
    for name, weight in weights.items():
        assert 0.9 * weight * 1000 < total(manifest, name) <= weight * 1000, name
    by_source = ", ".join(f"{name} {total(manifest, name):,}" for name in weights)
    assert f"\n  tokens by source: {by_source}\n" in capsys.readouterr().out
    shards = [ShardSet(config.out / split) for split in ("train", "heldout")]
    pieces = [{name.partition("/")[0] for name, _ in one.pieces(i)} for one in shards for i in range(len(one))]
    assert max(map(len, pieces)) >= 2, "no row holds pieces of several sources"
    train = manifest["splits"]["train"]
    assert sum(counted["tokens"] for counted in train["mix"].values()) == train["tokens"]


def test_ids_are_held_against_their_tokenizer(tmp_path, tiny_tokenizer, read_back):
    ids = [tiny_tokenizer(f"<|start|>text {i} é")["input_ids"] for i in range(10)]
    bad = [
        {"ids": [1, len(tiny_tokenizer)]},
        {"ids": "text"},
        {"ids": [[1], [1, 2]]},
        {"ids": []},
        {"ids": [0, 1]},
        {"other": 1},
    ]
    write(tmp_path / "ids.jsonl", [*({"ids": one} for one in ids), *bad])
    source = Source(path=str(tmp_path / "ids.jsonl"), tokens_field="ids", tokenizer="theirs")
    config = PrepareConfig(sources={"ids": source}, out=tmp_path / "out", seq_len=32, heldout_share=0)
    manifest = prepare(config, tiny_tokenizer, "hash", {"theirs": tiny_tokenizer})
    assert manifest["splits"]["train"]["bad"] == {"empty": 1, "missing_field": 1, "not_token_ids": 4}
    found = read_back(config.out, tiny_tokenizer)
    assert sorted(found.values()) == [f"text {i} é".encode() for i in range(10)]


def test_ids_of_the_target_become_rows_as_they_are(tmp_path, tiny_tokenizer, joined):
    # Not the tokens of their text: a sampled answer may be spelled with others.
    spelled = [tiny_tokenizer.convert_tokens_to_ids(letter) for letter in "shipship"]
    assert spelled != tiny_tokenizer("shipship")["input_ids"]
    good = [
        {"ids": [i % 250, *spelled, 0, 7, 7], "own": [[1, 10], [11, 12]], "tokenizer_sha256": "hash"} for i in range(40)
    ]
    other_answers = [{"ids": [i, 5, 5], "own": [[1, 3]]} for i in range(40)]
    bad = [
        {"ids": [1, len(tiny_tokenizer)], "own": [[0, 1]]},
        {"ids": [1, 2], "own": [[0, 3]]},
        {"ids": [1, 2], "own": [[1, 0]]},
        {"ids": [1, 2], "own": []},
        {"ids": [1, 2], "own": [0, 1]},
        {"ids": [1, 2, 3], "own": [[1, 2], [0, 1]]},
        {"ids": [1, 2], "own": [[1, 1]]},
        {"ids": [1, 2]},
        {"ids": [1, 2], "own": [[0, 1]], "tokenizer_sha256": "another"},
    ]
    write(tmp_path / "ids.jsonl", [*good, *other_answers, *bad])
    source = Source(path=str(tmp_path / "ids.jsonl"), target_tokens_field="ids", loss_field="own")
    config = PrepareConfig(sources={"ids": source}, out=tmp_path / "out", seq_len=32, heldout_share=0.5)
    manifest = prepare(config, tiny_tokenizer, "hash")
    counts = [Counter(manifest["splits"][split]["bad"]) for split in ("train", "heldout")]
    assert counts[0] + counts[1] == {"missing_field": 1, "not_spans": 6, "not_token_ids": 1, "other_tokenizer": 1}
    want = [[*zip(one["ids"], [0] + [1] * 9 + [0, 1], strict=True)] for one in good]
    want += [[*zip(one["ids"], [0, 1, 1], strict=True)] for one in other_answers]
    found = joined(config.out)
    assert sorted(found.values()) == sorted(want)
    # Answers to one prompt are in one split.
    heldout = ShardSet(config.out / "heldout")
    names = {name for i in range(len(heldout)) for name, _ in heldout.pieces(i)}
    prompts = [{pairs[0] for name, pairs in found.items() if (name in names) == side} for side in (False, True)]
    assert all(prompts) and not prompts[0] & prompts[1]


def test_a_sequence_of_the_target_that_no_row_holds_is_cut_where_answers_end(tmp_path, tiny_tokenizer, joined):
    # A long prompt with a short answer; a session; an answer that is longer than a row.
    spans = [[[95, 99]], [[10, 14], [30, 41], [50, 55], [96, 97]], [[9, 60]]]
    records = [{"ids": [*range(50, 149)], "own": one} for one in spans]
    write(tmp_path / "ids.jsonl", records)
    source = Source(path=str(tmp_path / "ids.jsonl"), target_tokens_field="ids", loss_field="own")
    config = PrepareConfig(sources={"ids": source}, out=tmp_path / "out", seq_len=32, heldout_share=0)
    prepare(config, tiny_tokenizer, "hash")
    found = []
    for name, pairs in joined(config.out).items():
        counted = [token - 50 for token, counts in pairs if counts]
        found.append((name.partition("@")[0], pairs[0][0] - 50, pairs[-1][0] - 49, counted[0], counted[-1] + 1))
    assert sorted(found) == [
        ("ids.jsonl:1", 67, 99, 95, 99),
        *(("ids.jsonl:2", *one) for one in ((0, 14, 10, 14), (23, 55, 30, 55), (65, 97, 96, 97))),
        *(("ids.jsonl:3", *one) for one in ((0, 28, 9, 28), (28, 60, 28, 60))),
    ]


def test_mistakes_of_a_mix_are_named(books, tmp_path):
    with pytest.raises(ValueError, match="max_tokens"):
        PrepareConfig(sources={"a": Source(path="a", weight=2)}, out=tmp_path, seq_len=64)
    with pytest.raises(ValueError, match=r"^out: "):
        PrepareConfig(sources={"alpha": books["alpha"]}, out=tmp_path / "alpha" / "out", seq_len=64)
    assert list(same_way(["x/data", "y/data", "x/data", "stdlib"])) == ["data", "data-2", "stdlib"]


def test_what_stands_beside_records_is_not_taken_for_them(books, tmp_path, tiny_tokenizer):
    (tmp_path / "alpha" / "README.md").write_text("about")
    for field, n in (("text", 300), (None, 301)):
        sources = {"alpha": books["alpha"].model_copy(update={"text_field": field})}
        config = PrepareConfig(sources=sources, out=tmp_path / f"out{n}", seq_len=64)
        assert total(prepare(config, tiny_tokenizer, "hash"), "alpha", "documents") == n


def test_two_sources_may_read_one_file_each_in_its_way(tmp_path, tiny_tokenizer):
    path = tmp_path / "in" / "both.jsonl"
    path.parent.mkdir()
    write(path, [{"text": f"text {i}", "note": f"note {i}"} for i in range(10)])
    sources = {field: Source(path=str(path), text_field=field) for field in ("text", "note")}
    config = PrepareConfig(sources=sources, out=tmp_path / "out", seq_len=32, heldout_share=0)
    manifest = prepare(config, tiny_tokenizer, "hash")
    assert [total(manifest, field, "documents") for field in ("text", "note")] == [10, 10]
    assert list(json.loads((config.out / "plan.json").read_text())["sources"]) == ["both.jsonl"]
