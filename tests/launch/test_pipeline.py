"""The main job by its commands, on a tiny real checkpoint, and their errors."""

import json
import shutil
from pathlib import Path
from runpy import run_path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from longdraft.benchmarks.drafters.exactness import NotExact
from longdraft.launch import arguments, bench, cli, prepare, quickstart, train

ROOT = Path(__file__).resolve().parents[2]

train_command = run_path(str(ROOT / "tests" / "train" / "conftest.py"))["train_command"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, shared, train_command) -> Path:
    """A tiny target in Hugging Face's form, text, a config, prepared data, a trained run and its export."""
    folder = tmp_path_factory.mktemp("pipeline")
    text = "the cat sat on the mat and the dog sat on the log. " * 400
    (folder / "text").mkdir()
    for i in range(12):
        (folder / "text" / f"{i}.txt").write_text(f"document {i}: " + text[i * 7 : i * 7 + 900])
    shared("tiny_checkpoint.py").save(folder / "target", text, 300)
    (folder / "config.yaml").write_text(
        f"target: {{path: {folder}/target}}\ndata: {{path: {folder}/data, seq_len: 64}}\n"
        f"train: {{run_dir: {folder}/run, steps: 4, global_batch: 2, micro_batch: 2, precision: fp32}}\n"
        "optimizer: {peak_lr: 1.0e-2, warmup_steps: 1}\nlog: {wandb: disabled}\nheldout: {every: 2, rows: 2}\n"
    )
    prepare.main(
        f"--source {folder}/text --target {folder}/target --out {folder}/data --seq-len 64 --heldout-share 0.3".split()
    )
    status, printed = train_command(folder / "config.yaml")
    assert status == 0, printed
    assert cli.main(["export", str(folder / "run")]) == 0
    return folder


def test_a_draft_that_names_no_target_asks_for_it(folder, capsys, tmp_path):
    """A draft converted from its authors' file lacks it. With --target both commands accept such a draft."""
    draft = tmp_path / "draft"
    shutil.copytree(folder / "run" / "draft", draft)
    content = json.loads((draft / "config.json").read_text())
    short = "--prompt the --max-new-tokens 6 --dtype fp32"
    common = f"--draft {draft} {short}"
    measured = f"--draft {draft} --data {folder}/data --prompts 1 --prompt-tokens 8 --new-tokens 4 --dtype fp32"
    for train_config in ({"target": {"path": 7}}, {"converted_from": "published.pth"}, {"target": None}):
        (draft / "config.json").write_text(json.dumps(content | {"train_config": train_config}))
        for command, line in (("generate", common), ("bench", measured)):
            assert cli.run(command, line.split()) == 2
            error = capsys.readouterr().err
            assert len(error.splitlines()) == 1 and "target" in error, error
    assert cli.run("generate", f"{common} --target {folder}/target".split()) == 0
    text = capsys.readouterr().out
    assert cli.run("generate", f"{short} --draft {folder}/run/draft".split()) == 0
    assert capsys.readouterr().out == text != ""
    assert cli.run("bench", f"{measured} --target {folder}/target".split()) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["exact"] is True


def test_a_target_of_other_weights_is_one_line_of_warning(folder, capsys, tmp_path):
    """A target with the configuration and tokenizer of the draft's: the text is exact nevertheless, sampled too."""
    shutil.copytree(folder / "target", tmp_path / "tuned")
    weights = load_file(tmp_path / "tuned" / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, tmp_path / "tuned" / "model.safetensors", metadata={"format": "pt"})
    common = f"--draft {folder}/run/draft --drafter plain tokenswift --prompt the --max-new-tokens 12 --dtype fp32 "
    common += "--temperature 1 --seed 7"
    for target, n_warnings in ((folder / "target", 0), (tmp_path / "tuned", 1)):
        assert cli.run("generate", f"{common} --target {target}".split()) == 0
        error = capsys.readouterr().err
        said = [line for line in error.splitlines() if "arning" in line or "load_draft" in line]
        assert len(said) == n_warnings and "Same tokens from plain, tokenswift (fp32): yes" in error
    assert said[0].startswith(f"warning: draft: {folder}/run/draft was trained with other weights than those of tuned")


def test_bench_writes_table_page_and_json(folder, capsys):
    arguments = (
        f"--draft {folder}/run/draft --data {folder}/data --prompts 3 --prompt-tokens 24 --new-tokens 16 --dtype bf16 "
        f"--drafter tokenswift token_recycling+prompt_lookup --option tokenswift.ngrams=4 --temperature 0 1 "
        f"--contexts 8 24 --transformers --out {folder}/bench --report {folder}/pages/report.html"
    )
    assert cli.run("bench", arguments.split()) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert result["exact"] is True and "exact: yes (96 tokens a drafter in fp32" in out
    assert [run["temperature"] for run in result["runs"]] == [0.0, 1.0]
    theirs = result["runs"][0]["drafters"].pop("transformers")
    assert theirs["tokens"] == 3 * 16 and theirs["same_tokens"][1] == 48 and theirs["tokens_per_second"] > 0
    for run in result["runs"]:
        assert list(run["drafters"]) == ["plain", "tokenswift", "token_recycling+prompt_lookup"]
        assert run["drafters"]["plain"]["tokens_per_step"] == run["drafters"]["plain"]["speedup"] == 1
        for one in run["drafters"].values():
            assert one["tokens"] == 3 * 16 and one["same_tokens"] == [48, 48]
            assert len(one["prompt_speedups"]) == 3
            parts = one["draft_ms"] + one["target_ms"] + one["commit_ms"]
            assert 0 < parts <= 1.01 * 1e3 * one["tokens_per_step"] / one["tokens_per_second"]
            assert 0 < one["host_share"] < 1
    assert set(result["width_curves_ms"]) == {"8", "24"}
    assert set(result["width_curves_ms"]["24"]) == {"1", "2", "3", "4", "6", "8", "12", "16", "24", "40", "64"}
    assert "Speed over plain decoding" in (folder / "pages" / "report.html").read_text()


