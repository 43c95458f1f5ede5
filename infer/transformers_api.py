"""transformers' `model.generate` on our engine: the same arguments, types and shapes, in fewer steps.

Greedy tokens are those of `model.generate`, in half precision up to the rounding of nearly equal logits. Sampled tokens
follow the same distribution, with our own noise. A configuration's fields outside `Supported` are refused by name if
they would have an effect; nothing is ignored. The model is converted in models/hf.py.
Shapes: B prompts, R rows (each prompt num_return_sequences times), P prompt tokens with padding, T = P + the longest
row's new tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any
from weakref import WeakKeyDictionary

import torch
from pydantic import BeforeValidator
from torch import Tensor
from transformers import GenerationConfig

from longdraft.infer.drafters.base import Count, Drafter
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.models.draft_folder import draft_method
from longdraft.models.hf import load_tokenizer, refresh, target_from_transformers
from longdraft.models.hf_config import decoder_config
from longdraft.models.schema import Bool, Float, Instance, Int, Schema, Str, validate, validated
from longdraft.models.target import Target

DEFAULT_DRAFTER = "token_recycling"
_own_tokenizer = cache(load_tokenizer)
# Numbers that SamplingParams takes unchanged.
PASSED_ON = ("temperature", "top_k", "top_p", "min_p", "eta_cutoff")


def _as_list(ids: Any) -> Any:
    """A configuration's token ids or strings, in any of their forms, as a list."""
    ids = ids.tolist() if isinstance(ids, Tensor) else ids
    return [] if ids is None else [ids] if isinstance(ids, int | str) else ids


TokenIds = Annotated[tuple[Int, ...], BeforeValidator(_as_list)]


class Supported(Schema):
    """The fields of GenerationConfig that are supported."""

    max_length: Count | None = None
    max_new_tokens: Count | None = None
    min_new_tokens: Int | None = None
    stop_strings: Annotated[tuple[Str, ...], BeforeValidator(_as_list)] = ()
    eos_token_id: TokenIds = ()
    pad_token_id: Int | None = None
    bos_token_id: Int | None = None
    do_sample: Bool | None = None
    temperature: Float | None = None
    top_k: Int | None = None
    top_p: Float | None = None
    min_p: Float | None = None
    eta_cutoff: Float | None = None
    repetition_penalty: Float | None = None
    suppress_tokens: TokenIds = ()
    num_return_sequences: Count | None = None


@validated
@torch.inference_mode(False)  # the copies are kept, and also written outside the caller's inference mode
def generate(
    model: Any,
    input_ids: Instance[Tensor],
    attention_mask: Instance[Tensor] | None = None,
    generation_config: Instance[GenerationConfig] | None = None,
    *,
    tokenizer: Any = None,
    drafter: Str | Instance[Drafter] = DEFAULT_DRAFTER,
    draft: Any = None,
    options: Mapping[Str, Any] | None = None,
    seed: Any = None,
    **kwargs: Any,
) -> Tensor:
    """Generate as `model.generate` does, with a drafter.

    Some of the model's weights are copied once (see `target_from_transformers`) and kept, with an engine and its cache,
    as long as the model lives or until `forget(model)`. Every call compares the copies with the model's own weights, so
    it notices any training in between.

    Args:
        model: a loaded transformers model of a supported architecture.
        input_ids: int [B, P], padded on the left.
        attention_mask: [B, P], 0 on padding. None: inferred from pad_token_id as transformers does, else all ones.
        generation_config, kwargs: as for `model.generate`. kwargs take precedence, and the model's own
            generation_config supplies the rest.
        tokenizer: needed with stop_strings, and with a draft folder, which is checked against it.
        drafter, draft, options: as for `Engine`. A Drafter instance serves one call at a time.
        seed: the first row's; row i has seed + i. None draws the seeds from torch's generator (`torch.manual_seed`).

    Returns:
        int64 [R, T] on the device of input_ids. Rows that ended early are filled with pad_token_id, or with the first
        end token or 0 if there is none.

    Raises:
        ValueError: an unsupported model or field, padding that is not on the left, or a length beyond the model's
            positions.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    given = vars(model._prepare_generation_config(generation_config)[0]) | kwargs
    config = _supported(given)
    lengths = [source.max_length for source in (generation_config, model.generation_config) if source is not None]
    default_length = all(length is None for length in (*lengths, kwargs.get("max_length")))
    prompts = _read_prompts(input_ids, attention_mask, config.pad_token_id, config.eos_token_id)
    copies = config.num_return_sequences or 1
    ids_RP, prompts = input_ids.repeat_interleave(copies, 0), [prompt for prompt in prompts for _ in range(copies)]
    reads_text = isinstance(draft, str | Path) or config.stop_strings
    if reads_text and tokenizer is None:
        raise ValueError("tokenizer: stop_strings and draft folders need the model's tokenizer; give it too")
    kept = _keep(model, tokenizer if reads_text else None)
    width, longest = input_ids.shape[1], max(map(len, prompts))
    shape = kept.target.model.config
    new = _new_tokens(config, default_length, width, longest, shape.max_positions)
    params = _sampling(config, new, seed, len(prompts), shape.vocab_size)
    with kept.engine(drafter, draft, options) as engine:
        rows = [generation.tokens for generation in engine.generate(prompts, params)]
    # Prompts and new tokens, with shorter rows filled.
    pad = config.pad_token_id if config.pad_token_id is not None else next(iter(config.eos_token_id), 0)
    longest = max(map(len, rows))
    new_RT = torch.tensor([row + [pad] * (longest - len(row)) for row in rows], device=ids_RP.device)
    return torch.cat([ids_RP.long(), new_RT], dim=1)


def _supported(values: Mapping[str, Any]) -> Supported:
    """The fields of a configuration, checked. Raises ValueError for the first unsupported field whose value is not
    None, False, an empty list or transformers' default."""
    defaults, asked = GenerationConfig._get_default_generation_params(), {}
    for name, value in sorted(values.items()):
        off = value is None or value is False or (not isinstance(value, Tensor) and value in ([], defaults.get(name)))
        if name in Supported.model_fields:
            asked[name] = value
        elif not off and not name.startswith("_") and name != "transformers_version":
            raise ValueError(f"{name}: not supported here; omit it, or use model.generate")
    return validate(Supported, asked)


