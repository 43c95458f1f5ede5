"""What --estimate says, compared with the memory that is really taken: of runs on SmolLM2 and of drafts under ZeRO by
resident memory, of a tiny target's passes by every allocation. For large targets, the arithmetic that it must obey."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from longdraft.data_prep.shards import ShardSet
from longdraft.launch import cli
from longdraft.models.decoder_config import DecoderConfig, DeltaConfig
from longdraft.models.hf import build_decoder, read_target_config
from longdraft.models.rope import RopeConfig
from longdraft.train.batches import Batch
from longdraft.train.config import Config, TrainSection, config_from_dict
from longdraft.train.config_file import load_stages
from longdraft.train.estimate import H100_TFLOPS, Operations, mean_keys, memory, operations, report, zero_bytes
from longdraft.train.methods.build import open_method
from longdraft.train.teacher import ROW_CHUNK, Teacher
from longdraft.train.tracking import METRICS

MIB = 2**20
LLAMA = DecoderConfig(128256, 4096, 14336, 32, 32, 8, 128, 1e-5, 131072, RopeConfig(128, 131072))
VICUNA = DecoderConfig(32000, 4096, 11008, 32, 32, 32, 128, 1e-5, 16384, RopeConfig(128, 16384))
QWQ = DecoderConfig(152064, 5120, 27648, 64, 40, 8, 128, 1e-5, 32768, RopeConfig(128, 32768), attention_bias=True)
DRAFTS = {
    "longspec": {"method": "longspec"},
    "linear_chain": {"method": "tokenswift"},
    "silu_chain": {"method": "tokenswift", "kind": "silu_chain"},
    "medusa": {"method": "medusa"},
}


def a_config(**sections: dict) -> Config:
    """A config for 8 GPUs: rows of 1024 tokens, 4 rows a pass, 2 passes a step."""
    base = {
        "target": {"path": "somewhere"},
        "draft": {"method": "longspec"},
        "data": {"path": "data", "seq_len": 1024},
        "train": {"run_dir": "runs", "steps": 3, "global_batch": 64, "micro_batch": 4, "precision": "bf16"},
        "optimizer": {"peak_lr": 1e-3, "warmup_steps": 0},
    }
    return config_from_dict({name: base.get(name, {}) | sections.get(name, {}) for name in {**base, **sections}})


@pytest.fixture(scope="module")
def smollm2() -> DecoderConfig:
    return read_target_config("smollm2-135m")


def test_a_run_on_smollm2_takes_what_is_estimated(smollm2, tmp_path, start_ranks, finish_ranks):
    """Peak growth of resident memory after the imports, over two steps in fp32."""
    sections = {
        "target": {"path": "smollm2-135m"},
        "data": {"path": str(tmp_path / "data"), "seq_len": 512, "query_share": 0.5},
        "train": {"run_dir": "x", "steps": 3, "global_batch": 1, "micro_batch": 1, "precision": "fp32"},
    }
    expected = memory(a_config(**sections), smollm2, n_ranks=1, gpu=False).peak
    overrides = [f"{name}.{key}={value}" for name, section in sections.items() for key, value in section.items()]
    overrides += ["draft={method: longspec}", "optimizer.warmup_steps=0"]
    finish_ranks(start_ranks(1, [{"run": overrides, "out": str(tmp_path / "grown")}], "ranks_memory.py", fresh=True))
    grown = json.loads((tmp_path / "grown-0.json").read_text())
    assert expected == pytest.approx(grown, rel=0.15), f"estimated {expected / MIB:.0f} MiB, took {grown / MIB:.0f} MiB"


# Wide enough for the tensors that are counted to outweigh those that are not: indices, temporary tables, norms' means.
TINY = DecoderConfig(640, 96, 224, 3, 6, 2, 16, 1e-5, 1 << 20, RopeConfig(16, 1 << 20))


def allocated(profile: torch.profiler.profile, marks: list[str]) -> dict[str, int]:
    """For each part of a profile (record_function): the peak of what was allocated beyond what was there before the
    first part."""
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    spans = {e.name(): (e.start_ns(), e.end_ns()) for e in events if e.name() in marks}
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    found, now, done = {}, 0, 0
    for name in marks:
        peak = now
        while done < len(changes) and changes[done][0] < spans[name][1]:
            now += changes[done][1]
            peak, done = max(peak, now), done + 1
        found[name] = peak
    return found


def a_pass(config: Config, target: DecoderConfig) -> dict[str, int]:
    """Bytes allocated in the target's pass and in the draft's with its loss, on full rows of one piece each."""
    model = build_decoder(target, torch.float32, "cpu")
    for parameter in model.parameters():
        parameter.fill_(0.01)
    method, teacher = open_method(config.draft, config.data, config.train, model), Teacher(model)
    n_rows, length = config.train.micro_batch, config.data.seq_len
    n_words = getattr(config.draft, "draft_vocab_size", None) or target.vocab_size
    tokens = torch.arange(n_rows * length) % n_words  # all are labels
    borders, keys = [i * length for i in range(n_rows + 1)], list(range(n_rows))
    micro_batch = method.micro_batch(Batch(tokens, torch.ones_like(tokens).bool(), borders, keys))
    objective = config.train.distillation(config.train.n_steps - 1)
    needs = method.needs | ({"post_norm"} if objective else set())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        with torch.profiler.record_function("forward"):
            seen = teacher.forward(micro_batch.batch.tokens, borders, micro_batch.positions, needs)
        with torch.profiler.record_function("loss"):
            teaching = method.distillation(micro_batch, seen.post_norm, objective) if objective else None
            loss = method.draft(
                method.inputs(micro_batch, seen, teacher), micro_batch.parts, teacher.lm_head_VD, True, teaching
            )
        with torch.profiler.record_function("backward"):
            loss.sums.sum().backward()
    return allocated(profile, ["forward", "loss", "backward"])


PASSES = {
    "one chunk": {"draft": DRAFTS["longspec"]},
    "several rows": {"draft": DRAFTS["longspec"] | {"noise": 1}, "train": {"micro_batch": 3}},
    "several chunks": {"draft": DRAFTS["longspec"], "data": {"seq_len": 2 * ROW_CHUNK + 100}},
    "a subset": {"draft": DRAFTS["longspec"], "data": {"seq_len": 3000, "query_share": 0.25}},
    "few words": {"draft": DRAFTS["longspec"] | {"draft_vocab_size": 256, "final_norm": True}},
    "linear chain": {"draft": DRAFTS["linear_chain"]},
    "silu chain": {"draft": DRAFTS["silu_chain"], "data": {"seq_len": 5000}},
    "medusa": {"draft": DRAFTS["medusa"]},
    "kl, a subset": {
        "draft": DRAFTS["longspec"], "data": {"seq_len": 3000, "query_share": 0.25}, "train": {"loss": "kl"},
    },
    "kl, several rows": {
        "draft": DRAFTS["longspec"] | {"window": 96, "noise": 1},
        "data": {"seq_len": 96},
        "train": {"micro_batch": 12, "loss": "kl"},
    },
    "mix, several chunks": {
        "draft": DRAFTS["linear_chain"], "data": {"seq_len": 5000}, "train": {"loss": "mix", "text_weight": 0.5},
    },
    "overlap, medusa": {"draft": DRAFTS["medusa"], "train": {"loss": "overlap", "kl_steps": 2}},
    "acceptance, few words": {
        "draft": DRAFTS["longspec"] | {"draft_vocab_size": 256, "final_norm": True},
        "train": {"loss": "acceptance", "kl_steps": 2},
    },
}  # fmt: skip


HYBRID = replace(TINY, gated=True, delta=DeltaConfig((0, 1), 2, 4, key_dim=32, value_dim=32, kernel=4))


@pytest.mark.parametrize(
    ("case", "target"),
    [*((case, TINY) for case in PASSES), *((case, HYBRID) for case in ("one chunk", "several rows", "linear chain"))],
)
def test_passes_allocate_what_is_estimated(case, target):
    sections = PASSES[case]
    train = {"micro_batch": 1, "precision": "fp32"} | sections.get("train", {})
    config = a_config(**{**sections, "train": train | {"global_batch": train["micro_batch"]}})
    found, expected = a_pass(config, target), memory(config, target, n_ranks=1, gpu=False).passes
    assert expected["target's pass"] == pytest.approx(found["forward"], rel=0.15)
    assert expected["draft's pass"] == pytest.approx(max(found["loss"], found["backward"]), rel=0.15)


STATES = [
    ("fp32", 1, False, "adamw"), ("fp32", 2, True, "adamw"), ("fp32", 3, False, "adamw"), ("bf16", 1, True, "adamw"),
    ("bf16", 2, False, "adamw"), ("bf16", 3, True, "adamw"),
    # Products in bf16 take minutes on a processor without instructions for them.
    ("fp32", 2, False, "adamuon"),
]  # fmt: skip


def test_drafts_under_zero_take_what_is_estimated(tmp_path, start_ranks, finish_ranks):
    expected = [states_bytes(*case) for case in STATES]
    runs = [[*case, size] for case, size in zip(STATES, expected, strict=True)]
    finish_ranks(start_ranks(2, [{"states": runs, "out": str(tmp_path / "grown")}], "ranks_memory.py"))
    grown = [json.loads((tmp_path / f"grown-{rank}.json").read_text()) for rank in (0, 1)]
    for case, size, *of_ranks in zip(STATES, expected, *grown, strict=True):
        assert of_ranks == pytest.approx([size] * 2, rel=0.15), case


def states_bytes(precision: Any, stage: int, offload: bool, optimizer: str) -> int:
    """What one of two ranks holds of the draft in ranks_memory.py."""
    train = TrainSection(
        run_dir="x", global_batch=1, micro_batch=1, precision=precision, zero_stage=stage, offload_optimizer=offload
    )
    return sum(zero_bytes(4 * 1024**2 + 1024, train, optimizer, n_ranks=2).values())


def test_shards_of_a_target_divide():
    target = QWQ
    found = {n: memory(a_config(target={"zero_stage": 3}), target, n, gpu=True) for n in (1, 2, 4, 8)}
    kept = {n: one.kept["target's weights"] for n, one in found.items()}
    alone = memory(a_config(), target, 8, gpu=True)
    whole = alone.kept["target's weights"]
    assert kept[1] == whole and kept[1] > kept[2] > kept[4] > kept[8]
    ends = 2 * 2 * target.vocab_size * target.hidden_size + 2 * target.hidden_size  # embedding, head, norm
    assert kept[8] - ends == pytest.approx((whole - ends) / 8, abs=8)
    layer = (whole - ends) // target.n_layers
    assert found[8].passes["target's pass"] - alone.passes["target's pass"] == 2 * layer  # the layers gathered
    assert found[8].peak < alone.peak


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offload_takes_the_optimizer_to_the_host(stage):
    """LongSpec's block has 251.7 M parameters with Llama-3-8B, without the unused projections."""
    trains = ({"zero_stage": stage}, {"zero_stage": stage, "offload_optimizer": True})
    there, away = (memory(a_config(train=train), LLAMA, 8, gpu=True) for train in trains)
    assert there.kept["draft's weights"] == pytest.approx(2 * 251.7e6 / (8 if stage == 3 else 1), rel=0.001)
    on_a_cpu = memory(a_config(train=trains[1]), LLAMA, 8, gpu=False)
    assert there.kept["masters and moments"] == pytest.approx(12 * 251.7e6 / 8, rel=0.001)
    assert "masters and moments" not in away.kept and there.host == 0
    assert away.host == on_a_cpu.kept["optimizer on the host"] > there.kept["masters and moments"]
    assert away.peak < there.peak


