"""benchmarks/kernels/profiles.py against the published sizes of the models and against counts by hand."""

import pytest

from longdraft.benchmarks.kernels.attention import random_tree
from longdraft.benchmarks.kernels.profiles import PROFILES, attention_work, loss_work, step_work
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.footprint import weight_count
from longdraft.models.rope import RopeConfig

# As the models' cards and checkpoints have them.
PUBLISHED = {
    "llama3.1-8b": 8_030_261_248,
    "llama2-7b": 6_738_415_616,
    "qwen2.5-7b": 7_615_616_512,
    "qwq-32b": 32_763_876_352,
    "smollm2-135m": 134_515_008,
}
# 3 query heads on 1 key head of 4 numbers, 2 layers.
SMALL = DecoderConfig(10, 12, 5, 2, 3, 1, 4, 1e-5, 64, RopeConfig(4, 64))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_profile_has_its_models_parameters(name):
    assert weight_count(PROFILES[name]) == PUBLISHED[name]


def test_attention_by_hand():
    """2 rows behind 5: K and V of 7 rows of 4 numbers; 2 rows of 12 numbers in and out; pairs 2 * 5 + 3."""
    work = attention_work(SMALL, context=5, nodes=2, itemsize=2, tree_pairs=3)
    assert work.bytes == 2 * (2 * 7 * 4 + 2 * 2 * 12) == 208
    assert work.flops == 2 * 2 * 3 * 4 * 13 == 624
    tree = int(random_tree(64).sum())
    work = attention_work(PROFILES["llama3.1-8b"], 8192, 64, 2, tree)
    assert work.bytes == 33_816_576 + 1_048_576  # K and V; queries and output
    assert work.flops == 4 * 32 * 128 * (64 * 8192 + tree)


def test_a_step_by_hand():
    """A layer: q, k, v 20 x 12, o 12 x 12, feed-forward 3 x 60, norms 24; head 10 x 12; last norm 12."""
    layer = 240 + 144 + 180 + 24
    work = step_work(SMALL, context=5, nodes=2, itemsize=2)
    cache = 2 * 2 * 7 * 4
    assert work.bytes == 2 * (2 * layer + 12 + 120 + cache + 2 * 12)
    assert work.flops == 2 * 2 * (2 * layer + 120) + 2 * 624


def test_the_loss_by_hand():
    """3 heads of 7 rows: logits and gradient, 2 FLOP each of 10 x 12; head once, states in and gradients out."""
    work = loss_work(SMALL, rows=7, heads=3, itemsize=4)
    assert work.flops == 3 * 7 * 2 * (2 * 120)
    assert work.bytes == 4 * (120 + 2 * 3 * 7 * 12)
