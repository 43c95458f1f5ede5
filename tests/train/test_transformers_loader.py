"""A target that transformers computes: the same losses as with our decoder where that knows the family, and drafts for
a family that it does not know, from training to decoded tokens."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, Olmo2Config, Qwen3Config, StableLmConfig

from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.launch import arguments
from longdraft.launch.runtime import Drafting
from longdraft.models.draft_folder import read_info
from longdraft.models.hf import load_through_transformers
from longdraft.train.config_file import load_stages
from longdraft.train.estimate import report
from longdraft.train.export import export
from longdraft.train.setup import check_stages
from longdraft.train.tracking import read_metrics

VOCAB = 97
LOADER = "target.loader=transformers"
METHODS = {
    "tokenswift": ["draft.out_norm_init=target"],
    "longspec": [
        "draft.method=longspec", "draft.window=6", "draft.noise=3", "draft.final_norm=true", "optimizer.eps=1e-5",
        "data.seq_len=312", "data.positions=anchor_offset", "data.max_position=2000", "data.sinks=2",
        "data.query_share=0.5", "train.global_batch=2", "train.micro_batch=1", "train.loss=acceptance",
        "train.kl_steps=6",
    ],
}  # fmt: skip
# On two ranks: the target's layers and the draft are sharded, and LongSpec's rows are shared too.
SHARED = ["target.zero_stage=3", "train.zero_stage=3"]
FEW = ["train.steps=8", "heldout.every=8", "heldout.rows=2"]
PLAIN = {"tokenswift": [], "longspec": ["draft.method=longspec", "draft.window=6", "draft.noise=3"]}


SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=False, pad_token_id=None, bos_token_id=None, eos_token_id=None,
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory, saved_model) -> dict[str, Path]:
    folder, sizes = tmp_path_factory.mktemp("families"), SIZES | {"max_position_embeddings": 2048}
    configs = {"llama": LlamaConfig(**sizes), "qwen3": Qwen3Config(head_dim=16, **sizes), "olmo2": Olmo2Config(**sizes)}
    return {name: saved_model(folder / name, config) for name, config in configs.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, folders, long_folder, start_ranks, finish_ranks) -> Path:
    """{family}-{method}-{loader}, llama-{method}-shared: 10 steps each; olmo2-{method}, olmo2-shared: 8 steps."""
    out = tmp_path_factory.mktemp("loader")

    def train(name: str, family: str, *overrides: str) -> dict:
        target = [f"target.path={folders[family]}", "heldout.every=10", "train.steps=10"]
        return {"train": [*target, f"train.run_dir={out / name}", *overrides]}

    alone, both = [], []
    for method, options in METHODS.items():
        data = [f"data.path={long_folder}"] if method == "longspec" else []
        for family in ("llama", "qwen3")[: 2 if method == "longspec" else 1]:
            alone.append(train(f"{family}-{method}-longdraft", family, *options, *data))
            alone.append(train(f"{family}-{method}-transformers", family, *options, *data, LOADER))
        rows = ["train.sequence_parallel=2"] if method == "longspec" else []
        both.append(train(f"llama-{method}-shared", "llama", *options, *data, *SHARED, *rows, LOADER))
    alone += [train(f"olmo2-{method}", "olmo2", *options, *FEW, LOADER) for method, options in PLAIN.items()]
    decoding = ["decoding.every=8", "decoding.prompts=3", "decoding.contexts=[6]", "decoding.new_tokens=5"]
    both.append(train("olmo2-shared", "olmo2", *FEW, *SHARED, *decoding, LOADER))
    for ranks in [start_ranks(1, alone), start_ranks(2, both)]:
        finish_ranks(ranks)
    return out


@pytest.mark.parametrize(("method", "family"), [("tokenswift", "llama"), ("longspec", "llama"), ("longspec", "qwen3")])
def test_steps_have_the_losses_of_our_decoder(trained, losses, method, family):
    ours = losses(trained / f"{family}-{method}-longdraft")
    assert len(ours) == 10
    torch.testing.assert_close(losses(trained / f"{family}-{method}-transformers"), ours, rtol=1e-5, atol=0)


@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_have_the_losses_of_one(trained, losses, method):
    ours = losses(trained / f"llama-{method}-longdraft")
    torch.testing.assert_close(losses(trained / f"llama-{method}-shared"), ours, rtol=1e-5, atol=0)


def test_a_family_that_our_decoder_does_not_know_is_shared_out_too(trained, losses):
    alone = losses(trained / "olmo2-tokenswift")
    assert len(alone) == 8 and alone[-1] < alone[0]
    torch.testing.assert_close(losses(trained / "olmo2-shared"), alone, rtol=1e-5, atol=0)
    (decoded,) = (record for record in read_metrics(trained / "olmo2-shared") if "decode_tokens_per_step" in record)
    assert decoded["decode_tokens_per_step"] >= 1


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_of_such_a_target_is_exported_and_decodes_exactly(trained, folders, tmp_path, method):
    draft = export(trained / f"olmo2-{method}", tmp_path / "draft")
    info = read_info(draft)
    assert info.target["loader"] == "transformers" and info.train_config["target"]["loader"] == "transformers"
    target = load_through_transformers(folders["olmo2"], torch.float32)
    assert {name: info.target[f"{name}_sha256"] for name in target.fingerprint} == target.fingerprint
    prompts, params = [[1, 5, 9, 13, 2, 2, 40], [33]], SamplingParams(temperature=0.8, seed=4, max_new_tokens=24)
    plain, drafted = (
        Engine(target, *own, slots=2).generate(prompts, params) for own in (["plain"], [method, str(draft)])
    )
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert sum(one.stats.drafted for one in drafted) > 0


def test_a_draft_says_who_computes_its_target(trained, folders, tmp_path):
    """The commands that decode with it read this; and our decoder has the same fingerprints where it knows the
    family."""
    draft, opened = export(trained / "llama-tokenswift-transformers", tmp_path / "draft"), {}
    for loader in ("transformers", "longdraft"):
        named = ["--loader", loader] if loader == "longdraft" else []
        options = ["--draft", str(draft), "--dtype", "fp32", "--device", "cpu", *named]
        asked = Drafting(arguments.serve().parse_args(options))
        opened[loader] = asked.open_target()
        assert opened[loader].loader == loader
        engine = asked.open_engines(opened[loader])["tokenswift"]  # warns of other weights than the draft's
        assert engine.generate([[1, 5, 9, 13]], SamplingParams(max_new_tokens=8))[0].tokens
    assert opened["longdraft"].fingerprint == opened["transformers"].fingerprint
    assert "weights_sha256" not in read_info(draft).target


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["draft.out_norm_init=target"], r"draft.out_norm_init: target "),
        (["draft.method=longspec", "draft.warm_start=true"], r"draft.warm_start: True "),
    ],
)
def test_what_only_our_decoder_gives_is_refused(folders, config_file, alone, overrides, message):
    stages = load_stages(config_file, [f"target.path={folders['olmo2']}", LOADER, *overrides])
    with pytest.raises(ValueError, match=message):
        check_stages(stages, alone)


def test_a_block_is_refused_where_keys_are_rotated_otherwise(tmp_path, saved_model, config_file, alone):
    folder = saved_model(tmp_path / "stablelm", StableLmConfig(**SIZES))
    stages = load_stages(config_file, [f"target.path={folder}", LOADER, *PLAIN["longspec"]])
    with pytest.raises(ValueError, match=r"^draft\.method: longspec "):
        check_stages(stages, alone)


def test_the_estimate_says_that_it_does_not_cover_this_loader(folders, config_file):
    with pytest.raises(ValueError, match=r"target.loader: transformers, but --estimate counts what our decoder"):
        report(load_stages(config_file, [f"target.path={folders['llama']}", LOADER]))