def test_ranks_that_share_a_row_divide_it():
    def found(degree: int) -> dict[str, int]:
        train = {"sequence_parallel": degree, "micro_batch": 1}
        return memory(a_config(data={"seq_len": 65536}, train=train), LLAMA, 8, gpu=True).passes

    alone, four = found(1), found(4)
    keys = 2 * 2 * 65536 * 8 * 128  # the last layer's, of all tokens, on every rank
    assert four["target's pass"] < 0.4 * alone["target's pass"]
    assert keys < four["draft's pass"] < 0.5 * alone["draft's pass"]
    with pytest.raises(ValueError, match=r"train\.sequence_parallel: 16 ranks cannot share the target's heads"):
        memory(a_config(train={"sequence_parallel": 16, "micro_batch": 1}), LLAMA, 16, gpu=True)


def test_r(smollm2):
    """About 1.65 with SmolLM2's large vocabulary, about 1.25 with 8 billion parameters; less where less is computed."""

    def r(target: DecoderConfig, **sections: dict) -> float:
        return counted(target, **sections).r

    assert r(smollm2, data={"seq_len": 64}) == pytest.approx(1.65, abs=0.03)
    assert r(LLAMA) == pytest.approx(1.25, abs=0.03)
    assert r(smollm2, draft={"draft_vocab_size": 16384}) < 1.35 < r(smollm2)
    assert r(LLAMA, data={"query_share": 0.25}) < 1.10
    for target in (LLAMA, VICUNA, QWQ):
        assert all(1 < r(target, draft=draft) < 2 for draft in DRAFTS.values())
        assert r(target, draft=DRAFTS["linear_chain"] | {"n_heads": 1}) < r(target, draft=DRAFTS["linear_chain"])


