"""Long contexts on a real model's first layers, whose passes are as wide as the whole model's: decoding up to the last
of 8192 positions, in the memory that was estimated, and exact drafters after 32768."""

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from longdraft.infer.drafters.longspec import LongSpecDrafter
from longdraft.infer.drafters.tokenswift import TokenSwiftDrafter
from longdraft.infer.drafters.triforce import TriForceDrafter
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.models.hf import build_decoder, load_target

# A process of its own, whose peak of resident memory is this run's.
RUN = """
import argparse, ctypes, gc, json
from dataclasses import replace
import torch
from longdraft.models.passes import Pass
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.models.hf import build_decoder, load_target

def resident(field):
    status = open("/proc/self/status").read()
    return int(status.split(field)[1].split()[0]) * 1024

whole = load_target("smollm2-135m", torch.bfloat16)
model = build_decoder(replace(whole.model.config, n_layers=2), torch.bfloat16, "cpu")
model.load_state_dict(whole.model.state_dict(), strict=False)
model.tie()
target = replace(whole, model=model)
del whole
text = open(argparse.__file__).read()
prompt = target.tokenizer(text).input_ids[:8000]
said = []
engine = Engine(target, "prompt_lookup", log=said.append)
# What loading freed but glibc still keeps (115 MiB, one day more and one day less) must not stand in for the cache.
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
before = resident("VmRSS:")
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here on, without the loading's
[generation] = engine.generate([prompt], SamplingParams(max_new_tokens=400, ignore_eos=True))
grown = resident("VmHWM:") - before
# The same text again, read in passes of 64 rows, which are bit by bit those of one row.
cache = engine.runner.cache
cache.lengths.fill_(7999)  # the slot is empty, and its rows are still there
chosen, rows = [], torch.tensor([prompt[-1:] + generation.tokens[:-1]])
for part in rows.split(64, dim=1):
    chosen += target.model(Pass(part, cache=cache)).logits[0].argmax(-1).tolist()
    cache.commit(None, torch.tensor([part.shape[1]]))
row = 2 * 2 * 3 * 64 * 2
print(json.dumps({
    "prompt": len(prompt), "new": len(generation.tokens), "reason": generation.finish_reason,
    "steps": generation.stats.steps, "same": chosen == generation.tokens, "said": said,
    "grown": grown, "cache": cache.capacity * row,
}))
"""


@pytest.mark.timeout(900)
def test_decoding_from_8000_to_8192_tokens_stops_cleanly(c_kernels):
    run = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, check=True)
    result = json.loads(run.stdout.splitlines()[-1])
    assert (result["prompt"], result["new"], result["reason"]) == (8000, 192, "capacity")
    assert result["same"] and result["steps"] < 192
    [said] = result["said"]
    assert said.startswith("memory for 1 x ") and "cache" in said
    # One cache and a chunk's passes: nothing of the square of the context, nothing of context x vocabulary, which would
    # be 256 MiB a head in bf16 and 768 MiB.
    assert result["cache"] < result["grown"] < result["cache"] + 2**28, result


@pytest.mark.nightly(of="positions")
@pytest.mark.timeout(1800)
def test_drafters_of_long_contexts_are_exact_after_32768_positions(shared, plain_tokens):
    """Two layers of SmolLM2 with two of nine heads, a quarter of the MLP and more positions, on text of Python's own
    library; fp32."""
    smollm2 = shared("infer/test_smollm2.py")
    whole = load_target("smollm2-135m", torch.float32)
    config = replace(whole.model.config, n_layers=2, n_heads=2, n_kv_heads=1, max_positions=33_000)
    config = replace(config, intermediate_size=384)
    model = build_decoder(config, torch.float32, "cpu")
    kept = {  # of a layer's weights
        "qkv_proj": lambda x: x[[*range(128), *range(576, 640), *range(768, 832)]],
        "o_proj": lambda x: x[:, :128],
        "gate_up_proj": lambda x: x[[*range(384), *range(1536, 1920)]],
        "down_proj": lambda x: x[:, :384],
    }
    weights = whole.model.state_dict().items()
    parts = {name: kept.get(name.split(".")[-2], lambda x: x)(x) for name, x in weights}
    model.load_state_dict(parts, strict=False)
    model.tie()
    target = replace(whole, model=model)
    sources = (path.read_text() for path in sorted(Path(argparse.__file__).parent.glob("*.py"))[:40])
    prompt = target.tokenizer("".join(sources)).input_ids[:32_769]
    params = [SamplingParams(temperature=1.0, seed=2, max_new_tokens=48, ignore_eos=True)]
    plain = plain_tokens(target, [prompt], params)
    assert len(prompt) == 32_769 and len(set(plain[0])) > 8
    drafters = {
        "tokenswift": TokenSwiftDrafter(target, smollm2.heads(target), draft_pass="always", budget=1024),
        "triforce": TriForceDrafter(target, smollm2.first_layers(target, 1), budget=1024),
        "longspec": LongSpecDrafter(target, smollm2.block(target), (4, 4)),
    }
    for name, drafter in drafters.items():
        [found] = Engine(target, drafter, nodes=None).generate([prompt], params)
        assert found.tokens == plain[0], name
        assert found.stats.steps < len(found.tokens), f"{name} drafted nothing that was accepted"
