"""The prompts of benchmarks/contexts.py, and its table beside the figures it is made of."""

import argparse

import pytest

from longdraft.benchmarks import contexts
from longdraft.benchmarks.drafters import BenchSettings, bench
from longdraft.benchmarks.questions import Asked, Question
from longdraft.infer.drafters.build import build_drafter
from longdraft.models.hf import describe_target


def test_prompts_of_every_kind_at_every_length():
    target = describe_target("smollm2-135m")
    asked = contexts.questions(target, (600, 1500), 2)
    found = {one.question.id: one.question.turns[0] for one in asked}
    assert list(found) == [f"{k}, {c}, {i}" for c in ("600", "1,500") for k in contexts.KINDS for i in range(2)]
    for kind in ("prose", "code"):
        for number in range(2):
            short, long = (found[f"{kind}, {c}, {number}"] for c in ("600", "1,500"))
            assert (len(short), len(long)) == (600, 1500) and long[:600] == short
        assert found[f"{kind}, 600, 0"] != found[f"{kind}, 600, 1"]
    for number in range(2):
        short, long = (found[f"chat, {c}, {number}"] for c in ("600", "1,500"))
        assert len(short) <= 600 < len(long) <= 1500
        for ids in (short, long):
            text = target.tokenizer.decode(ids)
            assert text.endswith("<|im_end|>\n<|im_start|>assistant\n") and "<|im_start|>user" in text
    with pytest.raises(ValueError, match=r"--contexts: 5; no conversation of .*\.py is so short, give more"):
        contexts.questions(target, (5,), 1)


def test_a_record_knows_target_and_drafts_by_their_weights(tmp_path, tiny_target):
    args = argparse.Namespace(target="tiny", draft=[str(tmp_path), "smollm2-135m-longspec"], out=tmp_path)
    found = []
    for content in (b"a", b"b", b"a"):
        (tmp_path / "model.safetensors").write_bytes(content)
        found.append(contexts.asked_for(args, tiny_target(), [Asked(Question(1, "prose", ([1, 2],)), 2)]))
    assert found[0] == found[2] != found[1] and "out" not in found[0]
    assert found[0]["weights"][1] == found[1]["weights"][1] and found[0]["questions"] == [([1, 2],)]
    other = contexts.asked_for(args, tiny_target(seed=1), [Asked(Question(1, "prose", ([1, 2],)), 2)])
    assert {name for name in other if other[name] != found[2][name]} == {"target_weights"}


def test_the_table_is_that_of_the_figures(tiny_target):
    target = tiny_target(vocab_size=40)
    asked = [Asked(Question(i, f"kind {i % 2}", ([1 + i, 2, 3] * 4,)), 12) for i in range(4)]
    settings = BenchSettings(8, temperatures=(0.0, 1.0), proof="off", passes=False)
    builders = {
        name: lambda target, name=name: build_drafter(name, target) for name in ("prompt_lookup", "token_recycling")
    }
    result = bench(target, builders, asked, settings)
    greedy, sampled = contexts.table(result).split("\n\n")
    rows = [line.strip("| ").split(" | ") for line in sampled.split("\n")]
    assert rows[0] == ["T 1: text, tokens", "prompt_lookup", "token_recycling"] and greedy.startswith("| greedy: text")
    assert [row[0] for row in rows[2:]] == ["kind 0", "kind 1", "all"]
    one = result["runs"][1]["drafters"]["token_recycling"]["tasks"]["kind 1"]
    low, high = one["intervals"]["speedup"]
    assert rows[3][2] == f"{one['speedup']:.2f} ({low:.2f} to {high:.2f}); {one['tokens_per_step']:.2f}"
