"""The config: every file of configs/ loads and makes a valid DeepSpeed dict; every mistake has a helpful message."""

import re
from pathlib import Path

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.draft_folder import read_info, shipped_drafts
from longdraft.models.drafts.heads import MedusaConfig, TokenSwiftConfig
from longdraft.models.drafts.longspec import LongSpecConfig
from longdraft.models.rope import RopeConfig
from longdraft.train.checkpoint import check_continues, saved_config
from longdraft.train.config import (
    DRAFT_SECTIONS,
    LongSpecSection,
    MedusaSection,
    TokenSwiftSection,
    config_from_dict,
    to_dict,
    to_yaml,
)
from longdraft.train.config_file import load_config, load_stages
from longdraft.train.deepspeed_engine import deepspeed_dict

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TOKENSWIFT = sorted({*(CONFIGS / "tokenswift").glob("*.yaml")} - {CONFIGS / "tokenswift" / "smollm2-gpu.yaml"})
ALL = sorted(path for path in CONFIGS.rglob("*.yaml") if path.parent.name != "data")  # those are data_prep's


@pytest.mark.parametrize("path", ALL, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_file_loads_and_makes_a_valid_deepspeed_dict(path):
    stages = load_stages(path)
    assert len(stages) == 1 or all(stage.name for stage in stages)
    for stage in stages:
        config = stage.config
        alone = config.changed(train={"sequence_parallel": 1})
        derived = DeepSpeedConfig(deepspeed_dict(alone.train, alone.optimizer.clip, world_size=1, n_weights=10))
        assert derived.train_batch_size == config.train.global_batch
        assert derived.zero_optimization_stage == config.train.zero_stage
        assert derived.bfloat16_config.enabled == (config.train.precision == "bf16")
        assert derived.gradient_clipping == config.optimizer.clip


@pytest.mark.parametrize("path", TOKENSWIFT, ids=lambda path: path.stem)
def test_table_9(path):
    config = load_config(path)
    train, optimizer = config.train, config.optimizer
    assert (train.global_batch, train.micro_batch, config.train.n_passes(4), train.steps) == (120, 3, 10, 200)
    assert (optimizer.peak_lr, optimizer.warmup_steps, optimizer.betas) == (5e-3, 50, (0.9, 0.999))
    assert (optimizer.weight_decay, optimizer.clip, train.precision) == (0.1, 1.0, "bf16")
    assert (config.data.seq_len, config.draft.n_heads, config.draft.kind) == (8192, 3, "linear_chain")
    assert (config.draft.init_std, config.draft.out_norm_init) == (0.02, "ones")


def test_methods_have_sections_of_their_own(config_file):
    """Their fields are those of the networks, with the same defaults."""
    assert set(DRAFT_SECTIONS) == {"tokenswift", "medusa", "longspec"}
    target = DecoderConfig(97, 32, 48, 2, 4, 2, 8, 1e-5, 256, RopeConfig(8, 256))
    heads = load_config(config_file, ["draft.n_heads=2", "draft.kind=silu_chain"]).draft
    assert heads == TokenSwiftSection(n_heads=2, kind="silu_chain")
    assert heads.network(target) == TokenSwiftConfig(32, 1e-5, n_heads=2, kind="silu_chain")
    medusa = load_config(config_file, ["draft.method=medusa", "draft.init_std=0.1"]).draft
    assert medusa == MedusaSection(init_std=0.1) and medusa.network(target) == MedusaConfig(32, init_std=0.1)
    block = load_config(config_file, ["draft.method=longspec", "draft.noise=3", "draft.draft_vocab_size=20"]).draft
    assert block == LongSpecSection(noise=3, draft_vocab_size=20)
    assert block.network(target) == LongSpecConfig.for_target(target, noise=3, draft_vocab_size=20)
    for section, network in ((TokenSwiftSection(), TokenSwiftConfig(32, 1e-5)), (MedusaSection(), MedusaConfig(32))):
        assert section.network(target) == network


def test_deepspeed_dict_is_derived(config_file):
    config = load_config(config_file, ["train.zero_stage=3", "train.precision=bf16", "optimizer.clip=0.5"])
    derived = deepspeed_dict(config.train, config.optimizer.clip, world_size=2, n_weights=1000)
    assert derived["train_micro_batch_size_per_gpu"] == derived["gradient_accumulation_steps"] == 2
    assert derived["zero_optimization"]["stage"] == 3
    assert derived["zero_optimization"]["reduce_bucket_size"] == 1000
    large = deepspeed_dict(config.train, config.optimizer.clip, world_size=2, n_weights=10**10)
    assert large["zero_optimization"]["reduce_bucket_size"] == 500_000_000
    assert "offload_optimizer" not in derived["zero_optimization"]
    assert derived["bf16"] == {"enabled": True} and derived["gradient_clipping"] == 0.5
    shared = load_config(config_file, ["train.sequence_parallel=4", "train.micro_batch=1"])
    derived = deepspeed_dict(shared.train, shared.optimizer.clip, world_size=8, n_weights=1000)
    assert derived["gradient_accumulation_steps"] == 4
    config = load_config(config_file, ["train.offload_optimizer=true", "train.zero_stage=2"])
    derived = DeepSpeedConfig(deepspeed_dict(config.train, config.optimizer.clip, 1, 1000))
    assert derived.zero_config.offload_optimizer.device == "cpu"


def test_overrides_and_round_trips(config_file, tmp_path):
    config = load_config(config_file, ["train.steps=7", "optimizer.betas=[0.9, 0.95]", "target.path=a.gguf"])
    assert (config.train.steps, config.optimizer.betas, config.target.path) == (7, (0.9, 0.95), "a.gguf")
    assert load_config(config_file, ["optimizer.peak_lr=1e-3"]).optimizer.peak_lr == 1e-3  # text to YAML 1.1
    assert config_from_dict(to_dict(config)) == config
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "again.yaml") == config


