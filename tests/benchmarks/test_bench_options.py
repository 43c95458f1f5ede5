"""What `longdraft bench` says about the options that it was given."""

import json

from longdraft.launch import cli


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
