"""Draft folders in vLLM's own engine: SmolLM2 on a CPU in fp32, held against this runtime with the same draft.

vLLM needs an environment of its own: `launch/vllm_check.sh` makes it and runs these tests there.
"""

from collections.abc import Iterator
from pathlib import Path
from runpy import run_path
from statistics import __file__ as PROSE
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here; launch/vllm_check.sh runs this")

from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.models.draft_folder import SHIPPED, DraftInfo, save_draft, target_entry
from longdraft.models.drafts.heads import Medusa, MedusaConfig, TokenSwift, TokenSwiftConfig
from longdraft.models.drafts.longspec import LongSpec, LongSpecConfig
from longdraft.models.hf import load_target

# The benchmark of vLLM is not installed, since it is for developers.
PEER = run_path(str(Path(__file__).parents[2] / "benchmarks/checks/peers.py"))
TOKENS = 80
CHAIN = {"shape": [1, 1, 1]}
# method of vLLM, our drafter and its options for a chain of one token a level
SERVED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "linear_chain": ("eagle3", "tokenswift", CHAIN | {"ngrams": 0, "draft_pass": "never"}),
    "silu_chain": ("eagle", "tokenswift", CHAIN | {"ngrams": 0, "draft_pass": "never"}),
    "medusa": ("eagle", "medusa", CHAIN),
    "longspec": ("eagle", "longspec", {"widths": [1, 1, 1]}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """SmolLM2-135M-Instruct as a folder that vLLM reads; the package holds it as a GGUF file."""
    folder = tmp_path_factory.mktemp("smollm2")
    PEER["write_checkpoint"](folder, torch.float32)
    return folder


@pytest.fixture(scope="module")
def target(checkpoint):
    return load_target(checkpoint, torch.float32)


@pytest.fixture(scope="module")
def prompts(target) -> list[list[int]]:
    """Longer than the block's window: of a shorter text vLLM gives it all but the first token."""
    text = Path(PROSE).read_text(encoding="utf-8")
    ids = target.tokenizer(text, add_special_tokens=False).input_ids
    return [ids[:700], ids[3000:3640]]


@pytest.fixture(scope="module")
def plain(target, prompts) -> list[list[int]]:
    return [one.tokens for one in Engine(target).generate(prompts, greedy())]


@pytest.fixture(scope="module")
def drafts(tmp_path_factory, target, plain) -> dict[str, Path]:
    """The two that come with longdraft; of the others untrained ones for few tokens, which are right now and then."""
    folder, shape = tmp_path_factory.mktemp("drafts"), target.model.config
    width, eps = shape.hidden_size, shape.rms_norm_eps
    counts = torch.tensor(plain).flatten().bincount()
    ids_E, drawn = counts.topk(6).indices, torch.Generator().manual_seed(2)
    silu = TokenSwiftConfig(width, eps, kind="silu_chain", init_std=0.1, draft_vocab_size=6)
    made = {
        "silu_chain": TokenSwift(silu, drawn, token_ids_E=ids_E),
        "medusa": Medusa(MedusaConfig(width, init_std=0.1, draft_vocab_size=6), drawn, ids_E),
    }
    info = DraftInfo(target_entry(target), 64, {"levels": [1, 1, 1]}, {}, {})
    for name, draft in made.items():
        save_draft(folder / name, draft, info)
    shipped = {"linear_chain": SHIPPED / "smollm2-135m-tokenswift", "longspec": SHIPPED / "smollm2-135m-longspec"}
    return shipped | {name: folder / name for name in made}


def greedy() -> SamplingParams:
    return SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)


@pytest.fixture
def vllm(checkpoint, monkeypatch) -> Iterator[Any]:
    """vLLM's engine on this checkpoint, in this process, with these speculative settings."""
    for name, value in PEER["ENVIRONMENT"].items():
        monkeypatch.setenv(name, value)
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    options: dict[str, Any] = {
        "dtype": "float32", "max_model_len": 2048, "max_num_seqs": 4, "enforce_eager": True,
        "disable_log_stats": False, "enable_prefix_caching": False, "max_num_batched_tokens": 512,
    }  # fmt: skip
    yield lambda **speculation: LLM(str(checkpoint), speculative_config=speculation or None, **options)


def answers(llm: Any, prompts: list[list[int]]) -> list[list[int]]:
    from vllm import SamplingParams as Theirs  # pyright: ignore[reportMissingImports]

    given = [{"prompt_token_ids": ids} for ids in prompts]
    params = Theirs(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    return [list(one.outputs[0].token_ids) for one in llm.generate(given, params, use_tqdm=False)]


def accepted(llm: Any) -> tuple[int, list[int]]:
    """Drafts so far, and how many of their tokens were accepted at each place."""
    found = {metric.name: metric for metric in llm.get_metrics()}
    places = found["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    return found["vllm:spec_decode_num_drafts"].value, list(places)


def test_it_decodes_our_own_text_without_a_draft(vllm, prompts, plain):
    assert answers(vllm(), prompts) == plain


@pytest.mark.parametrize("kind", SERVED)
def test_the_same_text_and_as_much_accepted_as_here(kind, vllm, target, prompts, plain, drafts):
    """Prompts are read in chunks, two sequences share the passes; each place may differ by a near tie of the draft."""
    method, drafter, options = SERVED[kind]
    found = Engine(target, drafter, drafts[kind], nodes=None, options=options).generate(prompts, greedy())
    ours = [sum(sum(one.stats.accepted_at_depth[place : place + 1]) for one in found) for place in range(3)]
    llm = vllm(method=method, model=str(drafts[kind]), num_speculative_tokens=3)
    assert answers(llm, prompts) == plain == [one.tokens for one in found]
    steps, theirs = accepted(llm)
    assert theirs[0] > 0 and sum(theirs) >= TOKENS * 2 - steps - 4
    assert all(abs(a - b) <= 1 for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


def test_what_cannot_be_served_is_refused_with_the_remedy(vllm, drafts, target, tmp_path):
    def refused(match: str, **speculation: Any) -> None:
        with pytest.raises(ValueError, match=match):
            vllm(**speculation)

    heads = {"model": str(drafts["linear_chain"]), "num_speculative_tokens": 3}
    refused("method: eagle, but .* needs eagle3; give that", method="eagle", **heads)
    refused("6, but the draft has 3 heads", method="eagle3", **heads | {"num_speculative_tokens": 6})
    config = LongSpecConfig.for_target(target.model.config, draft_vocab_size=6)
    scaled = LongSpecConfig(**vars(config) | {"rope": {"rope_type": "dynamic", "rope_theta": 1e5, "factor": 2.0}})
    save_draft(tmp_path / "rope", LongSpec(scaled), DraftInfo(target_entry(target), 64, {}, {}, {}))
    refused(
        "type dynamic depends on the length", method="eagle", model=str(tmp_path / "rope"), num_speculative_tokens=2
    )