def counted(target: DecoderConfig, **sections: dict) -> Operations:
    config = a_config(**sections)
    return operations(config.draft, config.data, config.train.loss, target)


def test_operations_by_hand():
    """Two layers. LongSpec reads only the projection of the second one, and no token's own key of the target."""
    target, block = replace(TINY, n_layers=2), {"window": 1, "noise": 1}
    found = counted(target, data={"seq_len": 4}, draft=block)
    d, heads, both, i, v = 96, 96, 160, 224, 640
    finish = 2 * heads * d + 3 * 2 * d * i + 4 * heads * (1 + 2 + 3 + 4) / 4
    assert found.target == 2 * 2 * d * both + finish
    products = 2 * d * both + 3 * 2 * heads * d + 3 * 2 * d * i
    attention = 4 * heads * ((1 + 2 + 2 + 2) / 4 + (0 + 1 + 2 + 3) / 4)
    assert found.draft == pytest.approx(3 * products + 3.5 * attention)
    assert (found.head, found.labels) == (4 * d * v, 1)
    taught = counted(target, data={"seq_len": 4}, draft=block, train={"loss": "kl"})
    assert taught.target == found.target + finish and taught.head == 6 * d * v
    assert taught.draft == found.draft
    assert mean_keys(4, None) == 2.5 and mean_keys(4, 2) == 1.75 and mean_keys(4, 9) == 2.5
    longer = counted(target, data={"seq_len": 8}, draft=block)
    assert longer.target - found.target == 4 * heads * 2  # attention grows with length
    assert found.of_step(8, 3) == 8 * (found.target + found.draft) + 3 * found.head


