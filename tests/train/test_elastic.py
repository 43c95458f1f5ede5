"""Checkpoints of each ZeRO stage, precision and optimizer: a killed run goes on to the bytes of an unbroken one, and
any number of ranks reads the same bits. Real processes."""

import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longdraft.train import checkpoint
from longdraft.train.deepspeed_engine import MASTER, MOMENTS

STEPS = 4
PLAN = [f"train.steps={STEPS}", "train.save_every=2", "optimizer.weight_decay=1.0",
    "optimizer.warmup_steps=1", f"heldout.every={STEPS}", "heldout.rows=2",
]  # fmt: skip
LONGSPEC = ["draft.method=longspec", "draft.window=6", "draft.draft_vocab_size=80"]
CASES = {
    "fp32-1": ["train.zero_stage=1"],
    "fp32-3": ["train.zero_stage=3"],
    "bf16-2": ["train.zero_stage=2", "train.precision=bf16"],
    "longspec-bf16-3": ["train.zero_stage=3", "train.precision=bf16", *LONGSPEC],
    "longspec-muon-2": ["train.zero_stage=2", "optimizer.name=adamuon", *LONGSPEC],
    "muon-bf16-1": ["train.zero_stage=1", "train.precision=bf16", "optimizer.name=adamuon"],
    "offload-2": ["train.zero_stage=2", "train.offload_optimizer=true"],
    "offload-bf16-3": ["train.zero_stage=3", "train.precision=bf16", "train.offload_optimizer=true"],
}
# The moment at which each case's run is killed (ranks.py); with a save's, it is that of the last step.
KILLED = {
    "fp32-1": "temporary folder made",
    "longspec-muon-2": "file half written",
    "longspec-bf16-3": "backward",
    "muon-bf16-1": "without its state file",
    "bf16-2": "not renamed",
    "fp32-3": "former one not removed",
    "offload-bf16-3": "former one half removed",
}
# The number of ranks that go on with a run by two: three divide neither the sizes nor a step's four passes.
GOES_ON = {"fp32-1": 1, "longspec-muon-2": 3, "fp32-3": 3, "offload-2": 1, "bf16-2": 3, "muon-bf16-1": 1}
# What they then take another way to the same result.
OTHERWISE = {
    "fp32-3": ["train.zero_stage=2"], "bf16-2": ["train.zero_stage=3"], "offload-2": ["train.offload_optimizer=false"],
}  # fmt: skip


CHAIN = (2, 1, 3, 2)  # numbers of ranks that read what the one before saved
KINDS = (MASTER, *MOMENTS)
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
NEGATIVE_ZERO = -(2**31)  # as an int32 of the same bits


@pytest.fixture(scope="module")
def folder(tmp_path_factory, start_ranks, finish_ranks) -> Path:
    """Of each case: `{case}`, unbroken, by two ranks; `{case}-killed`, gone on with after a kill in its second half;
    `{case}-other`, its second half by another number of ranks; `{case}-{i}`: what the unbroken one saved, saved again
    by the i-th of CHAIN, the first of which puts -0.0 into it."""
    folder = tmp_path_factory.mktemp("elastic [x+1]")  # a name that is also a pattern

    def train(name: str, case: str) -> dict:
        return {"train": [*PLAN, *CASES[case], f"train.run_dir={folder / name}"]}

    def half(case: str, name: str) -> dict:
        return {"copy": [str(folder / case), str(folder / name)], "without": [f"step_{STEPS:06d}"]}

    def saved_again(i: int) -> list[dict]:
        names = [(f"{case}-{i - 1}" if i else case, f"{case}-{i}", case) for case in CASES]
        return [
            {"resave": train(old, case)["train"], "to": str(folder / new), "negative_zeros": i == 0}
            for old, new, case in names
        ]

    finish_ranks(start_ranks(2, [*(train(case, case) for case in CASES), *saved_again(0)]))
    for case, moment in KILLED.items():
        killed = train(f"{case}-killed", case) | {"kill": moment}
        killed["train"] += ["train.keep_checkpoints=1"]
        ranks = start_ranks(2, [half(case, f"{case}-killed"), killed])
        said = [rank.communicate(timeout=100)[0] for rank in ranks]
        assert ranks[0].returncode == -signal.SIGKILL and ranks[1].returncode != 0, said
    for i, n_ranks in enumerate(CHAIN[1:], start=1):
        actions = saved_again(i)
        for case in (case for case, n in GOES_ON.items() if n == n_ranks):
            other = train(f"{case}-other", case)
            actions += [half(case, f"{case}-other"), {"train": [*other["train"], *OTHERWISE.get(case, [])]}]
        if n_ranks == 2:
            actions += [train(f"{case}-killed", case) for case in KILLED]
        finish_ranks(start_ranks(n_ranks, actions))
    return folder


