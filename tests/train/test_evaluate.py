"""Decoding while training: its numbers are those of a plain Engine, and the best weights are kept."""

import shutil
from itertools import count, product
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from longdraft.data_prep.shards import Row, ShardSet
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.train import checkpoint
from longdraft.train.config_file import load_config
from longdraft.train.evaluate import Evaluator, beginnings, held_out_prompts
from longdraft.train.export import export
from longdraft.train.loop import train
from longdraft.train.tracking import read_metrics

SEQ_LEN, CONTEXTS, TEMPERATURES, PROMPTS, NEW_TOKENS = 24, (8, 30), (0.0, 1.0), 2, 16
DECODING = [
    "decoding.every=4", f"decoding.prompts={PROMPTS}", "decoding.contexts=[8, 30]", "decoding.temperatures=[0, 1]",
    f"decoding.new_tokens={NEW_TOKENS}",
]  # fmt: skip
RUN = ["train.steps=8", "train.save_every=4", "optimizer.warmup_steps=1", "optimizer.peak_lr=0.05"]
METHODS = {
    "tokenswift": (["draft.method=tokenswift", "draft.out_norm_init=target"], {"draft_pass": "never", "ngrams": 0}),
    "medusa": (["draft.method=medusa", "draft.n_heads=2"], {}),
    "longspec": (["draft.method=longspec", "draft.window=6", "draft.noise=3", "draft.draft_vocab_size=60"], {}),
}
TREES = {
    "tokenswift": {"shape": (3, 3, 3)},
    "medusa": {"shape": (3, 3)},
    "longspec": {"widths": (8, 16, 16), "extended": 16},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, target, prepare) -> Path:
    """Text that the target wrote, so that drafts have something to learn. Held-out documents: a of 60 tokens in three
    rows, b of 36 in two, c of 10, d of 14, and e, whose beginning is missing."""
    folder = tmp_path_factory.mktemp("decoding")
    starts = [[i] for i in range(46)]
    params = [SamplingParams(1.0, seed=i, max_new_tokens=60, ignore_eos=True) for i in range(46)]
    texts = [np.array([*g.prompt, *g.tokens], np.int32) for g in Engine(target).generate(starts, params)]
    rows = [Row(t[:SEQ_LEN], [0, SEQ_LEN], [1, SEQ_LEN], [f"t{i}"], [0]) for i, t in enumerate(texts[:41])]
    prepare(folder / "train", SEQ_LEN, rows)
    lengths = {"a": 60, "b": 36, "c": 10, "d": 14, "e": 48}
    pieces = {
        (name, number): text[:length][number * SEQ_LEN : (number + 1) * SEQ_LEN]
        for (name, length), text in zip(lengths.items(), texts[41:], strict=True)
        for number in range(-(-length // SEQ_LEN))
    }
    packed = [[("a", 0)], [("a", 2), ("b", 1)], [("b", 0)], [("a", 1)], [("c", 0), ("d", 0)], [("e", 1)]]
    rows = []
    for row in packed:
        parts = [pieces[key] for key in row]
        borders = np.cumsum([0, *map(len, parts)]).tolist()
        tokens = np.concatenate(parts)
        rows.append(Row(tokens, borders, [0, len(tokens)], [name for name, _ in row], [number for _, number in row]))
    prepare(folder / "heldout", SEQ_LEN, rows)
    return folder


@pytest.fixture(scope="module")
def documents(folder):
    """Tokens of the held-out documents by name."""
    rows = ShardSet(folder / "heldout")
    found = {}
    for i in range(len(rows)):
        row = rows[i]
        for place, key in enumerate(rows.pieces(i)):
            found[key] = row["tokens"][row["borders"][place] : row["borders"][place + 1]].tolist()
    return {name: [token for key in sorted(found) if key[0] == name for token in found[key]] for name in "abcde"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, config_file, folder, target, alone):
    """(method, *overrides) -> the folder of a finished run of 8 steps, with decoding after the fourth and the last
    step, or without for the method "plain". Each is trained once."""
    runs = tmp_path_factory.mktemp("runs")
    done = {}

    def get(method, *overrides):
        key = (method, *overrides)
        if key not in done:
            decoding = [] if "plain" in overrides else DECODING
            extra = [one for one in overrides if one != "plain"]
            place = [f"data.path={folder}", f"train.run_dir={runs / str(len(done))}"]
            config = load_config(config_file, [*METHODS[method][0], *RUN, *decoding, *place, *extra])
            assert train(config, alone, target)
            done[key] = runs / str(len(done))
        return done[key]

    return get


def measured(run, step):
    """What the run recorded about its decoding after a step."""
    (record,) = [r for r in read_metrics(run) if r["step"] == step and "decode_tokens_per_step" in r]
    return {key: value for key, value in record.items() if key.startswith(("decode_tokens", "decode_acceptance"))}


def direct(target, method, draft, prompts):
    """The same from a plain loop over the prompts."""
    engine = Engine(target, method, draft, nodes=None, slots=1, options=METHODS[method][1] | TREES[method])
    record = {}
    for context, temperature in product(prompts, TEMPERATURES):
        done = [
            engine.generate([p], SamplingParams(temperature, seed=i, max_new_tokens=NEW_TOKENS, ignore_eos=True))[0]
            for i, p in enumerate(prompts[context])
        ]
        steps = sum(g.stats.steps for g in done)
        name = f"ctx{context}.T{temperature:g}"
        record[f"decode_tokens_per_step/{name}"] = sum(len(g.tokens) for g in done) / steps
        for depth in range(engine.drafter.max_depth):
            hits = sum(sum(g.stats.accepted_at_depth[depth : depth + 1]) for g in done)
            record[f"decode_acceptance/{name}.depth{depth + 1}"] = hits / steps
    means = [value for key, value in record.items() if key.startswith("decode_tokens_per_step/")]
    return record | {"decode_tokens_per_step": sum(means) / len(means)}


def prompts_of(folder):
    rows = ShardSet(folder / "heldout")
    return {context: held_out_prompts(rows, beginnings(rows), context, PROMPTS) for context in CONTEXTS}


def folder_of(run, step):
    return checkpoint.checkpoint_folder(run) / f"step_{step:06d}"


@pytest.mark.parametrize("method", METHODS)
def test_the_numbers_are_a_direct_engines(trained, folder, target, tmp_path, method):
    """With the weights that were saved after that step, exported."""
    run = trained(method)
    halfway = shutil.copytree(run, tmp_path / "halfway")
    shutil.rmtree(folder_of(halfway, 8))
    for step, of in ((4, halfway), (8, run)):
        assert measured(run, step) == direct(
            target, method, export(of, tmp_path / str(step), target), prompts_of(folder)
        )
    assert measured(run, 4) != measured(run, 8), "the test would not see old weights"


def test_training_is_as_without(trained):
    decoded, plain = trained("longspec"), trained("longspec", "plain")
    for step in (4, 8):
        weights = [(folder_of(run, step) / checkpoint.WEIGHTS).read_bytes() for run in (decoded, plain)]
        assert weights[0] == weights[1]
    assert not checkpoint.best_folder(plain).exists() and not (plain / "curves.png").exists()
    assert (decoded / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_two_ranks_give_what_one_gives(folder, target, config_file, start_ranks, finish_ranks, tmp_path):
    """The prompts are divided among them: with a whole target each, and with a sharded one that needs both ranks for
    every pass, though they make different numbers of passes."""
    short = ["train.steps=2", "decoding.every=2"]
    shared = ["target.zero_stage=3", "train.sequence_parallel=2", "train.zero_stage=3"]
    runs = {"tokenswift": [], "longspec": shared}
    shared = [*RUN, *DECODING, f"data.path={folder}", *short]
    actions = [
        {"train": [*METHODS[method][0], *shared, f"train.run_dir={tmp_path / method}", *extra]}
        for method, extra in runs.items()
    ]
    finish_ranks(start_ranks(2, actions))
    for method in runs:
        draft = export(tmp_path / method, tmp_path / f"{method}-draft", target)
        assert measured(tmp_path / method, 2) == direct(target, method, draft, prompts_of(folder))


class Weights:
    """The part of the engine that `Evaluator` uses: it returns the weights of a checkpoint."""

    def __init__(self, folder):
        self.folder = folder

    def weights(self):
        return load_file(self.folder / checkpoint.WEIGHTS)


@pytest.fixture
def evaluator(config_file, folder, target, alone, tmp_path):
    """(*overrides) -> an Evaluator of a TokenSwift run of 20 steps in tmp_path."""

    def make(*overrides):
        place = [f"data.path={folder}", f"train.run_dir={tmp_path}"]
        config = load_config(config_file, [*METHODS["tokenswift"][0], *DECODING, *place, *overrides])
        return Evaluator(config, target, ShardSet(folder / "heldout"), alone)

    return make


def test_the_best_is_kept_and_ties_keep_the_earlier(evaluator, trained, tmp_path):
    run = trained("tokenswift")
    good, poor = (Weights(folder_of(run, step)) for step in (8, 4))
    scores = [measured(run, step)["decode_tokens_per_step"] for step in (8, 4)]
    assert scores[0] > scores[1]
    one = evaluator()
    for step, engine, best in ((4, poor, 4), (8, good, 8), (12, poor, 8), (16, good, 8)):
        one = evaluator() if step == 12 else one  # another process
        assert one.after_step(engine, step, {"of": step})
        kept, saved = checkpoint.best(tmp_path) or (None, {})
        assert kept == tmp_path / "best" / f"step_{best:06d}" and saved["step"] == best
        assert saved["extra"]["heldout"] == {"of": best} and saved["score"] == scores[0 if best == 8 else 1]
        same = poor if best == 4 else good
        assert (kept / checkpoint.WEIGHTS).read_bytes() == (same.folder / checkpoint.WEIGHTS).read_bytes()
        assert [path.name for path in kept.parent.iterdir()] == [kept.name]


def with_best_score(whole, run):
    """A copy of a run whose best weights have a score that no others reach."""
    shutil.copytree(whole, run)
    (state,) = checkpoint.best_folder(run).glob(f"*/{checkpoint.STATE}")
    content = checkpoint.unseal(state.read_bytes())
    state.write_text(checkpoint.seal(content | {"score": 99.0}))
    return run, load_config(run / "config.yaml", [f"train.run_dir={run}", "train.keep_checkpoints=1"])


def test_what_a_run_without_checkpoint_left_is_no_best(trained, alone, target, tmp_path):
    run, config = with_best_score(trained("tokenswift"), tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    assert train(config, alone, target)
    _, saved = checkpoint.best(run) or (None, {})
    assert saved["score"] == max(measured(run, step)["decode_tokens_per_step"] for step in (4, 8))


def test_a_resumed_run_keeps_the_best_and_rotation_leaves_it(trained, alone, target, tmp_path):
    whole = trained("longspec")
    run, config = with_best_score(whole, tmp_path / "run")
    best = {path: path.read_bytes() for path in checkpoint.best_folder(run).rglob("*") if path.is_file()}
    shutil.rmtree(folder_of(run, 8))
    assert train(config, alone, target)
    assert not folder_of(run, 4).exists()
    assert {path: path.read_bytes() for path in checkpoint.best_folder(run).rglob("*") if path.is_file()} == best
    assert measured(run, 8) == measured(whole, 8)
    weights = [(folder_of(of, 8) / checkpoint.WEIGHTS).read_bytes() for of in (run, whole)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("decoding", [1, 2])
def test_a_decoding_that_was_stopped_is_made_up_for(trained, alone, target, tmp_path, monkeypatch, decoding):
    """The second one is the run's last act."""
    whole, stop, calls, after_step = trained("tokenswift"), list[int](), count(1), Evaluator.after_step

    def stopped(*arguments):
        if next(calls) == decoding:
            stop.append(15)
        return after_step(*arguments)

    config = load_config(whole / "config.yaml", [f"train.run_dir={tmp_path}"])
    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "after_step", stopped)
        assert not train(config, alone, target, stop)
    assert train(config, alone, target)
    assert [measured(tmp_path, step) for step in (4, 8)] == [measured(whole, step) for step in (4, 8)]
    validated, expected = ({r["step"] for r in read_metrics(run) if "heldout_loss" in r} for run in (tmp_path, whole))
    assert validated == expected
    kept, expected = (checkpoint.best(run) for run in (tmp_path, whole))
    assert kept and expected and kept[1]["step"] == expected[1]["step"]
    assert kept[1]["extra"] == expected[1]["extra"]
    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "after_step", None)  # once is enough
        assert train(config, alone, target)


def test_prompts_are_beginnings_evenly_spread(folder, documents):
    rows = ShardSet(folder / "heldout")
    a, b, d = (documents[name] for name in "abd")

    def prompts(context, n):
        return held_out_prompts(rows, beginnings(rows), context, n)

    assert prompts(60, 1) == [a] and prompts(30, 2) == [a[:30], b[:30]]
    assert prompts(8, 2) == [a[:8], documents["c"][:8]] and prompts(14, 3) == [a[:14], b[:14], d[:14]]
    for context, n in ((61, 1), (30, 3)):
        with pytest.raises(ValueError, match=rf"^decoding\.contexts: .* {context} tokens: \d+, but"):
            prompts(context, n)


def test_prompts_must_fit_the_targets_positions(evaluator):
    with pytest.raises(ValueError, match=r"^decoding\.contexts: 30; .* most 29"):
        evaluator("decoding.new_tokens=2019")
