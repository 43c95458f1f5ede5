"""From conversations in a file to training steps with the real small target: it learns from answers alone."""

import json
import random

import pytest
import torch

from longdraft.data_prep.prepare import prepare
from longdraft.data_prep.recipe import PrepareConfig, Source
from longdraft.data_prep.shards import ShardSet
from longdraft.models.fingerprint import tokenizer_hash
from longdraft.models.hf import load_target, load_tokenizer
from longdraft.train.batches import read_batch, step_rows
from longdraft.train.config_file import load_config
from longdraft.train.methods.build import open_method
from longdraft.train.teacher import Teacher

TARGET, SEQ_LEN = "smollm2-135m", 128
LONGSPEC = "method: longspec, window: 64, noise: 2, final_norm: true, warm_start: true"
TEXT = """
target: {{path: smollm2-135m}}
draft: {{{draft}}}
data: {{path: {folder}/data, seq_len: 128}}
train: {{run_dir: {folder}/run, steps: 10, global_batch: 1, micro_batch: 1, precision: fp32, save_every: 10}}
optimizer: {{peak_lr: 2e-3, warmup_steps: 2}}
heldout: {{every: 5, rows: 1, choices: 8}}
log: {{wandb: disabled}}
"""
THINGS = ["ship", "boat", "harbour", "whale", "lighthouse", "anchor", "sail", "captain"]
PLACES = ["in the north", "near the shore", "on an island", "under the bridge", "far out at sea"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """chats.jsonl, the rows prepared from it, and a config. Conversations have one or two turns and fit in a row."""
    folder, rng = tmp_path_factory.mktemp("chat"), random.Random(0)
    with (folder / "chats.jsonl").open("w") as file:
        for _ in range(60):
            messages = []
            for _ in range(rng.randint(1, 2)):
                thing, place, n = rng.choice(THINGS), rng.choice(PLACES), rng.randint(2, 9)
                answer = f"There are {n} of them {place}, and each {thing} there has a number from 1 to {n}."
                messages += [{"role": "user", "content": f"How many {thing}s are there {place}, more than {n - 1}?"}]
                messages += [{"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    tokenizer = load_tokenizer(TARGET)
    sources = {"chats": Source(path=str(folder / "chats.jsonl"), chat_field="messages")}
    prepare(
        PrepareConfig(sources=sources, out=folder / "data", seq_len=SEQ_LEN, heldout_share=0.1),
        tokenizer,
        tokenizer_hash(tokenizer),
    )
    return folder


@pytest.fixture(scope="module")
def target():
    return load_target(TARGET, torch.float32)


def by_headers(tokens_N, tokenizer):
    """bool [N]: the tokens from an assistant's header to the end of its turn, that end included, found from the tokens
    alone, without the spans that `prepare` wrote."""
    header = tokenizer("<|im_start|>assistant\n")["input_ids"]
    answers, inside = torch.zeros(len(tokens_N), dtype=torch.bool), False
    for i, token in enumerate(tokens_N.tolist()):
        answers[i] = inside
        inside = inside and token != tokenizer.eos_token_id
        inside = inside or tokens_N[max(0, i + 1 - len(header)) : i + 1].tolist() == header
    return answers


@pytest.mark.parametrize("draft", [LONGSPEC, "method: medusa"], ids=["longspec", "medusa"])
def test_labels_of_prompts_do_not_count_and_those_of_answers_do(folder, target, draft):
    """Labels are changed; the tokens that target and draft read are not."""
    (folder / "config.yaml").write_text(TEXT.format(folder=folder, draft=draft))
    config = load_config(folder / "config.yaml")
    rows, teacher = ShardSet(folder / "data" / "train"), Teacher(target.model)
    batch = read_batch(rows, step_rows(config.train.seed, 0, len(rows), 2))
    answers_N = by_headers(batch.tokens, target.tokenizer)
    assert torch.equal(batch.supervised, answers_N) and 0.2 < answers_N.float().mean() < 0.7
    method = open_method(config.draft, config.data, config.train, target.model)
    seen = teacher.forward(batch.tokens, batch.borders, None, method.needs)
    others_N = (batch.tokens + 1000) % target.model.config.vocab_size

    def learn(changed_N):
        """The step's loss and its gradient, with other labels at these tokens."""
        changed = batch._replace(tokens=torch.where(changed_N, others_N, batch.tokens))
        micro_batch = method.micro_batch(changed)._replace(batch=batch)
        loss = method.draft(method.inputs(micro_batch, seen, teacher), micro_batch.parts, teacher.lm_head_VD, False)
        total = (loss.sums * torch.tensor(method.loss_weights(micro_batch.n_labels))).sum()
        gradients = torch.autograd.grad(total, list(method.draft.parameters()), allow_unused=True)
        return total.detach(), gradients

    loss, gradients = learn(torch.zeros_like(answers_N))
    assert loss.isfinite() and any(gradient is not None and gradient.any() for gradient in gradients)
    for_prompts, same = learn(~answers_N)
    assert torch.equal(for_prompts, loss)
    assert all(a is b or torch.equal(a, b) for a, b in zip(same, gradients, strict=True))
    # One token of an answer is enough: the first, one in the middle or the end of its turn.
    ends = (answers_N & (batch.tokens == target.tokenizer.eos_token_id)).nonzero()[:, 0]
    begins = (answers_N & ~answers_N.roll(1)).nonzero()[:, 0]
    for place in (begins[0], begins[0] + 3, ends[-1]):
        changed_N = torch.zeros_like(answers_N)
        changed_N[place] = True
        assert not torch.equal(learn(changed_N)[0], loss), place
