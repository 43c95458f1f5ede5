"""Training on a pretended CUDA device (tests/pretended_cuda.py): every method's step gives the loss and gradients of
the CPU, and the host waits for nothing in a step that is neither logged nor saved."""

from collections import Counter
from dataclasses import replace

import deepspeed
import pytest
import torch

from longdraft.kernels import backend, segment_attention
from longdraft.train.config import DTYPES
from longdraft.train.config_file import load_config
from longdraft.train.deepspeed_engine import DraftEngine
from longdraft.train.methods.build import open_method
from longdraft.train.sequence_parallel import SequenceParallel, sequence_group
from longdraft.train.setup import Run
from longdraft.train.step import finish_step_sum, measure, train_step
from longdraft.train.teacher import Teacher
from longdraft.train.validation import validate

# Two passes a step, every third of which is logged.
RUN = ["data.seq_len=460", "train.micro_batch=1", "train.global_batch=2", "log.every=3", "train.steps=9"]
BLOCK = ["draft.method=longspec", "draft.window=6", "draft.noise=4", "draft.final_norm=true"]
ANCHOR = ["data.positions=anchor_offset", "data.max_position=700", "data.sinks=2", "data.query_share=0.5"]
METHODS = {
    "linear-chain": [],
    "silu-chain-anchored": ["draft.kind=silu_chain", *ANCHOR],
    "medusa": ["draft.method=medusa", "draft.init_std=0.1"],
    "adamuon": ["optimizer.name=adamuon"],
    "longspec": BLOCK,
    "longspec-anchored-restricted": [*BLOCK, *ANCHOR, "draft.draft_vocab_size=60"],
}
POISON = 96


class Weights:
    """Stands in for DeepSpeed, which does not know the pretended device: gradients of passes are summed, and no weight
    moves."""

    def __init__(self, draft, adam):
        self.draft, self.optimizer = draft, adam

    def __call__(self, *args):
        return self.draft(*args)

    def backward(self, loss):
        loss.backward()

    def step(self):
        pass

    def gradient_accumulation_steps(self):
        return 1

    def was_step_applied(self):
        return True

    def get_global_grad_norm(self):
        return torch.ones((), device=next(self.draft.parameters()).device)


@pytest.fixture
def packed(shared):
    """Rows of three pieces each. In poisoned ones, the second piece has a token for which the target gives NaN."""
    builders = shared("train/test_methods.py")

    class Rows(builders.Rows):
        poisoned = False

        def __getitem__(self, index):
            row = super().__getitem__(index)
            tokens = row["tokens"] % POISON
            if self.poisoned and index == 1:
                tokens[20] = POISON
            return row | {"tokens": tokens}

    return Rows([[*builders.LENGTHS], ["middle", "short"]])


@pytest.fixture
def opened(config_file, alone, packed, tiny_target, monkeypatch):
    """(overrides, gpu or None) -> a run before its first step, on the pretended device or the CPU. The device's
    attention is flash-attention in fp32 too, which on a real device takes half precision alone."""
    monkeypatch.setattr(backend, "HALF", (torch.float32, torch.bfloat16))
    initialize = lambda model, optimizer, **_: (Weights(model, optimizer), optimizer, None, None)  # noqa: E731
    monkeypatch.setattr(deepspeed, "initialize", initialize)

    def make(overrides, gpu=None, precision="fp32", shared_rows=False, poisoned=False):
        config, dtype = load_config(config_file, [*RUN, f"train.precision={precision}", *overrides]), DTYPES[precision]
        target = tiny_target(max_positions=2048, dtype=dtype)
        target.model.embed_tokens.weight.data[POISON] = torch.nan
        restricted = getattr(config.draft, "draft_vocab_size", None)
        ids = None if restricted is None else torch.arange(restricted)
        method = open_method(config.draft, config.data, config.train, target.model, ids)
        generator = torch.Generator().manual_seed(5)
        for name, weight in method.draft.named_parameters():
            weight.data.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
        method.draft.to(dtype)
        target.model.requires_grad_(False)
        ranks = alone
        if gpu is not None:
            gpu.put(target.model)
            gpu.put(method.draft)
            ranks = replace(alone, device=torch.device("cuda", 0))
        parallel = SequenceParallel(target.model.config, sequence_group(1)) if shared_rows else None
        packed.poisoned = poisoned
        engine = DraftEngine(method.draft, ranks, config.train, config.optimizer)
        return Run(config, ranks, method, engine, Teacher(target.model, parallel), packed, packed, None)

    return make


def step(run, pretended_cuda):
    """What a step gives: losses by part, and gradients."""
    for weight in run.engine.draft.parameters():
        weight.grad = None
    result = train_step(run)
    run.step += 1
    assert result is not None
    value = pretended_cuda.value_of
    gradients = {name: value(weight.grad).float() for name, weight in run.engine.draft.named_parameters()}
    return value(result.loss.sums), gradients


