"""From conversations in a file to a batch of training: what is learned are the answers alone, to the ends of their
turns. Labels of other tokens count in no method: test_methods.py."""

import json
import random

import torch

from longdraft.data_prep.prepare import prepare
from longdraft.data_prep.recipe import PrepareConfig, Source
from longdraft.data_prep.shards import ShardSet
from longdraft.models.fingerprint import tokenizer_hash
from longdraft.models.hf import load_tokenizer
from longdraft.train.batches import read_batch, step_rows

THINGS = ["ship", "boat", "harbour", "whale", "lighthouse", "anchor", "sail", "captain"]
PLACES = ["in the north", "near the shore", "on an island", "under the bridge", "far out at sea"]


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


def test_answers_of_conversations_are_what_is_learned(tmp_path):
    """With one or two turns, which fit in a row."""
    rng, tokenizer = random.Random(0), load_tokenizer("smollm2-135m")
    with (tmp_path / "chats.jsonl").open("w") as file:
        for _ in range(60):
            messages = []
            for _ in range(rng.randint(1, 2)):
                thing, place, n = rng.choice(THINGS), rng.choice(PLACES), rng.randint(2, 9)
                answer = f"There are {n} of them {place}, and each {thing} there has a number from 1 to {n}."
                messages += [{"role": "user", "content": f"How many {thing}s are there {place}, more than {n - 1}?"}]
                messages += [{"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    sources = {"chats": Source(path=str(tmp_path / "chats.jsonl"), chat_field="messages")}
    config = PrepareConfig(sources=sources, out=tmp_path / "data", seq_len=128, heldout_share=0.1)
    prepare(config, tokenizer, tokenizer_hash(tokenizer))
    rows = ShardSet(tmp_path / "data" / "train")
    batch = read_batch(rows, step_rows(0, 0, len(rows), len(rows)))
    answers_N = by_headers(batch.tokens, tokenizer)
    assert torch.equal(batch.supervised, answers_N) and 0.2 < answers_N.float().mean() < 0.7
