"""Suites of prompts, read from small files in their published layouts."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longdraft.benchmarks.drafters.questions import AIME, LONGBENCH, SUITES, Question, Reader
from longdraft.models.hf import load_target


def lines(path: Path, *records: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def table(path: Path, *records: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(records)), path)
    return path


def chat(*texts: str) -> tuple:
    return tuple([{"role": "user", "content": text}] for text in texts)


def longbench(folder: Path, tasks=tuple(LONGBENCH)) -> Path:
    """As in LongBench's data.zip, in its folder `data`."""
    for task in tasks:
        record = {"input": "Who {context}?", "context": f"the {{cat}} of {task}", "answers": [], "length": 3}
        lines(folder / "data" / f"{task}.jsonl", record | {"dataset": task, "language": "en", "_id": f"{task}0"})
    lines(folder / "data" / "narrativeqa.jsonl", {"context": 7})
    return folder


def test_longbench_asks_what_longspecs_program_asks(tmp_path):
    suite = SUITES["longbench"]
    questions = {question.task: question for question in suite.questions(str(longbench(tmp_path)))}
    assert set(questions) == {"gov_report", "qmsum", "multi_news", "lcc", "repobench-p"}
    assert questions["qmsum"].turns[0] == (
        "<s>system\nYou are a helpful assistant</s>\n<s>user\nYou are given a meeting transcript and a query "
        "containing a question or instruction. Answer the query in one or more sentences.\n\nTranscript:\n"
        "the {cat} of qmsum\n\nNow, answer the query based on the above meeting transcript in one or more sentences."
        "\n\nQuery: Who {context}?</s>\n<s>assistant\nAnswer:"
    )
    assert questions["lcc"].turns[0].endswith("the {cat} of lccNow, complete the code given.</s>\n<s>assistant\n")
    assert questions["gov_report"].id == "gov_report0"
    assert (suite.new_tokens, suite.sampling, suite.ignore_eos) == (1024, {}, False)
    # 1200 < tokens <= positions - 2000
    sized = [Question(n, "t", ([1] * n,)) for n in (1200, 1201, 30768, 30769)]
    assert [one.id for one in suite.fitting(Reader("", None), sized, 32768, 1024)[0]] == [1201, 30768]
    assert [one.id for one in suite.fitting(Reader("", None), sized, 32768, 2000 + 1)[0]] == [1201]
    assert {q.task for q in suite.questions(str(tmp_path), ["lcc", "qmsum"])} == {"qmsum", "lcc"}


def test_a_missing_file_says_where_it_comes_from(tmp_path):
    with pytest.raises(ValueError, match="--only: qmsum"):
        SUITES["longbench"].questions(str(longbench(tmp_path, ("gov_report", "lcc"))), ["qmsum"])
    lines(tmp_path / "empty" / "README.txt")
    for suite in SUITES.values():
        for place in ("empty", "nowhere"):
            with pytest.raises(ValueError, match=f"--data: .*{re.escape(suite.source)}"):
                suite.questions(str(tmp_path / place))


def test_aime24_is_thirty_problems_of_the_set(tmp_path):
    rows = [{"id": i, "problem": f"Find {i}.", "solution": "", "answer": "1", "url": ""} for i in range(58, 92)]
    table(tmp_path / "data" / "train-00000-of-00001.parquet", *rows)
    questions = SUITES["aime24"].questions(str(tmp_path))
    assert [question.id for question in questions] == list(range(60, 90))
    assert questions[0].turns == (AIME.format("Find 60."),)
    assert AIME.format("x") == (
        "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n"
        "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    )


def test_pg19_is_ten_books_after_their_front_matter(tmp_path):
    books = [{"text": "f" * 5000 + f"book {i}"} for i in range(12)]
    for name, content in (("a", json.dumps(books)), ("b", "\n".join(map(json.dumps, books)))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pg19-test.json").write_text(content)
        questions = SUITES["pg19"].questions(str(tmp_path / name))
        assert [question.turns for question in questions] == [(f"book {i}",) for i in range(10)]
    suite = SUITES["pg19"]
    assert (suite.new_tokens, suite.ignore_eos, suite.first_tokens) == (102400, True, 4096)


def test_spec_bench_counts_mt_benchs_categories_together(tmp_path):
    lines(
        tmp_path / "question.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Shorter."], "reference": []},
        {"question_id": 161, "category": "translation", "turns": ["Translate."]},
    )
    assert SUITES["spec-bench"].questions(str(tmp_path)) == [
        Question(81, "mt_bench", chat("Write.", "Shorter."), "writing"),
        Question(161, "translation", chat("Translate."), "translation"),
    ]
    assert [q.id for q in SUITES["spec-bench"].questions(str(tmp_path), ["writing"])] == [81]