def assert_close(found, expected, loss, gradient):
    torch.testing.assert_close(found[0], expected[0], rtol=loss, atol=0)
    for name, wanted in expected[1].items():
        error = ((found[1][name] - wanted).norm() / wanted.norm()).item()
        assert error <= gradient, f"{name}: relative error {error}"


def step_without_a_wait(run, gpu, pretended_cuda):
    """Take a step in which the host may not wait. Nor may it copy anything to the device between a pass of the target
    and the gradient of its rows."""
    backward, before, added = run.engine.backward, [], []

    def sent():
        return Counter({where: n for where, n in gpu.queued.items() if where.startswith("copy to the device")})

    def ended(*args):
        backward(*args)
        added.append(sent() - before.pop())

    def begun(*_):
        if not before:  # the draft's rows are embedded too
            before.append(sent())

    gpu.forget()
    segment_attention.lay_end_to_end.cache_clear()  # else cached: the rows are those of the step before
    hook, run.engine.backward = run.teacher.model.embed_tokens.register_forward_pre_hook(begun), ended
    step(run, pretended_cuda)
    hook.remove()
    run.engine.backward = backward
    assert not gpu.waits, gpu.waits
    assert added == [Counter(), Counter()] and sent(), added


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", METHODS)
def test_a_step_is_the_cpus_and_waits_for_nothing(opened, pretended_cuda, name, precision):
    """In fp32 only the order of sums differs, in bf16 rounding too."""
    expected = step(opened(METHODS[name], precision=precision), pretended_cuda)
    with pretended_cuda.PretendedCuda() as gpu:
        run = opened(METHODS[name], gpu, precision)
        found = step(run, pretended_cuda)
        assert_close(found, expected, *((1e-5, 1e-4) if precision == "fp32" else (1e-3, 0.05)))
        assert gpu.calls["varlen attention"] > 0
        step_without_a_wait(run, gpu, pretended_cuda)
        assert gpu.late.total() == 2, "what is read of a pass is whether it is left out"


@pytest.mark.parametrize("name", ["linear-chain", "longspec"])
def test_rows_without_a_number_are_left_out_unseen(opened, pretended_cuda, capsys, name):
    """The host learns of them once the step is queued; their gradient is already zero by then."""
    run = opened(METHODS[name], poisoned=True)
    expected = step(run, pretended_cuda)
    finish_step_sum(run)
    with pretended_cuda.PretendedCuda() as gpu:
        run = opened(METHODS[name], gpu, poisoned=True)
        assert_close(step(run, pretended_cuda), expected, 1e-5, 1e-4)
        step_without_a_wait(run, gpu, pretended_cuda)
        finish_step_sum(run)
    assert run.skipped == 2
    said = [line[:41] for line in capsys.readouterr().out.splitlines() if " is not finite for rows 1 (epoch " in line]
    assert said == [f"The loss of step {n} is not finite for rows" for n in (1, 1, 2)]


@pytest.mark.parametrize("name", ["linear-chain", "longspec-anchored-restricted"])
def test_rows_that_ranks_share(opened, pretended_cuda, name):
    """One rank has all of them, and still takes every step of sharing."""
    expected = step(opened(METHODS[name]), pretended_cuda)
    with pretended_cuda.PretendedCuda() as gpu:
        run = opened(METHODS[name], gpu, shared_rows=True)
        assert_close(step(run, pretended_cuda), expected, 1e-5, 1e-4)
        step_without_a_wait(run, gpu, pretended_cuda)


@pytest.mark.parametrize(("card", "peak"), [("NVIDIA H100 80GB HBM3", 989.4), ("a card of next year", None)])
def test_a_logged_step_waits_before_and_after(opened, pretended_cuda, monkeypatch, card, peak):
    with pretended_cuda.PretendedCuda() as gpu:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card)
        run = opened([], gpu, "bf16")
        run.step = 2
        result = train_step(run)
        assert result is not None
        record = measure(run, result)
        assert sum(n for what, n in gpu.waits.items() if "synchronize" in what) == 2
    assert record["over_target"] > 0 and record["skipped"] == 0 and record["tflops_per_rank"] > 0
    assert record["tokens_per_s_per_rank"] == record["tokens_per_s"]  # there is one
    assert record["peak_memory_gib"] == pretended_cuda.PEAK / 2**30
    assert record.get("share_of_peak") == (None if peak is None else pytest.approx(record["tflops_per_rank"] / peak))


@pytest.mark.parametrize("name", ["medusa", "longspec-anchored-restricted"])
def test_the_evaluation_is_read_once(opened, pretended_cuda, name):
    def evaluated(run):
        return validate(run, run.heldout_rows)

    expected = evaluated(opened(METHODS[name]))
    with pretended_cuda.PretendedCuda() as gpu:
        run = opened(METHODS[name], gpu)
        found = evaluated(run)
        for key in ("loss", "part_loss", "rank_rates", "choice_rates", "positions"):
            torch.testing.assert_close(found[key], expected[key], rtol=1e-5, atol=0)
        gpu.forget()
        evaluated(run)
        assert gpu.waits.total() == 1, gpu.waits