def test_the_command_prints_what_each_stage_takes(target_folder, capsys):
    config = str(Path(__file__).resolve().parents[2] / "configs" / "longspec" / "smollm2.yaml")
    command = [config, "--estimate", f"target.path={target_folder}", "draft.draft_vocab_size=50"]
    assert cli.run("train", command) == 2  # as training would say
    assert "data.max_position: 8192;" in capsys.readouterr().err
    command.append("target.max_positions=8192")
    assert cli.run("train", command) == 0
    printed = capsys.readouterr().out
    for name in ("short", "long", "sft", "mixed", "more", "further", "again", "onward"):
        assert printed.count(f"Stage {name}: ") == 1
    assert printed.count("at most") == printed.count("r, a step over the target's pass") == 8
    assert "hours" not in printed or torch.cuda.is_available()
    assert f", {'GPUs' if torch.cuda.is_available() else 'CPU processes'}: 1; a pass of 1 x 4,096 tokens" in printed
    assert cli.run("train", [*command, "--num-gpus", "8", "--stage", "sft", "train.global_batch=16"]) == 0
    printed = capsys.readouterr().out
    assert "Stage short" not in printed and ", GPUs: 8; a pass of 1 x 2,048 tokens, 2 a step" in printed
    found = re.findall(r"\n([\d.]+) GPU-hours for [\d,]+ steps, .* as measured on one H100: ", printed)
    (total,) = re.findall(r"\nAll stages: ([\d.]+) GPU-hours: [\d.]+ hours\n", printed)
    assert len(found) == 6 and float(total) == pytest.approx(sum(map(float, found)), abs=0.05 * 7)