def generate_with_draft(
    draft: str, model: Any, inputs: Tensor | None = None, input_ids: Tensor | None = None, **kwargs: Any
) -> Tensor:
    """Call `generate` with a draft folder or hub name, and with the model's own tokenizer if none is given.

    A draft's custom_generate/generate.py calls it with the arguments of `model.generate`.
    """
    tokenizer = kwargs.pop("tokenizer", None) or _own_tokenizer(model.name_or_path)
    prompt: Any = inputs if input_ids is None else input_ids
    return generate(model, prompt, tokenizer=tokenizer, drafter=draft_method(draft), draft=draft, **kwargs)


def forget(model: Any) -> None:
    """Free what `generate` keeps for this model: copied weights, engine and cache."""
    _KEPT.pop(model, None)


class _Kept:
    """A model's target, and the last call's engine with its cache, drafter and policy."""

    def __init__(self, target: Target):
        self.target = target
        self._key, self._engine = (), None

    @contextmanager
    def engine(self, drafter: str | Drafter, draft: Any, options: Mapping[str, Any] | None) -> Iterator[Engine]:
        """The engine for these arguments. Concurrent calls in several threads get one each."""
        key = drafter, draft, dict(options or {})
        engine = self._engine if self._key == key else None
        if engine is None:
            self._engine = None  # its cache is freed first
            engine = Engine(self.target, drafter, draft, options=options, keep_prompts=False)
        self._key, self._engine = (), None
        yield engine
        self._key, self._engine = key, engine


_KEPT: WeakKeyDictionary[Any, _Kept] = WeakKeyDictionary()


def _keep(model: Any, tokenizer: Any) -> _Kept:
    """What is kept for this model, with its current weights. It is rebuilt if the model has changed otherwise."""
    kept, weight = _KEPT.get(model), model.get_input_embeddings().weight
    if kept is not None:
        target, copy = kept.target, kept.target.model.embed_tokens.weight
        same = (copy.dtype, copy.device) == (weight.dtype, weight.device) and tokenizer in (None, target.tokenizer)
        if same and target.model.config == decoder_config(model.config):
            refresh(target, model)
            return kept
    forget(model)
    kept = _KEPT[model] = _Kept(target_from_transformers(model, tokenizer))
    return kept


def _read_prompts(input_ids: Tensor, mask: Tensor | None, pad: int | None, ends: Sequence[int]) -> list[list[int]]:
    """Each row's tokens without padding."""
    if input_ids.dtype not in (torch.int64, torch.int32) or input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ValueError(f"input_ids: {input_ids.dtype} {list(input_ids.shape)}; give integer ids [batch, length]")
    if mask is None:
        mask = input_ids != pad if pad is not None and pad not in ends else torch.ones_like(input_ids)
    if mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask: {list(mask.shape)}, but input_ids is {list(input_ids.shape)}; give the same")
    is_token = mask != 0
    counts, places = is_token.sum(1), torch.arange(mask.shape[1], device=mask.device)
    if not counts.all() or not torch.equal(is_token, places >= mask.shape[1] - counts[:, None]):
        raise ValueError(
            "attention_mask: zeros may only come before a prompt's tokens, and a prompt has at least one; pad with "
            "padding_side='left', and give the mask where the pad token is also text"
        )
    return [row[-count:] for row, count in zip(input_ids.tolist(), counts.tolist(), strict=True)]


def _new_tokens(config: Supported, default: bool, width: int, longest: int, positions: int) -> int:
    """The number of new tokens to generate: max_new_tokens, else max_length, else transformers' 20. `width` is that of
    input_ids with padding, `longest` the length of the longest prompt."""
    name, length = "max_new_tokens", config.max_length or 20
    new = config.max_new_tokens
    if new is None:
        name, new = "max_length", min(length, positions - width) if default else length - width
    if new < 1 or longest + new > positions:
        raise ValueError(f"{name}: {new} new tokens; give 1 to {positions - longest}, the positions after the prompt")
    return new


def _sampling(config: Supported, new: int, seed: int | None, count: int, vocab_size: int) -> list[SamplingParams]:
    """One SamplingParams for each row. End tokens outside the vocabulary, such as -1, are skipped."""
    names = ["repetition_penalty", *(PASSED_ON if config.do_sample else ())]
    ends = tuple(token for token in config.eos_token_id if 0 <= token < vocab_size)
    fixed = {name: value for name in names if (value := getattr(config, name)) is not None}
    fixed |= {
        "max_new_tokens": new,
        "min_new_tokens": config.min_new_tokens or 0,
        "banned_token_ids": config.suppress_tokens,
    }
    # The end tokens are the configuration's, not the target's.
    fixed |= {"stop_strings": config.stop_strings, "stop_token_ids": ends, "ignore_eos": True}
    if not config.do_sample:
        return [SamplingParams(**fixed)] * count
    params = SamplingParams(**{"temperature": 1.0, **fixed}, seed=seed)
    seeds = torch.randint(2**63 - 1, (count,)).tolist() if seed is None else range(seed, seed + count)
    return [replace(params, seed=row_seed) for row_seed in seeds]