# The last override of each is wrong, and its field is named.
MISTAKES = [
    "train.steps=many", "train.steps=true", "train=3", "train.seed=.nan", f"train.seed={2**63}", "train.zero_stage=0",
    "target.zero_stage=1", "target.path=3", "target.path=''", 'data.path="\\t"', "data.path='???'", "draft=3",
    "train.loss=tvd", "train.text_weight=0.5", "train.kl_steps=3", "train.loss=overlap train.kl_steps=20",
    "train.level_weights=[1]", "draft.method=longspec draft.noise=2 train.level_weights=[1]",
    "draft.method=longspec draft.noise=2 train.level_weights=[0,1]", "train.level_weights=[inf]",
    "optimizer.betas=[0.9]", "optimizer.betas=[0.9,1.0]", "optimizer.warmup_steps=20", "optimizer.warmup_share=1",
    "optimizer.peak_lr=fast", "optimizer.peak_lr=nan", "optimizer.weight_decay=1e30", "optimizer.name=lion",
    "train.epochs=inf", "train.zero_stage=3 optimizer.name=adamuon",
    "train.offload_optimizer=true optimizer.name=adamuon", "log.wandb=on-line", "log.wandb_project=a",
    "data.positions=anchor_offset data.max_position=23", "data.max_position=100", "data.query_share=0",
    "draft.kind=relu_chain", "draft.method=eagle", "draft.n_heads=0", "draft.method=[longspec]",
    "draft.method=longspec draft.window=0", "draft.method=longspec draft.noise=3 draft.window=2",
    "draft.kind=silu_chain draft.out_norm_init=target", "draft.draft_vocab_size=0", "decoding.contexts=[0]",
    "decoding.temperatures=[]", "decoding.share=0.1", "data.path=${oc.env:NO_SUCH_NAME}/rows",
    "data.path=${target.paht}", "data.path=${home:}", "train.steps=${oc.env:PATH}",
    "decoding.contexts=[5,'${nope}']",
]  # fmt: skip
# What is named where it is not the last override's field.
NAMED = {
    "train.stepz=3": r"train\.stepz: .*did you mean steps\?",
    "trian.steps=3": r"trian: .*did you mean train\?",
    "draft.noise=3": r"draft\.noise: ",
    "draft.method=medusa draft.kind=silu_chain": r"draft\.kind: ",
    "train.steps": r"override: 'train\.steps' ",
    "--steps=3": r"--steps: ",
    "data.path=${": r"override: 'data\.path=\$\{' ",
    "data={path:${x}}": r"override: ",
    "data.path=\udcff": r"override: 'data\.path=\\udcff' ",  # a byte of the command line that is not UTF-8
    "data.path=[1": r"override: 'data\.path=\[1' ",
    "data..path=1": r"data\.: ",
    "train.steps=null": r"train\.steps: ",
    "train={steps: 3, epochs: 2}": r"train\.steps: ",
    "train.loss=mix": r"train\.text_weight: ",
    "train.loss=overlap": r"train\.kl_steps: ",
    "draft.n_heads=23": r"data\.seq_len: 24;",
    "data.positions=anchor_offset": r"data\.max_position: ",
    "decoding.every=1": r"decoding\.contexts: ",
    "data.path=${train.run_dir} train.run_dir=${data.path}": r"(data\.path|train\.run_dir): .*[Rr]ecursi",
}


