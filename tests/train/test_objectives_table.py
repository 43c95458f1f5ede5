"""The table of objectives: every training as the trainer alone makes it, its figures those of the runs' records, and
those of a draft folder are the same."""

import pytest

from longdraft.benchmarks import agreement, objectives
from longdraft.benchmarks.questions import Asked, Question
from longdraft.train.config import load_config
from longdraft.train.export import export
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
    draft = export(tmp_path / "out" / "overlap")
    assert agreement.main([str(config_file), *FIELDS, "--draft", str(draft), "--rows", "5", "--choices", "20"]) == 0
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| held out")]
    assert [line[1] for line in lines] == ["head1", "head2", "head3"]
    assert [line[2].split(" ±")[0] for line in lines] == [f"{100 * rate[0]:.1f}" for rate in rates]
    assert [line[4] for line in lines] == [f"{100 * value:.1f}" for value in overlaps]


def test_each_objective_on_each_data_and_all_of_them_on_the_same_prompts(
    config_file, tmp_path, no_launcher, capsys, monkeypatch
):
    """Prompts are tokens here, for the tiny target has no words; drafts, look-ups and both together decode for real."""
    folder = load_config(config_file).data.path
    prompts = [Asked(Question(f"code, 12, {n}", "code, 12", (list(range(n, n + 12)),)), 12) for n in range(2)]
    monkeypatch.setattr(objectives, "questions", lambda target, contexts, each: prompts[: len(contexts) * each])
    asked = [str(config_file), *FIELDS, "--out", str(tmp_path), "--losses", "cross_entropy", "kl", "--decode", "12"]
    assert objectives.main([*asked, "--data", f"text={folder}", f"own={folder}"]) == 0
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    names = [f"{loss}, {data}" for data in ("text", "own") for loss in ("cross_entropy", "kl")]
    assert [line[0].removeprefix("| ") for line in lines[2:6]] == names
    assert lines[2][1:7] == lines[4][1:7]  # the same rows, and nothing else of the time of a step
    both = [f"{name}{other}" for name in names for other in ("", ", prompt_lookup")]
    greedy, sampled = lines[6], lines[10]
    assert greedy[0] == "| greedy: text, tokens" and sampled[0] == "| T 1: text, tokens"
    assert [cell.removesuffix(" |") for cell in greedy[1:]] == ["prompt_lookup", "token_recycling", *both]
    figures = [float(cell.split("; ")[1].removesuffix(" |")) for cell in lines[8][1:]]
    assert len(figures) == 10 and all(tokens >= 1 for tokens in figures)


@pytest.mark.parametrize(
    "given, message",
    [
        (["own"], r"--data: own=; give a name and a folder that `longdraft prepare` made"),
        (["own=nowhere"], "--data: own=nowhere; give a name and a folder"),
        (["a={folder}", "a={folder}"], "--data: a=.* a=.*; give each a name of its own"),
    ],
)
def test_data_is_named_and_prepared(config_file, tmp_path, given, message):
    folder = load_config(config_file).data.path
    with pytest.raises(ValueError, match=message):
        asked = [one.format(folder=folder) for one in given]
        objectives.main([str(config_file), *FIELDS, "--out", str(tmp_path), "--data", *asked])


def test_steps_are_asked_for(config_file, tmp_path):
    with pytest.raises(ValueError, match=r"train\.steps: none, and these trainings are compared.*give a number"):
        objectives.main([str(config_file), "train.epochs=1", "--out", str(tmp_path)])
