"""Golden tokens: what every drafter gave when golden_tokens.json was written, and in how many steps.

fp32 on the CPU, on prompts on which no decision of plain decoding is close (test_exactness.py), so the tokens do not
depend on the machine. All proposed nodes are verified, so the steps do not depend on a clock. Where a change of the
numbers is meant, delete the file and run the test: it writes the file anew, and fails.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from longdraft.infer.drafters.base import Plain
from longdraft.infer.engine import Engine

GOLDEN = Path(__file__).with_name("golden_tokens.json")
NEW = 18


@pytest.fixture(scope="module")
def exactness(shared):
    return shared("infer/test_exactness.py")


def decoded(engine, exactness, sampling, indices):
    params = [replace(exactness.SAMPLINGS[sampling], seed=1500 + i, max_new_tokens=NEW) for i in indices]
    asked = exactness.prompts("gqa", "overflow")
    found = engine.generate([asked[i] for i in indices], params)
    return [one.tokens for one in found], sum(one.stats.steps for one in found)


def test_every_drafter_gives_the_tokens_of_before_in_as_many_steps(exactness, tiny_target):
    def target(n_layers, n_kv_heads, seed):
        sizes = dict(vocab_size=exactness.VOCAB, max_positions=exactness.POSITIONS)
        return tiny_target(n_layers=n_layers, n_kv_heads=n_kv_heads, seed=seed, **sizes)

    models = target(2, 2, 0), target(1, 1, 5)
    pairs = {"+".join(names): exactness.combined(names) for names in exactness.PAIRS}
    drafters = {"plain": lambda target, small: Plain()} | exactness.DRAFTERS | pairs
    tokens, steps = {}, {}
    for name, make in drafters.items():
        for batch, samplings in ((4, ("greedy", "T1_penalty")), (1, ("greedy",))):
            engine = Engine(models[0], make(*models), nodes=None, slots=batch)
            for sampling in samplings:
                # All five prompts on four slots; the first one alone.
                found, count = decoded(engine, exactness, sampling, range(5 if batch == 4 else 1))
                assert found == tokens.setdefault(sampling, found)[: len(found)], (name, batch, sampling)
                if name != "tokenswift_auto":  # the clock decides whether it takes a draft pass
                    steps.setdefault(name, []).append(count)
    if not GOLDEN.exists():
        rows = [f"  {json.dumps(key)}: {json.dumps(value)}" for part in (tokens, steps) for key, value in part.items()]
        GOLDEN.write_text("{\n" + ",\n".join(rows) + "\n}\n")
        pytest.fail(f"{GOLDEN.name} was missing and is written")
    assert json.loads(GOLDEN.read_text()) == tokens | steps
