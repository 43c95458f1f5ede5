"""What `longdraft bench` says about the options that it was given."""

import json

import torch

from longdraft.launch import cli
from longdraft.models.draft_folder import DraftInfo, save_draft, target_entry
from longdraft.models.drafts.heads import TokenSwift, TokenSwiftConfig
from longdraft.models.hf import load_target


def test_bench_says_what_was_asked_for(tiny, text_file, capsys):
    """Exactness that was not looked at, half precision, penalties, end tokens."""
    asked = f"--target {tiny} --text-file {text_file} --prompt-tokens 24 --new-tokens 6 --drafter small_model "
    asked += f"--option small={tiny} --temperature 1 --seed 3 "
    more = "--exactness off --dtype fp16 --min-p 0.05 --contextual-penalty 1.2 --no-ignore-eos"
    assert cli.run("bench", (asked + more).split()) == 0
    shown = capsys.readouterr().out
    result = json.loads(shown.splitlines()[-1])
    assert result["exact"] is None and result["proof"]["form"] == "off" and result["dtype"] == "float16"
    assert "exact: not shown (--exactness off)" in shown
    assert "min_p 0.05, contextual_penalty 1.2, stop at end tokens" in shown
    assert cli.run("bench", (asked + "--contexts 9 100000 --exactness off").split()) == 2
    assert "contexts: 100000, but the target has" in capsys.readouterr().err
    assert cli.run("bench", (asked + f"--out {text_file}/x").split()) == 2
    assert f"{text_file}/x" in capsys.readouterr().err
    assert cli.run("bench", (asked + "--transformers --banned-token-ids 3").split()) == 2
    assert "--transformers: " in capsys.readouterr().err


def test_two_drafts_of_a_method_are_compared_in_one_run(tiny, text_file, tmp_path, capsys):
    target = load_target(tiny, torch.float32)
    folders = [tmp_path / "before" / "draft", tmp_path / "after" / "draft"]
    for seed, folder in enumerate(folders):
        config = target.model.config
        heads = TokenSwift(
            TokenSwiftConfig(config.hidden_size, config.rms_norm_eps), torch.Generator().manual_seed(seed)
        )
        save_draft(folder, heads, DraftInfo(target_entry(target), 24, {"levels": [3]}, {}, {}))
    asked = ["--target", str(tiny), "--text-file", str(text_file), "--prompt-tokens", "24", "--new-tokens", "6"]
    asked += ["--draft", *map(str, folders), "--out", str(tmp_path / "out"), "--report", str(tmp_path / "report.html")]
    assert cli.run("bench", asked) == 0
    names = [f"tokenswift@{folder}" for folder in folders]
    shown = capsys.readouterr().out
    assert ["greedy", "plain", *names] in [line.split() for line in shown.splitlines()]
    assert [one for one in json.loads(shown.splitlines()[-1])["runs"][0]["drafters"]] == ["plain", *names]
    assert all(name in (tmp_path / "report.html").read_text() for name in names)