def test_hours_are_of_a_rate_that_is_given_or_was_measured(config_file, tmp_path):
    stages = load_stages(config_file, ["train.steps=100", f"train.run_dir={tmp_path}"])
    (stage,) = stages
    target, data = read_target_config(stage.config.target.path), stage.config.data
    found = operations(stage.config.draft, data, "cross_entropy", target)
    n_tokens = 8 * data.seq_len
    hours = 100 * found.of_step(n_tokens, n_tokens * found.labels) / 1e6 / 3600
    speed = 1e6 / found.of_step(1, found.labels)

    def of(n_ranks: int, tflops: float | None, gpu: bool = False) -> str:
        return report(stages, n_ranks, gpu, tflops).splitlines()[-1]

    expected = f"{hours:,.1f} process-hours for 100 steps, {speed:,.0f} tokens/s a process at 1e-06 TFLOP/s "
    assert of(2, 1e-6) == f"{expected}as given: {hours / 2:,.2f} hours"
    assert "hours" not in of(2, None) and "GPU at 556 TFLOP/s as measured on one H100: " in of(2, None, gpu=True)
    records = [{"step": i, "tflops_per_rank": rate} for i, rate in enumerate((1e-9, 1e-6, 2e-6), start=1)]
    (tmp_path / METRICS).write_text("".join(json.dumps(record) + "\n" for record in records))
    assert of(2, None) == f"{expected}as measured by the run: {hours / 2:,.2f} hours"
    assert "at 556 TFLOP/s as measured on one H100: " in of(2, None, gpu=True)  # the run was on a CPU
    on_gpu = json.dumps({"step": 4, "tflops_per_rank": 300.0, "peak_memory_gib": 9.5})
    (tmp_path / METRICS).write_text("".join(json.dumps(record) + "\n" for record in records) + on_gpu)
    assert "at 300 TFLOP/s as measured by the run: " in of(2, None, gpu=True)
    assert of(2, None) == f"{expected}as measured by the run: {hours / 2:,.2f} hours"
    epochs = ["train.steps=null", "train.epochs=3", f"train.run_dir={tmp_path / 'other'}"]
    stages = load_stages(config_file, epochs)
    n_steps = 3 * len(ShardSet(Path(data.path) / "train")) // 8
    assert of(2, 1e-6).startswith(f"{hours * n_steps / 100:,.1f} process-hours for {n_steps} steps, ")
    stages = load_stages(config_file, [*epochs, f"data.path={tmp_path / 'not prepared'}"])
    assert of(2, 1e-6).startswith(f"{1e9 / speed / 3600:,.1f} process-hours for a billion tokens, ")


@pytest.mark.parametrize("draft", ["{method: tokenswift}", "{method: medusa}", "{method: longspec}"])
def test_a_vocabulary_above_the_targets_is_refused(config_file, draft):
    with pytest.raises(ValueError, match=r"^draft\.draft_vocab_size: 98; "):
        report(load_stages(config_file, [f"draft={draft}", "draft.draft_vocab_size=98"]))


def test_the_rate_of_an_h100_is_its_21_000_tokens_a_second():
    config = a_config(data={"seq_len": 32768})
    found = operations(config.draft, config.data, "cross_entropy", LLAMA)
    assert H100_TFLOPS * 1e12 / found.of_step(1, found.labels) == pytest.approx(21_000, rel=0.01)
