"""A bench's record: every answer, through a kill at any place of it."""

import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from longdraft.benchmarks.drafters.answering import ask, of_transformers
from longdraft.benchmarks.drafters.bench import BenchSettings
from longdraft.benchmarks.drafters.questions import Question
from longdraft.benchmarks.drafters.record import Answer, Entry, Record, read_record, recorded
from longdraft.infer.sampling import SamplingParams
from longdraft.launch import arguments, cli
from longdraft.launch.bench import asked_for
from longdraft.launch.runtime import Drafting
from longdraft.models.hf import load_target, load_transformers

QUESTIONS = [
    {"question_id": 1, "category": "writing", "turns": ["the cat sat on the mat", "and the dog"]},
    {"question_id": 2, "category": "qa", "turns": ["the dog sat on the log"]},
    {"question_id": 3, "category": "rag", "turns": ["the cat sat on the log " * 4]},
]
TIMES = ("arrivals", "prefill_seconds", "first_token_seconds", "decode_seconds", "draft_seconds")
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
    assert cli.run("bench", [*command, "--out", str(folder), "--report", str(folder / "report.html")]) == 0
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
            assert len(turn.tokens) - turn.steps <= turn.drafted and (name != "plain" or turn.drafted == 0)
    assert "yes (96 tokens" in (whole / "report.html").read_text()
    assert (whole / "spec_bench").is_dir()
    first, second = record.entries[1, "plain", 0.0].turns
    assert second.prompt_tokens > first.prompt_tokens + len(first.tokens)