@pytest.mark.parametrize("overrides", [*MISTAKES, *NAMED])
def test_mistakes_are_named(config_file, overrides, monkeypatch):
    monkeypatch.delenv("NO_SUCH_NAME", raising=False)
    named = NAMED.get(overrides, re.escape(overrides.split()[-1].split("=")[0]) + r"\b")
    given = [overrides] if "{" in overrides and "$" not in overrides else overrides.split()
    with pytest.raises(ValueError, match=f"^{named}") as error:
        load_config(config_file, given)
    assert "\n" not in str(error.value)


def test_of_two_exclusive_fields_an_override_replaces_the_other(config_file, tmp_path):
    config = load_config(config_file, ["train.epochs=2", "optimizer.warmup_share=0.1"])
    assert (config.train.steps, config.train.epochs) == (None, 2.0)
    assert (config.optimizer.warmup_steps, config.optimizer.warmup_share) == (None, 0.1)
    epochs = tmp_path / "epochs.yaml"
    epochs.write_text(to_yaml(config))
    config = load_config(epochs, ["train.steps=500", "optimizer.warmup_steps=0"])
    assert (config.train.steps, config.train.epochs) == (500, None)
    assert (config.optimizer.warmup_steps, config.optimizer.warmup_share) == (0, None)
    assert load_config(epochs, ["train={steps: 7}"]).train.steps == 7
    assert load_config(epochs, ["train.steps=null"]) == load_config(epochs)


def test_references_are_resolved(config_file, tmp_path, monkeypatch):
    monkeypatch.setenv("ROWS", "/data/rows")
    given = [
        "data.path=${oc.env:ROWS}/${data.seq_len}",
        "train.run_dir=runs/${target.path}",
        "target.path=a.gguf",
        "train.save_every=${train.steps}",
        "heldout.rows=${oc.decode:${oc.env:N_ROWS,7}}",
        r"draft.start_from=a\${b}",
    ]
    config = load_config(config_file, given)
    assert (config.data.path, config.train.run_dir) == ("/data/rows/24", "runs/a.gguf")
    assert (config.train.save_every, config.heldout.rows, config.draft.start_from) == (20, 7, "a${b}")
    text = config_file.read_text().replace("global_batch: 8", 'global_batch: "${train.micro_batch}"')
    (tmp_path / "file.yaml").write_text(text)
    assert load_config(tmp_path / "file.yaml", ["train.micro_batch=5"]).train.global_batch == 5


FILES = [
    b"- target: {path: x}\n", b"[]", b"5\n", b"target: \xff\n", b"target: {path: ${x}}\n", b"data: {path: '${'}\n",
    b"a: 1\na: 2\n", b"a: " + b"[" * 20_000 + b"]" * 20_000, b"train: [",
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(FILES)))
def test_files_that_are_no_config_are_refused(tmp_path, number):
    (tmp_path / "bad.yaml").write_bytes(FILES[number])
    with pytest.raises(ValueError, match=r"^config: .*bad\.yaml ") as error:
        load_stages(tmp_path / "bad.yaml")
    assert "\n" not in str(error.value)


