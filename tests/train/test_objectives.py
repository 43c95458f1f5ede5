"""Training for the target's own distribution: which positions teach which label, the whole loss of every method against
full logits, and that ranks, passes and resuming change nothing."""

from itertools import pairwise

import pytest
import torch

from longdraft.models.passes import Pass
from longdraft.train.batches import EpochRow, read_batch
from longdraft.train.checkpoint import WEIGHTS, newest
from longdraft.train.config_file import load_config
from longdraft.train.methods.build import open_method
from longdraft.train.teacher import Teacher
from longdraft.train.tracking import read_metrics

OBJECTIVES = {
    "kl": ["train.loss=kl"],
    "mix": ["train.loss=mix", "train.text_weight=0.25"],
    "overlap": ["train.loss=overlap", "train.kl_steps=5"],
    "acceptance": ["train.loss=acceptance", "train.kl_steps=5"],
}
METHODS = ["tokenswift-anchored", "medusa", "longspec", "longspec-restricted"]


@pytest.fixture(scope="module")
def made(shared):
    """The builders of test_methods.py."""
    return shared("train/test_methods.py")


@pytest.fixture(scope="module")
def definition(shared):
    return shared("kernels/test_distillation.py").by_definition


def whole_logits(target, batch, method, micro_batch):
    """For each part: the draft's logits at its labels and the target's for the same tokens, [M, E] each, from separate
    passes over the pieces."""
    model, draft, head = target.model, method.draft, target.model.lm_head.weight
    ids = torch.arange(97) if getattr(draft, "token_ids", None) is None else draft.token_ids
    needs = {"logits", "last_kv", "pre_norm", "post_norm"}
    positions, seen = micro_batch.positions, []
    for start, stop in pairwise(batch.borders):
        own = positions[None, start:stop]
        seen.append(model(Pass(batch.tokens[None, start:stop], positions_BT=own, needs=needs)))
    logits = torch.cat([one.logits[0] for one in seen])
    if method.needs == {"last_kv"}:
        kv = (torch.cat([one.last_kv[i][0] for one in seen]) for i in range(2))
        embedded = model.embed_tokens(batch.tokens)
        states = [draft.states(embedded, positions, *kv, micro_batch.queries)] * len(micro_batch.parts)
    else:
        (field,) = method.needs
        states = draft.states(torch.cat([getattr(one, field)[0] for one in seen]))
    taught = []
    for i, part in enumerate(micro_batch.parts):
        at = part.rows + i + 1
        if method.needs == {"last_kv"}:
            at = part.rows if micro_batch.queries.rows is None else micro_batch.queries.rows[part.rows]
        taught.append((states[i][part.rows] @ head[ids].T, logits[at][:, ids]))
    return taught


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_loss_of_a_pass_is_that_of_full_logits(config_file, target, made, definition, name, objective):
    """On a packed row with unsupervised stretches, subsets of queries and a restricted vocabulary; KL comes first."""
    config = load_config(config_file, [*made.METHODS[name], *OBJECTIVES[objective]])
    ids = torch.arange(20, 80) if "restricted" in name else None
    method, teacher = open_method(config.draft, config.data, config.train, target.model, ids), Teacher(target.model)
    for parameter in method.draft.parameters():
        parameter.data.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(5))
    batch = read_batch(made.Rows([[*made.LENGTHS]]), [EpochRow(1, 0)])
    for step in (4, 5):
        chosen = config.train.distillation(step)
        assert chosen is not None and chosen[0] == ("kl" if objective == "mix" or step == 4 else objective)
        micro_batch = method.micro_batch(batch)
        assert sum(micro_batch.n_labels) > 50
        needs = method.needs | {"post_norm"}
        output = teacher.forward(batch.tokens, batch.borders, micro_batch.positions, needs)
        teaching = method.distillation(micro_batch, output.post_norm, chosen)
        inputs = method.inputs(micro_batch, output, teacher)
        loss = method.draft(inputs, micro_batch.parts, teacher.lm_head_VD, False, teaching)
        found = torch.autograd.grad(loss.sums.sum(), list(method.draft.parameters()))
        sums = []
        for part, (own, seen) in zip(micro_batch.parts, whole_logits(target, batch, method, micro_batch), strict=True):
            one = definition(chosen[0], own.double().softmax(1), seen.double().softmax(1)).sum()
            text = torch.nn.functional.cross_entropy(own.double(), part.labels, reduction="sum")
            sums.append(one * (1 - chosen[1]) + chosen[1] * text)
        expected = torch.autograd.grad(torch.stack(sums).sum(), list(method.draft.parameters()))
        torch.testing.assert_close(loss.sums.detach().double(), torch.stack(sums).detach(), rtol=1e-5, atol=1e-6)
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours - theirs).norm() <= 1e-4 * theirs.norm() + 1e-6


def test_levels_are_drawn_by_their_weights(config_file, target, made):
    """A function of seed and piece; a level of weight 0 is never drawn."""
    weights = [0.5, 0.0, 0.2, 0.3]
    overrides = [*made.METHODS["longspec"], f"train.level_weights={weights}"]
    config = load_config(config_file, overrides)
    method = open_method(config.draft, config.data, config.train, target.model)
    micro_batch = method.micro_batch(made.many(6000, 3))
    counts = [len(part.rows) / 2 for part in micro_batch.parts]
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - 6000 * weight) <= 4.5 * (6000 * weight) ** 0.5
    again = method.micro_batch(made.many(6000, 3))
    assert all(torch.equal(a.rows, b.rows) for a, b in zip(micro_batch.parts, again.parts, strict=True))


def test_a_run_over_the_change_of_its_loss_resumes_to_the_same_bytes(runs, losses):
    """Resumed at step 10 of 20; the loss changes from KL to the acceptance at step 12."""
    whole, again = runs / "acceptance", runs / "acceptance-again"
    found = [newest(run) for run in (whole, again)]
    assert all(one is not None and one[1]["step"] == 20 for one in found)
    assert (found[0][0] / WEIGHTS).read_bytes() == (found[1][0] / WEIGHTS).read_bytes()
    assert losses(whole) == losses(again)


@pytest.mark.parametrize("run", ["acceptance", "mix"])
def test_the_overlap_with_the_target_grows(runs, run):
    heldout = [r for r in read_metrics(runs / run) if "heldout_overlaps" in r]
    first, last = (sum(r["heldout_overlaps"]) for r in (heldout[0], heldout[-1]))
    assert len(heldout) > 1 and 0 < first < last < len(heldout[0]["heldout_overlaps"])