def newest(run: Path) -> checkpoint.Found:
    found = checkpoint.newest(run)
    assert found is not None and found[1]["step"] == found[1]["optimizer_steps"] == STEPS
    return found


def files(run: Path) -> dict[str, bytes]:
    """The newest checkpoint's tensors."""
    return {path.name: path.read_bytes() for path in newest(run)[0].glob("*.safetensors")}


def bits(run: Path) -> dict[str, torch.Tensor]:
    """Weights, fp32 weights and moments of the newest checkpoint, each whole, as integers of the same bits."""
    folder = newest(run)[0]
    saved, draft = checkpoint.SavedShares(folder), load_file(folder / checkpoint.WEIGHTS)
    names = {name: weight.numel() for name, weight in draft.items() if name != "token_ids"}
    whole = {f"{kind} {name}": saved.read(name, kind, 0, n) for name, n in names.items() for kind in KINDS}
    return {name: x.flatten().view(INTEGERS[x.itemsize]) for name, x in (whole | draft).items()}


@pytest.mark.parametrize("case", KILLED)
def test_a_killed_run_goes_on_to_the_same_bytes(folder, losses, case):
    expected = files(folder / case)
    assert expected.keys() == {"optimizer-00000.safetensors", "optimizer-00001.safetensors", checkpoint.WEIGHTS}
    assert files(folder / f"{case}-killed") == expected
    assert losses(folder / f"{case}-killed") == losses(folder / case) and len(losses(folder / case)) == STEPS
    checkpoints = folder / f"{case}-killed" / "checkpoints"
    # A folder that is partly written or removed never has the name of a whole one, and is gone after the next start.
    assert {path for path, _ in checkpoint.whole(checkpoints)} == set(checkpoints.iterdir())


@pytest.mark.parametrize("case", CASES)
def test_any_number_of_ranks_reads_the_same_bits(folder, case):
    """What two ranks saved, after it was saved by one and by three; a -0.0 among them stays one."""
    trained, first = bits(folder / case), bits(folder / f"{case}-0")
    for name, expected in first.items():
        changed = (expected != trained[name]).nonzero().flatten()
        if name.startswith(KINDS):
            assert expected[0] == NEGATIVE_ZERO and len(changed) <= len(CHAIN), name
            assert (expected[changed] == NEGATIVE_ZERO).all(), name
        else:
            assert len(changed) == 0, name
        for i in range(1, len(CHAIN)):
            assert torch.equal(bits(folder / f"{case}-{i}")[name], expected), f"{name}, by {CHAIN[i]} ranks"
    assert files(folder / f"{case}-{len(CHAIN) - 1}") == files(folder / f"{case}-0")


def test_each_optimizer_gives_weights_of_its_own(folder):
    cases = ("bf16-2", "muon-bf16-1")
    adamw, muon = (load_file(newest(folder / case)[0] / checkpoint.WEIGHTS) for case in cases)
    matrices = [name for name, weight in adamw.items() if weight.ndim == 2]
    for name in matrices:
        assert (adamw[name].float() - muon[name].float()).norm() > 0.01 * adamw[name].float().norm(), name


@pytest.mark.parametrize("case", GOES_ON)
def test_losses_go_on_by_another_number_of_ranks(folder, losses, case):
    """Also OTHERWISE. fp32: equal to an unbroken run's up to rounding; bf16: as close as one and two ranks are."""
    got, expected = losses(folder / f"{case}-other"), losses(folder / case)
    half = STEPS // 2
    assert got[:half] == expected[:half] and len(got) == STEPS
    assert got[half:] == pytest.approx(expected[half:], rel=5e-3 if "bf16" in case else 1e-5, abs=0)
    saved = files(folder / f"{case}-other").keys() - {checkpoint.WEIGHTS}
    assert len(saved) == GOES_ON[case]
