"""`bench --paper`: drafts in their authors' forms, on made-up files in the published layouts, to a table's end."""

import json
import random

import pytest
import torch

from longdraft.benchmarks.drafters.papers import PAPERS, beside, table
from longdraft.benchmarks.drafters.questions import LONGBENCH, SUITES
from longdraft.benchmarks.drafters.record import Answer, Entry, Record
from longdraft.launch import cli
from longdraft.models.hf import load_target
from longdraft.models.published import convert

WORDS = ["the", "cat", "sat", "on", "the", "mat", "and", "the", "dog", "sat", "on", "the", "log"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, shared, authors):
    """A target of 4096 positions, drafts as published and converted, and the suites' files."""
    root = tmp_path_factory.mktemp("papers")
    text = " ".join(WORDS) + ". "
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    how = {"chat_template": template, "positions": 4096}
    target = shared("tiny_checkpoint.py").save(root / "target", text * 40, 290, seed=3, **how)
    authors.publish_longspec(root / "longspec", load_target(target, torch.float32), target)
    authors.publish_tokenswift(root / "tokenswift", target)
    convert(root / "longspec", root / "block", str(target))
    convert(root / "tokenswift", root / "heads")
    draw = random.Random(1)
    long = [" ".join(draw.choices(WORDS, k=1100)) for _ in range(2)]
    data = root / "data"
    data.mkdir()
    for task in LONGBENCH:
        rows = [{"context": text, "input": "What did the cat do?", "_id": f"{task}-{i}"} for i, text in enumerate(long)]
        (data / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:1]))
    (data / "pg19-test.json").write_text(json.dumps({"text": "front matter" * 500 + long[0]}) + "\n")
    asked = ("writing", "translation", "summarization", "qa", "math_reasoning", "rag")
    rows = [{"question_id": i, "category": one, "turns": [long[0][:60]]} for i, one in enumerate(asked)]
    (data / "question.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def run(capsys, *words, status=0) -> tuple[str, str]:
    assert cli.run("bench", [str(word) for word in words]) == status
    shown = capsys.readouterr()
    return shown.out, shown.err


def test_longspec_s_table_to_its_end(folder, capsys):
    """A block of random weights in the authors' layout: every task is asked, and the text is exact."""
    asked = ["--paper", "longspec", "--draft", folder / "block", "--data", folder / "data", "--new-tokens", 12]
    shown, said = run(capsys, *asked)
    result = json.loads(shown.splitlines()[-1])
    assert result["exact"] is True and "warning" not in said
    assert result["dtype"] == "float16" and result["settings"]["nodes"] is None
    assert result["settings"]["ignore_eos"] is False
    found = result["paper"]
    assert "A100" in found["hardware"] and found["where"].startswith("LongSpec")
    tasks = result["runs"][0]["drafters"]["longspec"]["tasks"]
    assert {row["task"] for row in found["rows"]} == set(LONGBENCH) == set(tasks)
    assert len(found["rows"]) == 25
    for row in found["rows"]:
        assert row["ours"]["length"] == tasks[row["task"]]["lengths"]["tau"]
    assert {row["paper"]["length"] for row in found["rows"] if row["paper_target"] == "LongChat-7B"} == {
        3.59, 3.06, 3.41, 4.21, 4.03,
    }  # fmt: skip
    assert "beside LongSpec (arXiv 2502.17421)" in shown and "one A100 80GB" in shown


@pytest.mark.parametrize(
    ("paper", "draft", "words", "rows"),
    [
        ("tokenswift", "heads", ["--prompt-tokens", 64], 0),
        ("triforce", None, ["--prompt-tokens", 64, "--option", "budget=48"], 1),
        ("token-recycling", None, [], 21),
    ],
)
def test_the_other_papers(folder, capsys, paper, draft, words, rows):
    model = ["--draft", folder / draft] if draft else ["--target", folder / "target"]
    asked = ["--paper", paper, *model, "--data", folder / "data", "--new-tokens", 20, "--dtype", "fp32", *words]
    shown, _ = run(capsys, *asked)
    result = json.loads(shown.splitlines()[-1])
    settings, found = result["settings"], result["paper"]
    assert result["exact"] is True and len(found["rows"]) == rows and "A100" in shown
    drafted = result["runs"][0]["drafters"][PAPERS[paper].drafter]
    assert drafted["same_tokens"][0] == drafted["same_tokens"][1] > 0
    if paper == "tokenswift":  # Table 10, without the bans of another vocabulary; no length of table 3 was reached
        assert result["runs"][0]["temperature"] == 1
        assert settings["sampling"] == {
            "contextual_window": 1024, "min_tokens_to_keep": 20, "min_p": 0.1, "contextual_penalty": 1.2,
        }  # fmt: skip
        assert settings["ignore_eos"] is True and "no task or length of this table was measured" in shown
    elif paper == "triforce":
        assert found["rows"][0]["ours"]["length"] == drafted["acceptance"]
    else:
        whole = [row for row in found["rows"] if row["task"] == ""]
        assert [row["paper"]["length"] for row in whole] == [2.70, 2.72, 2.63]
        assert whole[0]["ours"]["length"] == drafted["lengths"]["per_step"]


def answered(drafter: str, lengths: list[int], step: float) -> Entry:
    arrivals = [60 + step * i for i in range(1, len(lengths) + 1)]  # 58 of them for recording
    answer = Answer(
        9, list(range(sum(lengths))), None, "length", lengths, arrivals, 4 * len(lengths),
        prefill_seconds=2.0, decode_seconds=step * len(lengths),
    )  # fmt: skip
    return Entry(0, "pg19", "", drafter, 1.0, [answer])


def test_tokenswift_s_figures_by_hand():
    """alpha and speed of the first 20480 tokens: steps bring five tokens and one in turn, at twice the cost."""
    record = Record({})
    for entry in (answered("plain", [1] * 30000, 0.1), answered("tokenswift", [5, 1] * 5000, 0.2)):
        record.add("entry", entry)
    found = beside(PAPERS["tokenswift"], record, ["tokenswift"], [1.0])
    (row,) = (row for row in found["rows"] if row["paper_target"] == "Llama-3.1-8B")
    assert row["task"] == "pg19, 20480 tokens"
    assert row["paper"] == {"length": 0.66, "speedup": 2.01}
    assert row["ours"]["length"] == pytest.approx(0.5, abs=1e-3)  # 4 of 8 in two steps
    assert row["ours"]["speedup"] == pytest.approx(3 / 2, abs=1e-3)  # 3 tokens in 0.2 s, and 2 plainly
    assert any("Llama-3.1-8B" in line and "0.50" in line for line in table(found))


def test_what_a_paper_does_not_have_is_refused(folder, capsys):
    asked = ["--draft", folder / "block", "--data", folder / "data"]
    for words, message in (
        (["--paper", "longspec", "--suite", "pg19"], "--suite: pg19 is none of LongSpec"),
        (["--paper", "longspec", "--prompt-tokens", 9], "--prompt-tokens: 9, but longbench does not shorten its"),
    ):
        assert message in run(capsys, *asked, *words, status=2)[1]


def test_every_suite_of_a_paper_is_there():
    assert all(name in SUITES for paper in PAPERS.values() for name in paper.suites)