def test_mt_bench_reads_fastchats_file(tmp_path):
    lines(tmp_path / "question.jsonl", {"question_id": 81, "category": "math", "turns": ["1 + 1?", "And 3?"]})
    assert SUITES["mt-bench"].questions(str(tmp_path)) == [Question(81, "math", chat("1 + 1?", "And 3?"))]


def test_speed_bench_reads_messages_and_turns(tmp_path):
    system, ask, more = ({"role": role, "content": role} for role in ("system", "user", "user"))
    lines(
        tmp_path / "a" / "qualitative.jsonl",
        {"question_id": "f" * 32, "category": "coding", "messages": [system, ask, more]},
        {"question_id": "e" * 32, "category": "rag", "turns": ["user", "user"]},
    )
    first, second = SUITES["speed-bench"].questions(str(tmp_path / "a"))
    assert first == Question("f" * 32, "coding", ([system, ask], [more]), "qualitative/coding")
    assert second == Question("e" * 32, "rag", ([ask], [more]), "qualitative/rag")
    for subset in ("qualitative", "throughput_1k"):  # as prepare_data.py writes them
        row = {"question_id": subset, "category": "rag", "turns": ["user"]}
        table(tmp_path / "c" / subset / "test.parquet", row)
    (third,) = SUITES["speed-bench"].questions(str(tmp_path / "c"), ["throughput_1k"])
    assert third == Question("throughput_1k", "rag", ([ask],), "throughput_1k/rag")


def test_mrcr_reads_its_conversations(tmp_path):
    messages = [{"role": role, "content": f"{role} {i}"} for i, role in enumerate(("user", "assistant", "user"))]
    row = {"prompt": json.dumps(messages), "answer": "", "random_string_to_prepend": "x", "n_needles": 2}
    table(tmp_path / "2needle" / "2needle_0.parquet", row | {"desired_msg_index": 1, "n_chars": 30}, row)
    questions = SUITES["mrcr"].questions(str(tmp_path))
    assert questions == [Question(f"2needle_0-{i}", "2needle", (messages,)) for i in (1, 2)]


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ('{"question_id": 1, "category": "qa"}', "record 1, turns"),
        ('{"question_id": 1, "category": "qa", "turns": "x"}', "record 1, turns"),
        ('{"question_id": 1, "category": "qa", "turns": [""]}', "record 1, turns"),
        ('{"question_id": 1, "category": 2, "turns": ["x"]}', "record 1, category"),
        ('{"question_id": null, "category": "qa", "turns": ["x"]}', "record 1, question_id"),
        ('\n{"question_id": 1,', "record 2 "),
        ("[1]", "record 1 "),
    ],
)
def test_a_wrong_layout_names_file_record_and_field(tmp_path, content, where):
    (tmp_path / "question.jsonl").write_text(content)
    with pytest.raises(ValueError, match=f"--data: .*question\\.jsonl, {where}") as error:
        SUITES["spec-bench"].questions(str(tmp_path))
    assert "\n" not in str(error.value)


def test_a_prompt_without_room_is_named_and_none_is_cut_but_where_the_suite_says_so(tiny):
    target = load_target(str(tiny))
    texts = {i: "the cat sat on the mat. " * i for i in (1, 4, 16)}
    questions = [Question(i, "t", (text,)) for i, text in texts.items()]
    tokens = [len(question.prompt(target)) for question in questions]
    suite = replace(SUITES["spec-bench"], above=tokens[0])
    asked, omitted = suite.fitting(target, questions, tokens[1] + 5, 5)
    assert asked == [questions[1]] and omitted == [f"1 ({tokens[0]} tokens)", f"16 ({tokens[2]} tokens)"]
    asked, omitted = replace(suite, first_tokens=10).fitting(target, questions, 30, 20)
    assert [one.id for one in asked] == [4, 16] and len(omitted) == 1
    assert [one.turns for one in asked] == [(one.prompt(target)[:10],) for one in questions[1:]]


def test_a_turn_stands_after_the_answers_before_it(tiny):
    target = load_target(str(tiny))
    question = Question(1, "t", chat("one", "two"))
    text = target.tokenizer.decode(question.prompt(target, ["first"]))
    assert text == "user: one\nassistant: first\nuser: two\nassistant: "
