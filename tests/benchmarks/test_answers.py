"""A bench's record: every answer, through a kill at any place of it."""

import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from longdraft.benchmarks.drafters.answering import TransformersAnswers
from longdraft.benchmarks.drafters.bench import BenchSettings
from longdraft.benchmarks.drafters.record import Entry, Record, read_record
from longdraft.infer.sampling import SamplingParams
from longdraft.launch import bench
from longdraft.launch.bench_request import asked_for
from longdraft.launch.runtime import Drafting
from longdraft.models.hf import load_transformers

QUESTIONS = [
    {"question_id": 1, "category": "writing", "turns": ["the cat sat on the mat", "and the dog"]},
    {"question_id": 2, "category": "qa", "turns": ["the dog sat on the log"]},
    {"question_id": 3, "category": "rag", "turns": ["the cat sat on the log " * 4]},
]
TIMES = ("arrivals", "decisions", "prefill_seconds", "first_token_seconds", "decode_seconds", "draft_seconds")
TIMES += ("target_seconds", "commit_seconds")


@pytest.fixture(scope="session")
def suite(tmp_path_factory) -> Path:
    """Spec-Bench's file."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "question.jsonl").write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    return folder


@pytest.fixture(scope="session")
def command(tiny, suite) -> list[str]:
    return (
        f"--target {tiny} --suite spec-bench --data {suite} --drafter token_recycling+prompt_lookup prompt_lookup "
        "--nodes 6 --new-tokens 12 --dtype fp32 --temperature 0 1"
    ).split()


def without_times(folder: Path) -> dict[tuple, Entry]:
    entries = read_record(folder).entries
    none = dict.fromkeys(TIMES, 0)
    return {key: replace(e, turns=[replace(t, **none) for t in e.turns]) for key, e in entries.items()}


@pytest.fixture(scope="session")
def whole(command, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert bench.main([*command, "--out", str(folder), "--report", str(folder / "report.html")]) == 0
    return folder


def test_a_suite_is_asked_turn_by_turn_and_every_answer_recorded(whole, tiny):
    record = read_record(whole)
    assert record.proof["exact"] is True and record.machine["target"] == tiny.name
    drafters = ("plain", "token_recycling+prompt_lookup", "prompt_lookup")
    assert set(record.entries) == {(id, name, t) for id in (1, 2, 3) for name in drafters for t in (0.0, 1.0)}
    for (id, name, temperature), entry in record.entries.items():
        plain = record.entries[id, "plain", temperature]
        assert [turn.tokens for turn in entry.turns] == [turn.tokens for turn in plain.turns]
        assert len(entry.turns) == len(QUESTIONS[id - 1]["turns"])
        for turn in entry.turns:
            assert sum(turn.accept_lengths) == len(turn.tokens) <= 12 and len(turn.arrivals) == turn.steps
            assert turn.accepted <= turn.drafted and (name != "plain" or turn.drafted == 0)
    assert "Exact: yes" in (whole / "report.html").read_text()
    assert {"spec_bench", "vllm"} < {path.name for path in whole.iterdir()}
    first, second = record.entries[1, "plain", 0.0].turns
    assert second.prompt_tokens > first.prompt_tokens + len(first.tokens)


@pytest.mark.parametrize("lines", [6, 17])
def test_a_killed_run_goes_on_to_the_same_record(whole, command, tmp_path, lines):
    """Killed behind so many lines of its record, within another; what a drafter keeps from one answer to the next is
    there again."""
    program = (
        "import os, sys\n"
        "from longdraft.benchmarks.drafters.record import Record\n"
        "from longdraft.launch import bench\n"
        "append, count = Record._append, []\n"
        "def counted(self, line):\n"
        "    append(self, line)\n"
        "    count.append(1)\n"
        f"    if len(count) == {lines}: os.kill(os.getpid(), 9)\n"
        "Record._append = counted\n"
        "bench.main(sys.argv[1:])\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *command, "--out", str(tmp_path)], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    with (tmp_path / "record.jsonl").open("ab") as file:
        file.write((whole / "record.jsonl").read_bytes().splitlines()[-1][:40])
    assert 0 < len(read_record(tmp_path).entries) < len(read_record(whole).entries)
    assert bench.main([*command, "--out", str(tmp_path)]) == 0
    assert without_times(tmp_path) == without_times(whole)


def test_a_record_of_other_settings_is_refused_and_kept(whole, command, capsys):
    before = (whole / "record.jsonl").read_bytes()
    assert bench.main([*command, "--out", str(whole), "--seed", "1"]) == 2
    assert f"--out: {whole} was begun with seed 0, and this is 1; ask for the same" in capsys.readouterr().err
    assert (whole / "record.jsonl").read_bytes() == before


def test_a_record_knows_its_texts_and_its_checkpoint(tiny, tmp_path):
    def of(line: str = "", target: Path = tiny, draft: Path | None = None, **options) -> dict:
        given = ["--text-file", "t", "--target", str(target), "--drafter", "prompt_lookup", *line.split()]
        given += [f"--option={key}={value}" for key, value in options.items()]
        drafting = Drafting(bench._parser().parse_args(given))
        drafting.args.draft = [] if draft is None else [str(draft)]
        return asked_for(drafting, BenchSettings(), [])

    found = [of(), of("--tasks edit"), of("--prompt-tokens 9"), of("--loader transformers"), of("--gguf-file a.gguf")]
    assert all(one != other for i, one in enumerate(found) for other in found[:i])
    copy = shutil.copytree(tiny, tmp_path / tiny.name)
    assert of(target=copy) == found[0] and of("--loader longdraft") == found[0]
    weights, before = copy / "model.safetensors", of(draft=copy, small=copy)
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
    other = of(target=copy)
    assert {key for key, value in other.items() if found[0][key] != value} == {"checkpoint"}
    weights.write_bytes(content)
    (copy / "config.json").write_text((copy / "config.json").read_text() + " ")
    assert of(target=copy) != found[0] and of(target=Path("owner/name"))["checkpoint"] is None
    # A draft's config.json holds its tree.
    after = of(draft=copy, small=copy)
    assert {key for key, value in before.items() if after[key] != value} == {"draft", "small"}


def test_a_record_that_is_shown_again_keeps_its_machine(whole, command, capsys, monkeypatch):
    before = (whole / "record.jsonl").read_bytes()
    monkeypatch.setenv("LONGDRAFT_COMMIT", "another")
    assert bench.main([*command, "--out", str(whole)]) == 0
    shown, machine = json.loads(capsys.readouterr().out.splitlines()[-1]), read_record(whole).machine
    assert (whole / "record.jsonl").read_bytes() == before
    assert (shown["commit"], shown["date"]) == (machine["commit"], machine["date"]) != ("another", shown["date"])


def test_nothing_of_transformers_own_generation_config_changes_the_tokens(tiny):
    model = load_transformers(str(tiny), torch.float32)
    ask = TransformersAnswers(model, ()).generate
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    before = ask(list(range(1, 9)), params)
    model.generation_config.update(repetition_penalty=5.0, suppress_tokens=before)
    assert ask(list(range(1, 9)), params) == before


def test_a_better_proof_than_the_records_is_refused(tiny, suite, tmp_path, capsys):
    command = f"--target {tiny} --suite spec-bench --data {suite} --drafter prompt_lookup --prompts 1 --new-tokens 4"
    command += f" --dtype bf16 --out {tmp_path / 'out'}"
    for form, status in (("serving", 0), ("fp32", 2), ("layerwise", 2), ("serving", 0)):
        assert bench.main([*command.split(), "--exactness", form]) == status
        message = f"--exactness: {form}, but {tmp_path / 'out'} was begun with the proof serving; leave it out, or give"
        assert (message in capsys.readouterr().err) == (status == 2)


def test_two_processes_do_not_write_one_record(tmp_path):
    record = Record(tmp_path, {"seed": 0})
    with pytest.raises(ValueError, match=f"--out: another process writes to {tmp_path}"):
        Record(tmp_path, {"seed": 0})
    del record


def test_a_line_that_is_none_is_named(tmp_path):
    (tmp_path / "record.jsonl").write_text('{"format": "longdraft bench 1", "settings": {}}\n{"a"\n{}\n')
    for read in (read_record, lambda folder: Record(folder, {})):
        with pytest.raises(ValueError, match=r"record\.jsonl, line 2 is no JSON"):
            read(tmp_path)
    (tmp_path / "record.jsonl").write_text('{"a": 1}\n')
    for read in (read_record, lambda folder: Record(folder, {})):
        with pytest.raises(ValueError, match="record"):
            read(tmp_path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_record(tmp_path / "nowhere")


@pytest.mark.parametrize("content", ['{"mine": [1]}', '{"a": 1}\n{"mine": [1]}', '{"format": "longdraft bench 1", "se'])
def test_a_file_of_others_is_left_as_it_is(tmp_path, content):
    path = tmp_path / "record.jsonl"
    path.write_text(content)
    if "longdraft" in content:  # ours, killed at its first line
        assert Record(tmp_path, {}).folder == tmp_path and path.read_text() == HEAD
        return
    with pytest.raises(ValueError, match="is no record of `longdraft bench --out`"):
        Record(tmp_path, {})
    assert path.read_text() == content


HEAD = '{"format": "longdraft bench 1", "settings": {}}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]\n", "line 1 is no JSON object"),
        ("5\n", "line 1 is no JSON object"),
        ('{"format": "longdraft bench 1"}\n', "is no record of `longdraft bench --out`"),
        ('{"format": "longdraft bench 1", "settings": [1]}\n', "is no record of `longdraft bench --out`"),
        (HEAD + "7\n", "line 2 is no JSON object"),
        (HEAD + '{"proof": {}}\n{"a": 1}\n', "line 3 is no line of a record"),
        (HEAD + '{"id": 1, "turns": [5]}\n', "line 2 is no line of a record"),
    ],
)
def test_a_damaged_record_is_named(tmp_path, content, message):
    (tmp_path / "record.jsonl").write_text(content)
    for read in (read_record, lambda folder: Record(folder, {})):
        with pytest.raises(ValueError, match=rf"record\.jsonl,? {message}"):
            read(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--prompts 9", "--prompts: 9 must lie in 1..3"),
        ("--new-tokens 4000", "--suite: none of 3 questions fits (too long: "),
        ("--only sports", "--only: sports unknown; the data has mt_bench, qa, question, rag, writing"),
        ("--tasks edit", "--suite: spec-bench reads its prompts from --data"),
        ("--out /dev/null/x", "--out: /dev/null/x cannot be written"),
        ("--report r.html", "--report: r.html is made of a record; give --out too"),
        ("--report r.pdf --out x", "--report: r.pdf is neither a page nor a picture"),
    ],
)
def test_bad_input_is_named_before_anything_is_loaded(command, capsys, arguments, message):
    assert bench.main([*command, *arguments.split()]) == 2
    assert f"longdraft bench: error: {message}" in capsys.readouterr().err.splitlines()[-1]


def test_a_question_without_room_is_counted_and_named(tiny, tmp_path, capsys):
    long = {"question_id": "long", "category": "qa", "turns": ["the cat " * 3000]}
    (tmp_path / "question.jsonl").write_text("\n".join(map(json.dumps, [QUESTIONS[1], long])))
    out = tmp_path / "out"
    command = f"--target {tiny} --suite spec-bench --data {tmp_path} --new-tokens 4 --dtype fp32 --out {out}"
    assert bench.main(command.split()) == 0
    shown = capsys.readouterr()
    assert "1 of 2 questions are left out, too long: " in shown.err and ": long (" in shown.err
    assert [one["id"] for one in read_record(out).left_out] == ["long"]
    assert "1 of 2 questions left out: long (" in shown.out