BENCH = "--target {f}/target --data {f}/data --prompt-tokens 24 "


def status_of(command: str, arguments: str) -> int:
    """The exit status of a command, also where argparse ends the process."""
    try:
        return cli.run(command, arguments.split())
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ("--target {f}/target", "--text-file"),
        (BENCH + "--text-file {f}/text/0.txt", "--text-file"),
        ("--target {f}/target --text-file t --suite pg19", "--suite"),
        ("--target {f}/target --text-file t --paper longspec", "--paper"),
        ("--target {f}/target --text-file t --prompts 3", "--prompts"),
        (BENCH + "--only lcc", "--only"),
        (BENCH + "--draft {f}/run/draft --drafter prompt_lookup", "--draft"),
        (BENCH + "--prompt-tokens 1", "--prompt-tokens"),
        (BENCH + "--prompt-tokens 500", "--prompt-tokens: 500"),
        (BENCH + "--new-tokens 99999", "99999 new ones"),
        (BENCH + "--noise", "--noise"),
        (BENCH + "--report r.html", "--report"),
        ("--target {f}/target --text-file {f}/none", "--text-file: {f}/none"),
    ],
)
def test_bench_errors_name_the_field_before_anything_is_measured(folder, arguments, field, capsys):
    assert status_of("bench", arguments.format(f=folder)) == 2
    shown = capsys.readouterr()
    said = [line for line in shown.err.splitlines() if not line.startswith(("Loading", "usage", " "))]
    assert shown.out == "" and len(said) == 1, shown.err
    assert said[0].startswith("longdraft bench: error: ") and field.format(f=folder) in said[0]


def test_a_draft_that_is_not_exact_ends_with_1(folder, capsys, monkeypatch):
    monkeypatch.setattr(bench, "bench", Mock(side_effect=NotExact("exact: NO, a drafter's tokens differ")))
    assert cli.run("bench", (BENCH + "--prompts 1").format(f=folder).split()) == 1
    assert "longdraft bench: error: exact: NO" in capsys.readouterr().err.splitlines()[-1]


def test_options_of_train_may_stand_anywhere(monkeypatch, tmp_path):
    """`longdraft train` passes them on to the ranks' command, which reads them in the same way."""
    started, config = [], str(tmp_path / "c.yaml")
    stages = Mock()
    stages.return_value = [Mock(**{"config.train.device": "cpu"})]
    monkeypatch.setattr("longdraft.train.config_file.load_stages", stages)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("longdraft.train.launcher.launch_ranks", lambda *given: started.append(given) or 7)
    options = {"--stage": "long", "--num-gpus": "2", "--from-draft": "a/draft"}
    (stage, n_ranks, draft), overrides = options.items(), ("train.steps=3", "log.every=5")
    given = [config, *stage, overrides[0], *n_ranks, overrides[1], *draft]
    assert cli.run("train", given) == 7 and cli.run("train", [config]) == 7
    command = [train.__file__, config, *overrides, "--stage=long", "--from-draft=a/draft"]
    assert started == [(command, ["-1", "-1"]), ([train.__file__, config], ["-1"])]


def test_quickstart_goes_through_the_five_commands_and_stops_at_a_failure(monkeypatch, tmp_path, capsys):
    ran, failing = [], []

    def call(command):
        ran.append(list(command))
        return 3 if failing and failing[0] in command else 0

    monkeypatch.setattr(quickstart, "call", call)
    monkeypatch.setattr(quickstart, "ROOT", tmp_path)
    assert quickstart.main(["--steps", "5"]) == 0
    assert [command[0] for command in ran] == ["prepare", "train", "export", "generate", "bench"]
    assert ran[1][1:3] == ["--num-gpus", str(torch.cuda.device_count() or 2)] and "train.steps=5" in ran[1]
    out = capsys.readouterr().out
    assert [out.count(f"\n[{number}/5] ") for number in range(1, 6)] == [1] * 5
    ran.clear()
    failing.append("export")
    assert quickstart.main(["--steps", "5"]) == 3 and len(ran) == 3
    assert "Step 3 failed with status 3; `make quickstart` continues from here." in capsys.readouterr().err
    ran.clear()
    (tmp_path / "runs" / "quickstart-5").mkdir(parents=True)
    (tmp_path / "runs" / "quickstart-5" / "report.html").touch()
    assert quickstart.main(["--steps", "5"]) == 0 and ran == []
    assert "Done already: runs/quickstart-5/report.html" in capsys.readouterr().out


def test_quickstarts_commands_are_valid(monkeypatch):
    """Each script's parser accepts its command line in the quickstart."""
    from longdraft.train.config_file import load_config

    steps = [command for _, command in quickstart.commands("runs/x", 70)]
    assert steps[1][:2] == ["train", "--num-gpus"]
    config = load_config(ROOT / steps[1][3], steps[1][4:])
    assert (config.train.steps, config.train.run_dir, config.data.path) == (70, "runs/x", quickstart.DATA)
    assert load_config(ROOT / steps[1][3]).train.steps == 120  # as the README says
    assert arguments.generate().parse_args(steps[3][1:]).draft == ["runs/x/draft"]
    assert str(arguments.bench().parse_args(steps[4][1:]).report) == "runs/x/report.html"
