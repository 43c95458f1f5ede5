"""The config: every file of configs/ loads and makes a valid DeepSpeed dict; every mistake has a helpful message."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.draft_folder import read_info, shipped_drafts
from longdraft.models.drafts.longspec import LongSpecConfig
from longdraft.models.drafts.medusa import MedusaConfig
from longdraft.models.drafts.tokenswift import TokenSwiftConfig
from longdraft.models.rope import RopeConfig
from longdraft.train.batches import rank_rows, step_rows
from longdraft.train.checkpoint import START
from longdraft.train.config import (
    Config,
    accumulation,
    config_from_dict,
    empty_passes,
    load_config,
    resolved,
    to_dict,
    to_yaml,
)
from longdraft.train.config_sections import DRAFT_SECTIONS, LongSpecSection, MedusaSection, TokenSwiftSection
from longdraft.train.deepspeed_engine import deepspeed_dict
from longdraft.train.resuming import check_same_run, check_same_start, is_same_start
from longdraft.train.stages import load_stages

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TOKENSWIFT = sorted((CONFIGS / "tokenswift").glob("*.yaml"))
ALL = sorted(path for path in CONFIGS.rglob("*.yaml") if path.parent.name != "data")  # those are data_prep's


@pytest.mark.parametrize("path", ALL, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_file_loads_and_makes_a_valid_deepspeed_dict(path):
    stages = load_stages(path)
    assert len(stages) == 1 or all(stage.name for stage in stages)
    for stage in stages:
        config = stage.config
        alone = replace(config, train=replace(config.train, sequence_parallel=1))
        derived = DeepSpeedConfig(deepspeed_dict(alone, world_size=1, n_weights=10))
        assert derived.train_batch_size == config.train.global_batch
        assert derived.zero_optimization_stage == config.train.zero_stage
        assert derived.bfloat16_config.enabled == (config.train.precision == "bf16")
        assert derived.gradient_clipping == config.optimizer.clip


@pytest.mark.parametrize("path", ALL, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_file_starts_on_any_number_of_gpus(path):
    """The same passes of the same rows, each made once, and no rank makes over one more than another."""
    for stage in load_stages(path):
        config = stage.config
        train, n_rows = config.train, 3 * config.train.global_batch + 1
        rows = step_rows(train.seed, 2, n_rows, train.global_batch)
        passes = [rows[start : start + train.micro_batch] for start in range(0, len(rows), train.micro_batch)]
        for n_ranks in range(1, 9):
            dealt = [rank_rows(rows, rank, n_ranks, train.micro_batch) for rank in range(n_ranks)]
            turns = [part for turn in zip(*dealt, strict=True) for part in turn]
            assert turns == [*passes, *[[]] * empty_passes(config, n_ranks)]
            assert {len(own) for own in dealt} == {accumulation(config, n_ranks)}
            assert sum(not own[-1] for own in dealt) == empty_passes(config, n_ranks) < n_ranks
            derived = deepspeed_dict(config, n_ranks, n_weights=10)
            full = derived["train_micro_batch_size_per_gpu"] * derived["gradient_accumulation_steps"] * n_ranks
            assert derived["train_batch_size"] == full  # the only value that DeepSpeed accepts


def test_every_file_is_one_that_is_known():
    assert {path.parent.name for path in ALL} <= {"configs", "tokenswift", "longspec"}
    assert len([path for path in ALL if path.parent.name == "longspec"]) >= 1


@pytest.mark.parametrize("path", TOKENSWIFT, ids=lambda path: path.stem)
def test_table_9(path):
    config = load_config(path)
    train, optimizer = config.train, config.optimizer
    assert (train.global_batch, train.micro_batch, accumulation(config, 4), train.steps) == (120, 3, 10, 200)
    assert (optimizer.peak_lr, optimizer.warmup_steps, optimizer.betas) == (5e-3, 50, (0.9, 0.999))
    assert (optimizer.weight_decay, optimizer.clip, train.precision) == (0.1, 1.0, "bf16")
    assert (config.data.seq_len, config.draft.n_heads, config.draft.kind) == (8192, 3, "linear_chain")
    assert (config.draft.init_std, config.draft.out_norm_init) == (0.02, "ones")


def test_there_is_one_file_for_each_target():
    of_the_paper = {"llama3.1-8b", "yarn-llama2-7b-128k", "qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-14b"}
    later = {"qwen3-8b", "qwen3-30b-a3b", "gpt-oss-20b", "gemma-3-12b"}
    assert {path.stem for path in TOKENSWIFT} == of_the_paper | later


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
    derived = deepspeed_dict(config, world_size=2, n_weights=1000)
    assert derived["train_batch_size"] == 8 and derived["train_micro_batch_size_per_gpu"] == 2
    assert derived["gradient_accumulation_steps"] == 2 and derived["zero_optimization"]["stage"] == 3
    assert derived["zero_optimization"]["reduce_bucket_size"] == 1000
    large = deepspeed_dict(config, world_size=2, n_weights=10**10)
    assert large["zero_optimization"]["reduce_bucket_size"] == 500_000_000
    assert "offload_optimizer" not in derived["zero_optimization"]
    assert derived["bf16"] == {"enabled": True} and derived["gradient_clipping"] == 0.5
    config = load_config(config_file, ["train.offload_optimizer=true", "train.zero_stage=2"])
    assert DeepSpeedConfig(deepspeed_dict(config, 1, 1000)).zero_config.offload_optimizer.device == "cpu"


def test_ranks_that_share_a_row_are_one_reader(config_file):
    config = load_config(config_file, ["train.sequence_parallel=4", "train.micro_batch=1"])
    assert [accumulation(config, world_size) for world_size in (4, 8, 32)] == [8, 4, 1]
    derived = deepspeed_dict(config, world_size=8, n_weights=1000)
    # DeepSpeed's own arithmetic, which knows nothing of shared rows.
    assert derived["train_batch_size"] == 8 * 4 == 1 * derived["gradient_accumulation_steps"] * 8


def test_overrides_and_round_trips(config_file, tmp_path):
    config = load_config(config_file, ["train.steps=7", "optimizer.betas=[0.9, 0.95]", "target.gguf_file=a.gguf"])
    assert (config.train.steps, config.optimizer.betas, config.target.gguf_file) == (7, (0.9, 0.95), "a.gguf")
    assert load_config(config_file, ["optimizer.peak_lr=1e-3"]).optimizer.peak_lr == 1e-3  # text to YAML 1.1
    assert config_from_dict(to_dict(config)) == config
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "again.yaml") == config


MISTAKES = {
    "train.stepz=3": r"train\.stepz: unknown key; did you mean train\.steps\?",
    "trian.steps=3": r"trian: unknown key; did you mean train\?",
    "optimizer.lr=1": r"optimizer\.lr: unknown key; did you mean optimizer\.\w+\? \(known: peak_lr",
    "train.steps=many": r"train\.steps: expected int, got 'many'",
    "train.steps=1.5": r"train\.steps: expected int, got 1\.5",
    "train.steps=true": r"train\.steps: expected int, got True",
    "train.deterministic=1": r"train\.deterministic: expected bool, got 1",
    "target.path=3": r"target\.path: expected str, got 3",
    "optimizer.peak_lr=fast": r"optimizer\.peak_lr: expected float, got 'fast'",
    "optimizer.betas=[0.9]": r"optimizer\.betas: expected a list of 2 values",
    "train=3": r"train: expected a section of fields, got 3",
    "draft=3": r"draft: expected a section of fields, got 3",
    "train.steps": r"override: 'train\.steps' has not the form section\.field=value",
    "--steps=3": r"override: '--steps=3' has not the form",
    "train.precision=fp16": r"train\.precision: 'fp16' is unknown; choose one of fp32, bf16",
    "train.zero_stage=0": r"train\.zero_stage: 0 is unknown; choose one of 1, 2, 3",
    "target.zero_stage=1": r"target\.zero_stage: 1 is unknown; choose one of 0, 3",
    "train.steps=0": r"train\.steps: 0 is not positive; give a value above 0",
    "train.steps=null": r"train\.steps, train\.epochs: neither is given; set one of them",
    "train.epochs=2 train.steps=3": r"train\.steps, train\.epochs: both are given; set one of them",
    "train.steps=null train.epochs=0": r"train\.epochs: 0\.0 is not positive",
    "train.seed=-1": r"train\.seed: -1 is out of range",
    "train.max_skipped=-1": r"train\.max_skipped: -1 is negative; give 0 or more",
    "train.loss=tvd": r"train\.loss: 'tvd' is unknown; choose one of cross_entropy, kl, mix, overlap, acceptance",
    "train.loss=mix": r"train\.text_weight: None with train\.loss = mix; give it",
    "train.text_weight=0.5": r"train\.text_weight: 0\.5 with train\.loss = cross_entropy; leave it out, or set",
    "train.loss=overlap": r"train\.kl_steps: None with train\.loss = overlap; give it",
    "train.kl_steps=3": r"train\.kl_steps: 3 with train\.loss = cross_entropy; leave it out, or set",
    "train.level_weights=[1]": r"train\.level_weights: tokenswift has no noise shifts to draw; leave it out",
    "train.sequence_parallel=0": r"train\.sequence_parallel: 0 is not positive",
    "optimizer.warmup_steps=20": r"optimizer\.warmup_steps: 20 must be at least 0 and below train\.steps = 20",
    "optimizer.warmup_steps=-1": r"optimizer\.warmup_steps: -1 must be at least 0 and below train\.steps = 20",
    "optimizer.warmup_steps=null": r"optimizer\.warmup_steps, optimizer\.warmup_share: neither is given; set one",
    "optimizer.warmup_steps=3 optimizer.warmup_share=0.1": r"optimizer\.warmup_steps, .*: both are given; set one of",
    "optimizer.warmup_steps=null optimizer.warmup_share=1": r"optimizer\.warmup_share: 1\.0; give a share from 0 to b",
    "optimizer.warmup_steps=null optimizer.warmup_share=-0.1": r"optimizer\.warmup_share: -0\.1; give a share from 0",
    "optimizer.name=lion": r"optimizer\.name: 'lion' is unknown; choose one of adamw, adamuon",
    "optimizer.name=adamuon train.zero_stage=3": r"optimizer\.name: adamuon, but train\.zero_stage = 3 .* set 1 or 2",
    "optimizer.name=adamuon train.zero_stage=2 train.offload_optimizer=true": r"adamuon, but .*optimizer = true: it",
    "optimizer.weight_decay=-1": r"optimizer\.weight_decay: -1\.0 is negative",
    "optimizer.betas=[0.9,1.0]": r"optimizer\.betas: \[0\.9, 1\.0\] must lie in \[0, 1\)",
    "optimizer.peak_lr=nan": r"optimizer\.peak_lr: nan is not positive",
    "data.positions=shuffled": r"data\.positions: 'shuffled' is unknown; choose one of plain, anchor_offset",
    "data.positions=anchor_offset": r"data\.max_position: None, but anchor_offset needs .* at least data\.seq_len = 24",
    "data.positions=anchor_offset data.max_position=23": r"data\.max_position: 23, but anchor_offset needs",
    "data.max_position=100": r"data\.max_position: plain positions do not move; set data\.positions=anchor_offset",
    "data.sinks=3": r"data\.sinks: plain positions do not move; set data\.positions=anchor_offset, or leave it",
    "data.query_share=0": r"data\.query_share: 0\.0; give a share above 0 and up to 1",
    "data.query_share=1.5": r"data\.query_share: 1\.5; give a share above 0 and up to 1",
    "data.sinks=-1": r"data\.sinks: -1 is negative; give 0 or more, the paper's is 4",
    "data.seq_len=0": r"data\.seq_len: 0",
    "draft.kind=relu_chain": r"draft\.kind: 'relu_chain' is unknown; choose one of linear_chain, silu_chain",
    "draft.kind=silu_chain draft.out_norm_init=target": r"draft\.out_norm_init: silu_chain has no norms",
    "draft.method=eagle": r"draft\.method: 'eagle' is unknown; choose one of tokenswift, medusa, longspec",
    "draft.method=[longspec]": r"draft\.method: \['longspec'\] is unknown; choose one of tokenswift, medusa, longspec",
    "train=[1]": r"^train: a list is laid over a section of fields, or a section over a list; give fields in both",
    "train.steps=3 train=[1]": r"^train: a list is laid over a section of fields, or a section over a list; give",
    "draft.n_heads=0": r"draft\.n_heads: 0",
    "draft.n_heads=23": r"data\.seq_len: 24 tokens leave no label for draft\.n_heads = 23",
    "draft.noise=3": r"draft\.noise: unknown key; .*\(known: method, start_from, n_heads, kind",
    "draft.method=medusa draft.kind=silu_chain": r"draft\.kind: unknown key; .*\(known: method, start_from, n_heads, i",
    "draft.method=longspec draft.n_heads=3": r"draft\.n_heads: unknown key; .*\(known: method, start_from, window, noi",
    "draft.method=longspec draft.noise=0": r"draft\.noise: 0, but it must be above 0",
    "draft.method=longspec draft.window=0": r"draft\.window: 0, but it must be above 0",
    "draft.method=longspec draft.draft_vocab_size=0": r"draft\.draft_vocab_size: 0; give 1 to",
    "draft.method=longspec draft.draft_vocab_size=many": r"draft\.draft_vocab_size: expected int, got 'many'",
    "draft.method=medusa draft.init_std=-1": r"draft\.init_std: -1\.0 is negative",
    "optimizer.peak_lr=1e30": r"optimizer\.peak_lr: 1e\+30 is out of range; give a number of at most 1$",
    "optimizer.peak_lr=inf": r"optimizer\.peak_lr: inf is out of range; give a number of at most 1$",
    "optimizer.weight_decay=nan": r"optimizer\.weight_decay: nan is out of range; give a number of at most 10$",
    "log.wandb_project=a/b": r"log\.wandb_project: 'a/b' has one of /\\#\?%:; W&B takes none of them",
    f"log.wandb_project={'x' * 129}": r"log\.wandb_project: 'x{129}' has 129 characters; give 128 at most",
    "log.wandb=on-line": r"log\.wandb: 'on-line' is unknown; choose one of auto, online, offline, disabled",
}


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


def test_what_counts_in_steps_fits_the_steps_of_the_epochs(config_file):
    """45 rows in batches of 8: two epochs are 11 steps."""
    base = ["train.epochs=2", "train.loss=overlap"]
    at_most = load_config(config_file, [*base, "train.kl_steps=10", "optimizer.warmup_steps=10"])
    assert resolved(at_most, 45).train.n_steps == 11
    for field in ("train.kl_steps", "optimizer.warmup_steps"):
        config = load_config(config_file, [*base, "train.kl_steps=1", f"{field}=11"])
        with pytest.raises(ValueError, match=rf"^{field}: 11 must be below the 11 steps of the run$"):
            resolved(config, 45)


def test_references_are_resolved(config_file, tmp_path, monkeypatch):
    monkeypatch.setenv("ROWS", "/data/rows")
    given = [
        "data.path=${oc.env:ROWS}/${data.seq_len}",
        "train.run_dir=runs/${target.gguf_file}",
        "target.gguf_file=a.gguf",
        "train.save_every=${train.steps}",
        "heldout.rows=${oc.decode:${oc.env:N_ROWS,7}}",
        r"log.wandb_project=a\${b}",
    ]
    config = load_config(config_file, given)
    assert (config.data.path, config.train.run_dir) == ("/data/rows/24", "runs/a.gguf")
    assert (config.train.save_every, config.heldout.rows, config.log.wandb_project) == (20, 7, "a${b}")
    assert to_dict(config)["log"]["wandb_project"] == "a${b}"
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    monkeypatch.delenv("ROWS")
    assert load_config(tmp_path / "again.yaml") == config
    text = config_file.read_text().replace("global_batch: 8", 'global_batch: "${train.micro_batch}"')
    (tmp_path / "file.yaml").write_text(text)
    assert load_config(tmp_path / "file.yaml", ["train.micro_batch=5"]).train.global_batch == 5


UNRESOLVED = {
    "data.path=${oc.env:NO_SUCH_NAME}/rows": r"data\.path: '\$\{oc\.env:NO_SUCH_NAME\}/rows' .*NO_SUCH_NAME' not found",
    "data.path=${target.paht}": r"data\.path: '\$\{target\.paht\}' cannot be resolved: .*'target\.paht' not found",
    "data.path=${train.run_dir} train.run_dir=${data.path}": r"(data\.path|train\.run_dir): '\$.*[Rr]ecursi",
    "data.path=${home:}": r"data\.path: '\$\{home:\}' cannot be resolved: Unsupported interpolation type home",
    "data.path=${": r"override: 'data\.path=\$\{' cannot be read: no viable",
    "decoding.contexts=[5,'${nope}']": r"decoding\.contexts\[1\]: '\$\{nope\}' cannot be resolved: .*'nope' not found",
    "data.path='???'": r"data\.path: \?\?\? stands for a value that is still to be given; give one",
    "train.steps=${oc.env:PATH}": r"train\.steps: expected int, got '",
    "data={path:${x}}": r"override: 'data=\{path:\$\{x\}\}' cannot be read: .*; write \"\$\{\.\.\.\}\" in quotes",
    "data.path=[1": r"override: 'data\.path=\[1' cannot be read: while parsing",
    "data..path=1": r"override: 'data\.\.path=1' has not the form section\.field=value",
}


@pytest.mark.parametrize("overrides", UNRESOLVED)
def test_what_cannot_be_resolved_is_named(config_file, overrides, monkeypatch):
    monkeypatch.delenv("NO_SUCH_NAME", raising=False)
    with pytest.raises(ValueError, match=UNRESOLVED[overrides]) as error:
        load_config(config_file, overrides.split())
    assert "\n" not in str(error.value)


FILES = {
    b"- target: {path: x}\n": "holds a list, expected sections of fields",
    b"[]": "holds a list, expected sections of fields",
    b"5\n": "cannot be read: Invalid loaded object type: int",
    b"target: \xff\n": "cannot be read: 'utf-8' codec can't decode byte 0xff",
    b"target: {path: ${x}}\n": "cannot be read: while parsing a flow mapping",
    b"data: {path: '${'}\n": r"cannot be read: data\.path: no viable alternative",
    b"a: 1\na: 2\n": "cannot be read: .*found duplicate key",
    b"a: " + b"[" * 20_000 + b"]" * 20_000: "cannot be read: ",
}


@pytest.mark.parametrize("number", range(len(FILES)))
def test_files_that_are_no_config_are_refused(train_command, tmp_path, number):
    content, said = list(FILES.items())[number]
    (tmp_path / "bad.yaml").write_bytes(content)
    status, printed = train_command(tmp_path / "bad.yaml", "--estimate")
    assert status == 2 and re.fullmatch(rf"launch/train\.py: error: config: .*bad\.yaml {said}.*\n", printed), printed


NUMBERS = {
    f"{section.name}.{name}": hint
    for section in fields(Config)
    for kind in (DRAFT_SECTIONS.values() if section.name == "draft" else [get_type_hints(Config)[section.name]])
    for name, hint in get_type_hints(kind).items()
    if {int, float} & {hint, *get_args(hint)}
}


@pytest.mark.parametrize("name", NUMBERS)
def test_no_number_is_absurd(config_file, name):
    """Every field that takes a number, in lists too."""
    method = [f"draft.method={m}" for m, kind in DRAFT_SECTIONS.items() if hasattr(kind, name.split(".")[1])]
    others = {"data.max_position": ["data.positions=anchor_offset"], "decoding.contexts": ["decoding.every=1"]}
    given = [*(method[:1] if name.startswith("draft") else []), *others.get(name, [])]
    list_of = {"optimizer.betas": "[0.9,{}]"}.get(name, "[{}]" if "tuple" in str(NUMBERS[name]) else "{}")
    for value in ("nan", ".nan", "inf", "-inf", "1e30", "1e400", "-1e30", str(10**400), str(2**63)):
        with pytest.raises(ValueError, match=name.replace(".", r"\.")) as error:
            load_config(config_file, [*given, f"{name}={list_of.format(value)}"])
        assert "\n" not in str(error.value) and len(str(error.value)) < 1000


@pytest.mark.parametrize(
    "name", ["target.path", "target.gguf_file", "data.path", "train.run_dir", "draft.start_from", "log.wandb_project"]
)
def test_names_and_paths_are_not_empty(config_file, name):
    for value in ('""', '" "', '"a\\0b"'):
        with pytest.raises(ValueError, match=rf"{name}: .* names nothing; give a name or path, or leave"):
            load_config(config_file, [f"{name}={value}"])


@pytest.mark.parametrize("overrides", MISTAKES)
def test_mistakes_are_named(config_file, overrides):
    with pytest.raises(ValueError, match=MISTAKES[overrides]):
        load_config(config_file, overrides.split())


def test_the_recipes_that_come_along_are_found_from_every_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config("configs/quickstart.yaml").target.path == "smollm2-135m"


def test_paths_may_begin_with_the_home_folder(config_file, monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    config = load_config(config_file, [f"{name}=~/x" for name in ("target.path", "data.path", "train.run_dir")])
    assert {config.target.path, config.data.path, config.train.run_dir} == {"/somewhere/x"}


def test_missing_things_are_named(config_file, tmp_path):
    with pytest.raises(ValueError, match=r"config: no file .*nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")
    text = config_file.read_text()
    (tmp_path / "a.yaml").write_text("\n".join(line for line in text.splitlines() if not line.startswith("data:")))
    with pytest.raises(ValueError, match="data: the section is missing"):
        load_config(tmp_path / "a.yaml")
    (tmp_path / "b.yaml").write_text(text.replace("precision: fp32, ", ""))
    with pytest.raises(ValueError, match=r"train\.precision: the value is missing"):
        load_config(tmp_path / "b.yaml")
    (tmp_path / "d.yaml").write_text(text.replace("seq_len: 24", 'seq_len: "???"'))
    with pytest.raises(ValueError, match=r"data\.seq_len: \?\?\? stands for a value"):
        load_config(tmp_path / "d.yaml")
    (tmp_path / "c.yaml").write_text("train: [")
    with pytest.raises(ValueError, match=r"config: .*c\.yaml cannot be read"):
        load_config(tmp_path / "c.yaml")


def test_passes_that_do_not_divide_leave_some_empty(config_file):
    config = load_config(config_file, ["train.global_batch=7"])  # 2, 2, 2 and 1
    counts = [(accumulation(config, n_ranks), empty_passes(config, n_ranks)) for n_ranks in range(1, 6)]
    assert counts == [(4, 0), (2, 0), (2, 2), (1, 0), (1, 1)]
    shared = load_config(config_file, ["train.sequence_parallel=2", "train.global_batch=6"])
    assert [(accumulation(shared, n), empty_passes(shared, n)) for n in (2, 4, 6)] == [(3, 0), (2, 1), (1, 0)]
    with pytest.raises(ValueError, match=r"train\.sequence_parallel: 2 does not divide 3 ranks; set it to a divisor"):
        accumulation(shared, 3)


def test_epochs_and_shares_become_steps(config_file):
    """45 rows in batches of 8: a partial step is left out."""
    given = load_config(config_file)
    assert resolved(given, 45) == given
    epochs = ["train.steps=null", "train.epochs=2", "optimizer.warmup_steps=null", "optimizer.warmup_share=0.2"]
    config = load_config(config_file, epochs)
    with pytest.raises(AssertionError, match="not resolved"):
        _ = config.train.n_steps
    found = resolved(config, 45)
    assert (found.train.steps, found.train.epochs, found.train.n_steps) == (11, None, 11)
    assert (found.optimizer.warmup_steps, found.optimizer.warmup_share) == (2, None)
    assert resolved(found, 45) == found == config_from_dict(to_dict(found))
    half = load_config(config_file, [*epochs, "train.epochs=0.5", "optimizer.warmup_share=0"])
    assert (resolved(half, 45).train.steps, resolved(half, 45).optimizer.warmup_steps) == (2, 0)
    with pytest.raises(
        ValueError, match=r"train\.epochs: 2\.0 of 3 rows are less than one step of train\.global_batch = 8"
    ):
        resolved(config, 3)
    short = load_config(config_file, ["train.steps=null", "train.epochs=1"])
    with pytest.raises(ValueError, match=r"optimizer\.warmup_steps: 4 must be below the 4 steps of the run"):
        resolved(short, 33)


def test_a_run_goes_on_only_with_what_gives_the_same_result(config_file):
    old = load_config(config_file)
    check_same_run(old, load_config(config_file, ["train.save_every=3", "heldout.every=2", "log.wandb=offline"]))
    check_same_run(old, load_config(config_file, ["train.micro_batch=1", "train.max_skipped=3", "train.run_dir=x"]))
    changes = ["train.steps=30", "train.seed=1", "optimizer.peak_lr=0.1", "draft.init_std=0", "data.path=x"]
    for override in (*changes, "draft.method=longspec", "data.query_share=0.5", "train.sequence_parallel=2"):
        name = override.split("=")[0]
        with pytest.raises(
            ValueError, match=rf"{name}: .* began with .*; set it back, or start anew with train\.run_dir"
        ):
            check_same_run(old, load_config(config_file, [override]))


def test_sinks_are_of_moved_positions_alone(config_file):
    """The configs of shipped drafts have the default for any positions, and are read as they were meant."""
    moved = ["data.positions=anchor_offset", "data.max_position=100"]
    assert load_config(config_file).data.sinks is None
    assert [load_config(config_file, [*moved, *own]).data.sinks for own in ([], ["data.sinks=2"])] == [4, 2]
    for config in (load_config(config_file), load_config(config_file, moved)):
        values = to_dict(config)
        values["data"]["sinks"] = 4
        assert config_from_dict(values) == config
    for name in shipped_drafts():
        config_from_dict(read_info(name).train_config)


PLACES = {
    "the same": ("a/1/draft", "a/2", "a/1/draft", "a/2", True),
    "none": (None, "a/2", None, "a/2", True),
    "now one": (None, "a/2", "a/1/draft", "a/2", False),
    "moved together": ("a/1/draft", "a/2", "/b/c/1/draft", "/b/c/2", True),
    "moved to another": ("a/1/draft", "a/2", "b/0/draft", "b/2", False),
    "spelt otherwise": ("a/1/draft", "a/2", "./a/x/../1/draft", "a/2", True),
    "only the run moved": ("a/1/draft", "a/2", "a/1/draft", "b/2", True),
    "from elsewhere": ("/x/draft", "a/2", "/x/draft", "b/2", True),
    "from elsewhere to beside": ("/x/draft", "/a/2", "/b/draft", "/b/2", False),
    "a name of the hub": ("me/draft", "/a/2", "me/draft", "/b/2", True),
}


@pytest.mark.parametrize("case", PLACES)
def test_a_run_may_move_together_with_what_it_began_with(config_file, tmp_path, monkeypatch, case):
    *places, same = PLACES[case]
    monkeypatch.chdir(tmp_path)
    assert is_same_start(*places) == same


def test_weights_to_begin_with_are_held_against_those_before_a_move(tmp_path):
    begun = {"start_from": "/old/1/draft", "weights": "in fp32", "sha256": "a" * 64}
    now = begun | {"start_from": str(tmp_path / "1" / "draft"), "sha256": "b" * 64}
    run = tmp_path / "2"
    run.mkdir()
    check_same_start(now, run)
    (run / START).write_text(json.dumps(begun | {"run_dir": "/old/2"}))
    with pytest.raises(
        ValueError, match=rf"draft\.start_from: the run in {run} .* fp32, sha256 aaaaaaaaaaaa, and would now"
    ):
        check_same_start(now, run)
    check_same_start(now | {"sha256": "a" * 64}, run)
    check_same_start(now | {"start_from": "/another/draft"}, run)
    (run / START).write_text(json.dumps(now | {"run_dir": str(run)}))
    with pytest.raises(ValueError, match="and would now begin with in fp32, sha256 aaaaaaaaaaaa"):
        check_same_start(now | {"sha256": "a" * 64}, run)