def test_paths_are_of_the_recipes_that_come_along_and_of_the_home_folder(config_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config("configs/quickstart.yaml").target.path == "smollm2-135m"
    monkeypatch.setenv("HOME", "/somewhere")
    config = load_config(config_file, [f"{name}=~/x" for name in ("target.path", "data.path", "train.run_dir")])
    assert {config.target.path, config.data.path, config.train.run_dir} == {"/somewhere/x"}


def test_missing_things_are_named(config_file, tmp_path):
    with pytest.raises(ValueError, match=r"config: .*nowhere\.yaml "):
        load_config(tmp_path / "nowhere.yaml")
    text = config_file.read_text()
    changes = {"data": ("data: {", "#"), "train.precision": ("precision: fp32, ", ""), "data.seq_len": ("24", '"???"')}
    for name, change in changes.items():
        (tmp_path / "bad.yaml").write_text(text.replace(*change))
        with pytest.raises(ValueError, match=f"^{name}: "):
            load_config(tmp_path / "bad.yaml")


def test_passes_are_divided_among_the_ranks(config_file):
    config = load_config(config_file, ["train.global_batch=7"])  # passes of 2, 2, 2 and 1 rows
    assert [config.train.n_passes(n_ranks) for n_ranks in range(1, 6)] == [4, 2, 2, 1, 1]
    shared = load_config(config_file, ["train.sequence_parallel=2", "train.global_batch=6"])
    assert [shared.train.n_passes(n_ranks) for n_ranks in (2, 4, 6)] == [3, 2, 1]
    with pytest.raises(ValueError, match=r"^train\.sequence_parallel: "):
        shared.train.n_passes(3)


def test_epochs_and_shares_become_steps(config_file):
    """45 rows in batches of 8: a partial step is left out."""
    given = load_config(config_file)
    assert given.resolved(45) == given
    epochs = ["train.steps=null", "train.epochs=2", "optimizer.warmup_steps=null", "optimizer.warmup_share=0.2"]
    config = load_config(config_file, epochs)
    with pytest.raises(AssertionError, match="not resolved"):
        _ = config.train.n_steps
    found = config.resolved(45)
    assert (found.train.steps, found.train.epochs, found.train.n_steps) == (11, None, 11)
    assert (found.optimizer.warmup_steps, found.optimizer.warmup_share) == (2, None)
    assert found.resolved(45) == found == config_from_dict(to_dict(found))
    half = load_config(config_file, [*epochs, "train.epochs=0.5", "optimizer.warmup_share=0"])
    assert (half.resolved(45).train.steps, half.resolved(45).optimizer.warmup_steps) == (2, 0)
    with pytest.raises(ValueError, match=r"^train\.epochs: "):
        config.resolved(3)
    below = [*epochs[:2], "train.loss=overlap", "train.kl_steps=10", "optimizer.warmup_steps=10"]
    assert load_config(config_file, below).resolved(45).train.n_steps == 11
    for field in ("train.kl_steps", "optimizer.warmup_steps"):
        with pytest.raises(ValueError, match=rf"^{field}: 11;"):
            load_config(config_file, [*below, f"{field}=11"]).resolved(45)


ROWS = {"rows": 45, "sha256": "abc"}


def continues(config_file, *overrides, rows=ROWS, weights=None):
    """Whether a run goes on with these overrides, or else the beginning of the message."""
    extra = {"data": ROWS, "target_weights": weights}
    state = {"step": 1, "config": to_dict(load_config(config_file)), "extra": extra}
    check_continues(state, load_config(config_file, overrides), rows)


def test_a_run_goes_on_only_with_what_gives_the_same_result(config_file):
    continues(config_file, "train.save_every=3", "heldout.every=2", "log.wandb=offline", "data.path=moved")
    continues(config_file, "train.micro_batch=1", "train.max_skipped=3", "train.run_dir=x")
    continues(config_file, "train.zero_stage=3", "train.offload_optimizer=true", "target.zero_stage=3")
    continues(config_file, "target.path=moved", weights="abc")  # they are compared when they are loaded
    changes = ["train.steps=30", "train.seed=1", "optimizer.peak_lr=0.1", "draft.init_std=0"]
    changes += ["draft.method=longspec", "data.query_share=0.5", "train.sequence_parallel=2", "target.path=moved"]
    for override in changes:
        name = override.split("=")[0]
        with pytest.raises(ValueError, match=rf"^{name}: .* began with "):
            continues(config_file, override)
    with pytest.raises(ValueError, match=r"^data\.path: .* began with "):
        continues(config_file, rows=ROWS | {"sha256": "abd"})


def test_saved_configs_of_former_versions_are_read(config_file):
    """Where positions are plain, some have no sinks; some have fields that were removed."""
    config = load_config(config_file)
    values = to_dict(config)
    values["data"]["sinks"], values["decoding"]["share"] = None, 0.1
    assert saved_config(config.train.run_dir, {"config": values}) == config and config.data.sinks == 4
    for name in shipped_drafts():
        saved_config("run", {"config": read_info(name).train_config, "step": 1})
    values["target"] |= {"path": "folder", "gguf_file": "a.gguf"}
    assert saved_config("run", {"config": values, "step": 1}).target.path == "folder/a.gguf"
