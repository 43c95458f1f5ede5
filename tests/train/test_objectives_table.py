"""The table of objectives: every training as the trainer alone makes it, its figures those of the runs' records."""

import pytest

from longdraft.benchmarks import objectives
from longdraft.train.tracking import read_metrics

FIELDS = ["train.steps=4", "optimizer.warmup_steps=1", "decoding.new_tokens=8"]
FIELDS += ["decoding.prompts=2", "decoding.contexts=[8]"]


def test_a_row_for_each_objective_and_a_stop_between_them_changes_nothing(config_file, tmp_path, no_launcher, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(config_file.read_text().replace("train: {", "train: {loss: overlap, kl_steps: 5, "))
    asked = [str(recipe), *FIELDS, "--out", str(tmp_path / "out"), "--losses", "cross_entropy", "overlap"]
    assert objectives.main(asked[:-1]) == 0
    assert objectives.main(asked) == 0
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    (_, _, alone), (head, _, text, overlap) = lines[:3], lines[3:]
    assert [line[0] for line in (head, text, overlap)] == ["| train.loss", "| cross_entropy", "| overlap"]
    assert text == alone and len(head) == len(text) == 8
    last = {key: value for record in read_metrics(tmp_path / "out" / "overlap") for key, value in record.items()}
    rates, overlaps = last["heldout_choice_rates"], last["heldout_overlaps"]
    shares = [100 * value for part in (0, -1) for value in (rates[part][0], overlaps[part])]
    decoded = [last[f"decode_tokens_per_step/ctx8.T{t}"] for t in (0, 1)]
    assert overlap[1:7] == [*(f"{share:.1f}" for share in shares), *(f"{tokens:.2f}" for tokens in decoded)]
    assert text[1:5] != overlap[1:5]


def test_steps_are_asked_for(config_file, tmp_path):
    with pytest.raises(ValueError, match=r"train\.steps: none, and these trainings are compared.*give a number"):
        objectives.main([str(config_file), "train.epochs=1", "--out", str(tmp_path)])
