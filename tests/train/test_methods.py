"""A pass of each method: its random draws, positions and labels; packed pieces behave as the pieces alone do; and the
evaluation on held-out rows equals a direct computation."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from longdraft.models.drafts.longspec import plan_queries
from longdraft.models.passes import Pass
from longdraft.train.batches import Batch, EpochRow, draws, piece_key, read_batch
from longdraft.train.config_file import load_config
from longdraft.train.deepspeed_engine import DraftEngine
from longdraft.train.methods.base import QUERY_BLOCK
from longdraft.train.methods.build import open_method
from longdraft.train.setup import Run
from longdraft.train.teacher import Teacher
from longdraft.train.validation import validate

# isort: split
from deepspeed.accelerator import get_accelerator  # after ours, which names it

BLOCK = ["draft.method=longspec", "draft.window=6", "draft.noise=4", "draft.final_norm=true"]
ANCHOR = ["data.positions=anchor_offset", "data.max_position=700", "data.sinks=2", "data.query_share=0.5"]
METHODS = {
    "tokenswift": [],
    "tokenswift-anchored": ANCHOR,
    "tokenswift-restricted": [*ANCHOR, "draft.draft_vocab_size=60"],
    "medusa": ["draft.method=medusa", "draft.init_std=0.1"],
    "longspec": BLOCK,
    "longspec-anchored": [*BLOCK, *ANCHOR],
    "longspec-restricted": [*BLOCK, *ANCHOR, "draft.draft_vocab_size=60"],
}
# Three blocks of queries, one, two.
LENGTHS = {"long": 300, "short": 9, "middle": 150}


class Rows:
    """Rows made of named pieces, each with its own tokens and with spans that the loss leaves out."""

    def __init__(self, packed, lengths=LENGTHS):
        self.packed, self.lengths = packed, lengths

    def __len__(self):
        return len(self.packed)

    def __getitem__(self, index):
        parts = [piece(name, self.lengths[name]) for name in self.packed[index]]
        tokens, loss = (np.concatenate(part) for part in zip(*parts, strict=True))
        borders = np.cumsum([0, *(len(tokens) for tokens, _ in parts)])
        return {"tokens": tokens, "borders": borders, "loss": loss}

    def pieces(self, index):
        return [(name, 3) for name in self.packed[index]]


def piece(name, length):
    generator = np.random.Philox(key=np.array([sum(name.encode()), 9], dtype=np.uint64))
    return (generator.random_raw(length) % 97).astype(np.int32), generator.random_raw(length) % 5 > 0


@pytest.fixture
def opened(config_file, target):
    """(overrides) -> the method, with weights drawn anew so that none is near zero."""

    def make(overrides):
        config = load_config(config_file, overrides)
        size, ids = config.draft.draft_vocab_size, torch.randperm(97, generator=torch.Generator().manual_seed(2))
        ids = None if size is None else ids[:size].sort().values
        method = open_method(config.draft, config.data, config.train, target.model, ids)
        generator = torch.Generator().manual_seed(5)
        for name, parameter in method.draft.named_parameters():
            parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
        return method

    return make


@pytest.mark.parametrize("name", ["tokenswift", "medusa", "longspec"])
def test_first_weights_are_drawn_from_the_seed(config_file, target, name):
    def weights(seed):
        config = load_config(config_file, [*(METHODS[name] or ["draft.init_std=0.1"]), f"train.seed={seed}"])
        draft = open_method(config.draft, config.data, config.train, target.model).draft
        return torch.cat([weight.flatten() for weight in draft.parameters()])

    assert torch.equal(weights(3), weights(3)) and not torch.equal(weights(3), weights(4))


def loss_and_gradients(method, target, batch):
    """The summed losses by part, the labels of each and how many of them rank first to third, and the gradients."""
    teacher, micro_batch = Teacher(target.model), method.micro_batch(batch)
    seen = teacher.forward(batch.tokens, batch.borders, micro_batch.positions, method.needs)
    loss = method.draft(method.inputs(micro_batch, seen, teacher), micro_batch.parts, teacher.lm_head_VD, True)
    counts = torch.cat([loss.n_labels[:, None], loss.top_k_counts], 1)
    return loss.sums.detach(), counts, torch.autograd.grad(loss.sums.sum(), list(method.draft.parameters()))


def total(results):
    sums, counts, gradients = zip(*results, strict=True)
    return sum(sums), sum(counts), [sum(each) for each in zip(*gradients, strict=True)]


@pytest.mark.parametrize("name", METHODS)
def test_a_packed_row_is_its_pieces_alone(opened, target, name):
    method, alone = opened(METHODS[name]), Rows([[name] for name in LENGTHS])
    sums, counts, gradients = total(
        loss_and_gradients(method, target, read_batch(alone, [EpochRow(1, i)])) for i in range(3)
    )
    assert int(counts[:, 0].sum()) > 100
    for packed in ([[*LENGTHS]], [["middle", "long"], ["short"]], [["short", "middle"], ["long"]]):
        rows = Rows(packed)
        got = loss_and_gradients(method, target, read_batch(rows, [EpochRow(1, i) for i in range(len(rows))]))
        assert torch.equal(got[1], counts)
        torch.testing.assert_close(got[0], sums, rtol=1e-6, atol=0)
        for (key, _), ours, theirs in zip(method.draft.named_parameters(), got[2], gradients, strict=True):
            assert (ours - theirs).norm() <= 1e-6 * theirs.norm(), key


def drawn(method, rows, places):
    """For each piece: its noise shift, the offset of its positions, and the blocks of queries that were chosen."""
    batch = read_batch(rows, places)
    micro_batch = method.micro_batch(batch)
    names = [name for place in places for name in rows.packed[place.row]]
    result = {}
    for name, (start, stop) in zip(names, pairwise(batch.borders), strict=True):
        shifts, chosen = set(), set()
        for shift, part in enumerate(micro_batch.parts, start=1):
            tokens = micro_batch.queries.rows[part.rows]
            tokens = tokens[(tokens >= start) & (tokens < stop)]
            if len(tokens):
                shifts.add(shift)
                chosen |= set(((tokens - start) // QUERY_BLOCK).tolist())
        positions = micro_batch.positions[start:stop]
        assert positions[:2].tolist() == [0, 1] and (positions[2:].diff() == 1).all()
        (shift,) = shifts
        result[name] = shift, int(positions[-1]) - (stop - start - 1), chosen
    return result


def test_what_is_drawn_belongs_to_the_piece(opened):
    method = opened(METHODS["longspec-anchored"])
    lengths = {f"{name}{i}": length for i in range(20) for name, length in LENGTHS.items()}
    names = list(lengths)
    packings = [[names], [[name] for name in reversed(names)], [names[i : i + 7] for i in range(0, 60, 7)]]
    found = []
    for packed in packings:
        rows = Rows(packed, lengths)
        found.append(drawn(method, rows, [EpochRow(0, i) for i in range(len(rows))]))
    assert found[0] == found[1] == found[2]
    assert {shift for shift, _, _ in found[0].values()} == {1, 2, 3, 4}
    assert all(0 <= offset <= 700 - lengths[name] for name, (_, offset, _) in found[0].items())
    n_chosen = {name: len(chosen) for name, (_, _, chosen) in found[0].items()}
    assert all(n == {"long": 2, "short": 1, "middle": 1}[name.rstrip("0123456789")] for name, n in n_chosen.items())
    again = drawn(method, Rows(packings[0], lengths), [EpochRow(1, 0)])
    for field in range(3):
        changed = [name for name in names if again[name][field] != found[0][name][field]]
        assert len(changed) > 15, f"another epoch draws field {field} anew"
    other = opened([*METHODS["longspec-anchored"], "train.seed=1"])
    assert drawn(other, Rows(packings[0], lengths), [EpochRow(0, 0)]) != found[0]


def many(n_pieces, length):
    """A batch of this many pieces, all supervised."""
    tokens = torch.arange(n_pieces * length) % 97
    keys = [piece_key(f"document {i}", 0, 0) for i in range(n_pieces)]
    return Batch(tokens, torch.ones(len(tokens), dtype=torch.bool), list(range(0, len(tokens) + 1, length)), keys)


def assert_uniform(values, among):
    """The counts lie within 4.5 standard deviations of equal ones."""
    counts, expected = Counter(values), len(values) / len(among)
    assert set(counts) == set(among)
    assert max(abs(count - expected) for count in counts.values()) < 4.5 * expected**0.5


def test_shifts_and_offsets_are_uniform(opened):
    """Shifts over 1..J, offsets over 0..max_position - length, both ends included."""
    short = ["data.positions=anchor_offset", "data.max_position=24", "data.sinks=1", "draft.noise=5"]
    method, batch = opened([*METHODS["longspec"], *short]), many(6000, 20)
    micro_batch = method.micro_batch(batch)
    shift_of = {int(row): shift for shift, part in enumerate(micro_batch.parts, start=1) for row in part.rows[::19]}
    shifts = [shift_of[start] for start in batch.borders[:-1]]
    assert_uniform(shifts, range(1, 6))
    offsets = micro_batch.positions.view(6000, 20)[:, -1] - 19
    assert_uniform(offsets.tolist(), range(5))
    assert_uniform(list(zip(shifts, offsets.tolist(), strict=True)), [(s, o) for s in range(1, 6) for o in range(5)])


def test_every_choice_of_blocks_is_as_likely(opened):
    n_pieces, length = 600, 3 * QUERY_BLOCK + 1
    micro_batch = opened(["data.query_share=0.5"]).micro_batch(many(n_pieces, length))
    piece_of, inside = micro_batch.parts[0].rows // length, micro_batch.parts[0].rows % length // QUERY_BLOCK
    chosen = torch.zeros(n_pieces, 4, dtype=torch.bool)
    chosen[piece_of, inside] = True
    # The last block is a single token, without a label: where it was chosen, only one other block shows.
    pairs = [tuple(blocks.nonzero()[:, 0].tolist()) for blocks in chosen]
    pairs = [pair if len(pair) == 2 else (*pair, 3) for pair in pairs]
    assert_uniform(pairs, [(a, b) for b in range(4) for a in range(b)])


def test_anchor_offset_by_hand(opened):
    """A piece of 6 tokens and two sinks: it draws 4894646611917071289, which is 9 modulo 20 - 6 + 1."""
    method = opened(
        ["data.positions=anchor_offset", "data.max_position=20", "data.sinks=2", "data.seq_len=20", "train.seed=7"]
    )
    key = piece_key("book", 2, 0)
    assert draws(7, key, 2)[1] == 4894646611917071289
    tokens = torch.arange(8)
    batch = Batch(tokens, tokens >= 0, [0, 6, 8], [key, key])
    positions = method.micro_batch(batch).positions
    assert positions.tolist() == [0, 1, 11, 12, 13, 14, 0, 1]  # as many sinks as tokens: nothing moves
    (heldout,) = method.eval_batches(batch)
    assert heldout.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]


@pytest.mark.parametrize("name", METHODS)
def test_labels_are_within_the_piece_supervised_and_known(opened, name):
    method = opened(METHODS[name])
    batch = read_batch(Rows([["middle", "short"], ["long"]]), [EpochRow(0, 0), EpochRow(0, 1)])
    heads = not name.startswith("longspec")
    known = getattr(method.draft, "token_ids", None)
    names = range(97) if known is None else known.tolist()
    for micro_batch in (method.micro_batch(batch), *method.eval_batches(batch)):
        n_labels = 0
        rows_of = None if heads or micro_batch.queries.rows is None else micro_batch.queries.rows
        for number, (rows, labels) in enumerate(micro_batch.parts):
            distance = number + 2 if heads else 1
            tokens = rows if rows_of is None else rows_of[rows]
            for token, label in zip(tokens.tolist(), labels.tolist(), strict=True):
                start, stop = next((a, b) for a, b in pairwise(batch.borders) if a <= token < b)
                assert start <= token and token + distance < stop and batch.supervised[token + distance]
                assert names[label] == batch.tokens[token + distance]
            n_labels += len(labels)
        assert n_labels == sum(micro_batch.n_labels) > 50
        without = micro_batch.without_labels()
        assert sum(without.n_labels) == 0 and len(without.parts) == len(micro_batch.parts)
    expected = [
        sum(
            bool(batch.supervised[t + distance]) and int(batch.tokens[t + distance]) in names
            for start, stop in pairwise(batch.borders)
            for t in range(start, stop - distance)
        )
        for distance in (range(2, 5) if heads else [1] * 4)
    ]
    # All of them, under every shift.
    assert [n for micro_batch in method.eval_batches(batch) for n in micro_batch.n_labels if n] == expected
    assert method.as_labels(torch.tensor(list(names))).tolist() == list(range(len(names)))
    if known is not None:
        outside = torch.tensor(sorted(set(range(97)) - set(names)))
        assert (method.as_labels(outside) == -1).all()


def test_parts_weigh_as_the_papers_say(opened):
    """Heads: the sum of their means. LongSpec: the mean of all labels. Nothing is divided by zero."""
    assert opened([]).loss_weights([4, 2, 0]) == [0.25, 0.5, 1]
    assert opened(BLOCK).loss_weights([6, 1, 0, 3]) == [0.1] * 4
    assert opened(BLOCK).loss_weights([0, 0, 0, 0]) == [1] * 4


def test_deepspeed_waits_for_the_device_nowhere(alone, config_file, monkeypatch):
    """Its own timer did, twice a pass from the third step on."""
    config, waits = load_config(config_file), list[object]()
    engine = DraftEngine(torch.nn.Linear(4, 4), alone, config.train, config.optimizer)
    monkeypatch.setattr(get_accelerator(), "synchronize", lambda *given: waits.append(given))
    for _ in range(4 * config.train.n_passes(1)):
        engine.backward(engine.deepspeed(torch.ones(2, 4)).sum(), torch.tensor(False))
    assert engine.optimizer_steps() == 4 and not waits
    engine.close()


EVALUATED = {
    "tokenswift": [],
    "medusa": METHODS["medusa"],
    "medusa-restricted": [*METHODS["medusa"], "draft.draft_vocab_size=30"],
    "longspec": BLOCK,
    "longspec-restricted": [*BLOCK, "draft.draft_vocab_size=30"],
}


@pytest.mark.parametrize("choices", [10_000, 24])
@pytest.mark.parametrize("name", EVALUATED)
def test_the_evaluation_is_a_direct_computation(alone, config_file, opened, target, name, choices):
    rows = Rows([["short", "middle"], ["short"], ["long"], ["long"], ["middle"], ["long"]])
    config = load_config(config_file, [*EVALUATED[name], "heldout.rows=4", f"heldout.choices={choices}"])
    method = opened(EVALUATED[name])
    engine, teacher = DraftEngine(method.draft, alone, config.train, config.optimizer), Teacher(target.model)
    found = validate(Run(config, alone, method, engine, teacher, rows, rows, None), rows)
    used = [0, 1, 3, 4]  # four of six, evenly
    per_row = [direct(method, target, read_batch(rows, [EpochRow(0, row)])) for row in used]
    n_ranked = None
    for part in range(len(method.part_names)):
        losses, ranks, chosen, overlaps = [], [], [], []
        for row in per_row:
            loss, rank, choice_rank, overlap = row[part]
            losses, ranks = losses + loss, ranks + rank
            step = max(1, len(loss) // -(-choices // 4))
            chosen += choice_rank[::step][: -(-choices // 4)]
            overlaps += overlap[::step][: -(-choices // 4)]
        assert found["part_loss"][part] == pytest.approx(np.mean(losses), rel=1e-5)
        assert found["overlaps"][part] == pytest.approx(np.mean(overlaps), rel=1e-5)
        for k in range(3):
            assert found["rank_rates"][part][k] == pytest.approx(np.mean(np.array(ranks) == k))
            assert found["choice_rates"][part][k] == pytest.approx(np.mean(np.array(chosen) == k))
        n_ranked = n_ranked or len(ranks)
    assert found["positions"] == n_ranked
    weighted = np.mean if name.startswith("longspec") else np.sum  # all levels have the same labels
    assert found["loss"] == pytest.approx(weighted(found["part_loss"]))
    assert 0 < np.max(found["rank_rates"]) < 1
    assert 0 < np.max(found["choice_rates"]) < 1 or choices < 100, "it would show nothing"


def direct(method, target, batch):
    """For each part and label: its cross-entropy, its rank, and the rank of the target's choice, 99 where the draft
    cannot propose it; and the sum of the smaller one of both probabilities of each token."""
    model, draft = target.model, method.draft
    head = model.lm_head.weight
    ids = getattr(draft, "token_ids", None)
    ids = torch.arange(97) if ids is None else ids
    parts = []
    for number in range(len(method.part_names)):
        result = [], [], [], []
        for start, stop in pairwise(batch.borders):
            tokens, supervised = batch.tokens[start:stop], batch.supervised[start:stop]
            seen = model(Pass(tokens[None], needs={"logits", "pre_norm", "post_norm", "last_kv"}))
            choice = seen.logits[0].argmax(-1)
            if method.needs == {"last_kv"}:
                keys_values = seen.last_kv[0][0], seen.last_kv[1][0]
                queries = plan_queries([0, len(tokens)], [number + 1], draft.config.window)
                states = draft.states(model.embed_tokens(tokens), torch.arange(len(tokens)), *keys_values, queries)
                distance = 1
            else:
                (field,) = method.needs
                states, distance = draft.states(getattr(seen, field)[0])[number], number + 2
            for t in range(len(tokens) - distance):
                label = int(tokens[t + distance])
                if not supervised[t + distance] or label not in ids.tolist():
                    continue
                logits = states[t].detach() @ head[ids].T
                order = ids[logits.argsort(descending=True)].tolist()
                at = ids.tolist().index(label)
                result[0].append(float(F.cross_entropy(logits[None], torch.tensor([at]))))
                result[1].append(order.index(label))
                wanted = int(choice[t + distance - 1])
                result[2].append(order.index(wanted) if wanted in order else 99)
                p = seen.logits[0, t + distance - 1].softmax(0)[ids]
                result[3].append(float(torch.minimum(p, logits.softmax(0)).sum()))
        parts.append(result)
    return parts