@pytest.fixture(scope="module")
def killed(command, tmp_path_factory) -> dict[int, Path]:
    """(parts) -> a record as a kill after so many parts leaves it; the last one is of a kill, the other a copy."""
    folder = tmp_path_factory.mktemp("killed")
    program = (
        "import os, shutil, sys\n"
        "from longdraft.benchmarks.drafters.record import Record\n"
        "from longdraft.launch import cli\n"
        "add, count = Record.add, []\n"
        "def counted(self, part, value):\n"
        "    add(self, part, value)\n"
        "    count.append(1)\n"
        f"    if len(count) == 6: shutil.copytree({str(folder / '17')!r}, {str(folder / '6')!r})\n"
        "    if len(count) == 17: os.kill(os.getpid(), 9)\n"
        "Record.add = counted\n"
        "cli.run('bench', sys.argv[1:])\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *command, "--out", folder / "17"], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    return {parts: folder / str(parts) for parts in (6, 17)}


@pytest.mark.parametrize("parts", [6, 17])
def test_a_killed_run_goes_on_to_the_same_record(whole, command, killed, parts):
    """What a drafter keeps from one answer to the next is there again."""
    folder = killed[parts]
    assert 0 < len(read_record(folder).entries) < len(read_record(whole).entries)
    assert cli.run("bench", [*command, "--out", str(folder)]) == 0
    assert without_times(folder) == without_times(whole)


@pytest.mark.parametrize("name", ["token_recycling", "prompt_lookup"])
def test_a_drafter_that_learns_from_its_answers_is_asked_all_of_them_again(tiny, name):
    target, asked, record = load_target(tiny), [Question(i, "t", ([i],)) for i in (1, 2, 3)], Record({})
    record.add("entry", Entry(2, "t", "t", name, 0.0, []))
    prompts = []
    answer = Mock(side_effect=lambda prompt, params: prompts.append(prompt) or Answer(1, [5], "", "length", [1], [0.1]))
    ask(target, {name: answer}, asked, SamplingParams(), record)
    learns = name == "token_recycling"
    assert prompts[1:] == ([[1], [2], [3]] if learns else [[1], [3]])  # after the warm-up
    assert len(record.entries[2, name, 0.0].turns) == learns
    ask(target, {name: Mock()}, asked, SamplingParams(), record)  # nothing is missing


def test_answers_without_a_text_are_given_one(tiny):
    """Those of transformers: Spec-Bench's program counts the tokens of its baseline's texts."""
    target, record = load_target(tiny), Record({})
    answer = Mock(return_value=Answer(1, [5, 6], None, "length", [1, 1], []))
    ask(target, {"transformers": answer}, [Question(1, "t", ([3],))], SamplingParams(), record)
    assert record.entries[1, "transformers", 0.0].turns[0].text == target.tokenizer.decode([5, 6])


def test_a_record_knows_its_texts_and_its_checkpoint(tiny, tmp_path):
    def of(line: str = "", target: Path = tiny, draft: Path | None = None, **options) -> dict:
        drafter = "small_model" if options else "prompt_lookup"
        given = ["--text-file", "t", "--target", str(target), "--drafter", drafter, *line.split()]
        given += [f"--option={key}={value}" for key, value in options.items()]
        drafting = Drafting(arguments.bench().parse_args(given))
        drafting.args.draft = [] if draft is None else [str(draft)]
        return asked_for(drafting, BenchSettings(), [])

    found = [of(), of("--loader transformers")]
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


def test_a_record_is_kept_when_it_is_shown_again_and_refused_with_other_settings(
    whole, command, files_of, capsys, monkeypatch
):
    before = files_of(whole / "progress")
    monkeypatch.setenv("LONGDRAFT_COMMIT", "another")
    assert cli.run("bench", [*command, "--out", str(whole)]) == 0
    shown, machine = json.loads(capsys.readouterr().out.splitlines()[-1]), read_record(whole).machine
    assert (shown["commit"], shown["date"]) == (machine["commit"], machine["date"]) != ("another", shown["date"])
    assert cli.run("bench", [*command, "--out", str(whole), "--seed", "1"]) == 2
    assert "settings.seed is 0 there and 1 here" in capsys.readouterr().err
    assert files_of(whole / "progress") == before


def test_nothing_of_transformers_own_generation_config_changes_the_tokens(tiny):
    model = load_transformers(str(tiny), torch.float32)
    answer, params = of_transformers(model, ()), SamplingParams(max_new_tokens=12, ignore_eos=True)
    before = answer(list(range(1, 9)), params).tokens
    model.generation_config.update(repetition_penalty=5.0, suppress_tokens=before)
    assert answer(list(range(1, 9)), params).tokens == before and len(before) == 12


def test_another_proof_than_the_records_is_refused(tiny, suite, tmp_path, capsys):
    command = f"--target {tiny} --suite spec-bench --data {suite} --drafter prompt_lookup --prompts 1 --new-tokens 4"
    command += f" --dtype bf16 --out {tmp_path / 'out'}"
    for form, status in (("serving", 0), ("fp32", 2)):
        assert cli.run("bench", [*command.split(), "--exactness", form]) == status
        assert ("proof is serving" in capsys.readouterr().err) == (status == 2)


def test_what_is_no_record_is_refused_and_left_as_it_is(tmp_path):
    busy = tmp_path / "busy"
    with recorded(busy, {}), pytest.raises(ValueError, match="another process"), recorded(busy, {}):
        pass
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "record.jsonl").write_text("{}")
    with pytest.raises(ValueError, match=r"record\.jsonl"), recorded(tmp_path / "mine", {}):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^out: .* is not a folder"), recorded(tmp_path / "file", {}):
        pass
    for folder in ("nowhere", "mine"):
        with pytest.raises(ValueError, match=folder):
            read_record(tmp_path / folder)


def test_a_damaged_part_is_made_again_and_a_wrong_one_named(tmp_path):
    entry = Entry(1, "t", "t", "d", 0.0, [])
    with recorded(tmp_path, {}) as record:
        record.add("entry", entry)
        record.add("entry", replace(entry, id=2))
    last = tmp_path / "progress" / "000001.json"
    last.write_bytes(last.read_bytes()[:20])
    with recorded(tmp_path, {}) as record:
        assert [one.id for one in record.entries.values()] == [1]
        record.add("entry", replace(entry, id=3))
        record.work.write("000009", {"entry": {"id": 4}})
    with pytest.raises(ValueError, match=r"entry\.task"):
        read_record(tmp_path)
