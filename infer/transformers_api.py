"""transformers' `model.generate` on our engine: the same arguments, types and shapes, in fewer steps.

Greedy tokens are those of `model.generate`, in half precision up to the rounding of nearly equal logits. Sampled tokens
follow the same distribution, with our own noise. Whatever a configuration asks for that is not a field of `Supported`
is refused by name; nothing is ignored. The model is converted in models/from_transformers.py.
Shapes: B prompts, R rows (each prompt num_return_sequences times), P prompt tokens with padding, T = P + the longest
row's new tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from weakref import WeakKeyDictionary

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from longdraft.infer.drafters.base import Drafter
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.models.draft_folder import draft_method
from longdraft.models.from_transformers import refresh, target_from_transformers
from longdraft.models.hf import load_tokenizer
from longdraft.models.hf_config import decoder_config
from longdraft.models.schema import Bool, Float, Instance, Int, Schema, Str, validate, validated
from longdraft.models.target import Target

DEFAULT_DRAFTER = "token_recycling"
# Values of unsupported fields that change nothing, besides None, False and transformers' defaults.
NEUTRAL = {"use_cache": True, "guidance_scale": 1, "cache_implementation": "dynamic"}
# transformers itself ignores these without do_sample.
SAMPLING_ONLY = ("top_h", "typical_p", "epsilon_cutoff")
# Numbers that SamplingParams takes as they are.
PASSED_ON = ("temperature", "top_k", "top_p", "min_p", "eta_cutoff")


def _as_list(ids: Any) -> Any:
    """Token ids in any form in which a configuration has them, as a list of integers."""
    ids = ids.tolist() if isinstance(ids, Tensor) else ids
    return [] if ids is None else [ids] if isinstance(ids, int) else ids


TokenIds = Annotated[tuple[Int, ...], BeforeValidator(_as_list)]
Count = Annotated[Int, Field(ge=1)]


class Supported(Schema):
    """The fields of GenerationConfig that are supported. disable_compile says nothing about the result."""

    max_length: Count | None = None
    max_new_tokens: Count | None = None
    min_length: Int | None = None
    min_new_tokens: Int | None = None
    stop_strings: str | list[str] | None = None
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
    return_dict_in_generate: Bool | None = None
    disable_compile: Any = None


@validated
def generate(
    model: Any,
    input_ids: Instance[Tensor] | None = None,
    attention_mask: Instance[Tensor] | None = None,
    generation_config: Instance[GenerationConfig] | None = None,
    *,
    tokenizer: Any = None,
    streamer: Any = None,
    drafter: Str | Instance[Drafter] = DEFAULT_DRAFTER,
    draft: Any = None,
    options: Mapping[Str, Any] | None = None,
    seed: Any = None,
    **kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Generate as `model.generate` does, with a drafter.

    Some of the model's weights are copied once (see `target_from_transformers`) and kept, with an engine and its cache,
    as long as the model lives or until `forget(model)`. Every call compares the copies with the model's own weights,
    so it notices training in between, however that writes.

    Args:
        model: a loaded transformers model of a supported architecture.
        input_ids: int [B, P], padded on the left. None starts with the BOS token.
        attention_mask: [B, P], 0 on padding. None: inferred from pad_token_id as transformers does, else all ones.
        generation_config, kwargs: as for `model.generate`. kwargs take precedence, and the model's own
            generation_config supplies what neither says.
        tokenizer: needed with stop_strings, and with a draft folder, which is checked against it.
        streamer: receives the prompt and then every token; for a single row only.
        drafter, draft, options: as for `Engine`. A Drafter instance serves one call at a time.
        seed: the first row's; row i has seed + i. None draws the seeds from torch's generator (`torch.manual_seed`).

    Returns:
        int64 [R, T] on the device of input_ids. Rows that ended early are filled with pad_token_id, or with the first
        end token if there is none. With return_dict_in_generate, a GenerateDecoderOnlyOutput with `sequences` alone.

    Raises:
        ValueError: an unsupported model or field, padding that is not on the left, or a length beyond the model's
            positions.
    """
    _supported(kwargs)  # before transformers, which computes with unchecked values
    lengths = [source.max_length for source in (generation_config, model.generation_config) if source is not None]
    default_length = all(length is None for length in (*lengths, kwargs.get("max_length")))
    merged, unknown = model._prepare_generation_config(generation_config, **kwargs)
    _refuse_unsupported(merged, unknown)
    config = _supported(vars(merged))
    ends = config.eos_token_id
    pad = config.pad_token_id if config.pad_token_id is not None or not ends else ends[0]
    ids_BP, prompts = _read_prompts(model, input_ids, attention_mask, config.bos_token_id, pad, ends)
    copies = config.num_return_sequences or 1
    ids_RP, prompts = ids_BP.repeat_interleave(copies, 0), [prompt for prompt in prompts for _ in range(copies)]
    if streamer is not None and len(prompts) > 1:
        raise ValueError(f"streamer: it shows one sequence, and {len(prompts)} were asked for; leave it out")
    if isinstance(draft, str | Path) and tokenizer is None:
        raise ValueError("tokenizer: a draft folder is checked against the model's tokenizer; give it too")
    stopped = _stop_strings(config.stop_strings, tokenizer, ids_RP, ends)
    kept = _keep(model, None if draft is None else tokenizer)
    new = _new_tokens(config, default_length, ids_BP.shape[1], max(map(len, prompts)), kept.target)
    params = _sampling(config, new, seed, len(prompts), ids_BP.shape[1], kept.target)
    with kept.engine(drafter, draft, options) as engine:
        if streamer is not None:
            streamer.put(ids_RP.cpu())
        rows = _decode(engine, prompts, params, stopped, streamer)
    if streamer is not None:
        streamer.end()
    sequences = _padded(ids_RP, rows, pad)
    return GenerateDecoderOnlyOutput(sequences=sequences) if config.return_dict_in_generate else sequences  # type: ignore[arg-type]


def _supported(values: Mapping[str, Any]) -> Supported:
    """The supported ones among these fields, checked. Raises ValueError, which begins with the field."""
    return validate(Supported, {name: value for name, value in values.items() if name in Supported.model_fields})


def _refuse_unsupported(config: GenerationConfig, kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError for the first field that asks for something and is not supported. kwargs: those without a field
    in GenerationConfig."""
    neutral = GenerationConfig._get_default_generation_params() | NEUTRAL
    fields = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    read = {*Supported.model_fields, "transformers_version", *(() if config.do_sample else SAMPLING_ONLY)}
    for name, value in sorted({**fields, **kwargs}.items()):
        off = neutral.get(name, False)
        asks = value is not None and value is not off and (isinstance(value, Tensor) or value not in (off, []))
        if asks and name not in read:
            raise ValueError(f"{name}: not supported here; leave it out, or use model.generate")


def generate_with_draft(
    draft: str, model: Any, inputs: Tensor | None = None, input_ids: Tensor | None = None, **kwargs: Any
) -> Tensor | GenerateDecoderOnlyOutput:
    """Call `generate` with a draft folder or hub name, and with the model's own tokenizer if none is given.

    A draft's custom_generate/generate.py calls it with the arguments of `model.generate`.
    """
    tokenizer = kwargs.pop("tokenizer", None)
    if tokenizer is None:
        kept = _KEPT.get(model)
        tokenizer = kept and kept.target.tokenizer
    tokenizer = tokenizer or load_tokenizer(model.name_or_path)
    prompt = inputs if input_ids is None else input_ids
    return generate(model, prompt, tokenizer=tokenizer, drafter=draft_method(draft), draft=draft, **kwargs)


def forget(model: Any) -> None:
    """Free what `generate` keeps for this model: copied weights, engine and cache."""
    _KEPT.pop(model, None)


class _Kept:
    """A model's target, and the last call's engine with its cache and what its drafter and policy have learned."""

    def __init__(self, target: Target):
        self.target = target
        self._key, self._engine = (), None

    @contextmanager
    def engine(self, drafter: str | Drafter, draft: Any, options: Mapping[str, Any] | None) -> Iterator[Engine]:
        """The engine for these arguments. Calls that run at the same time, in several threads, have one each."""
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
    """What is kept for this model, up to date with its weights. It is made anew if the model has changed otherwise."""
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


def _read_prompts(
    model: Any, input_ids: Tensor | None, mask: Tensor | None, bos: int | None, pad: int | None, ends: Sequence[int]
) -> tuple[Tensor, list[list[int]]]:
    """input_ids [B, P] and each row's tokens without padding."""
    if input_ids is None:
        if bos is None:
            raise ValueError("input_ids: not given, and there is no bos_token_id to begin with; give one of them")
        input_ids = torch.tensor([[bos]], device=model.get_input_embeddings().weight.device)
    if input_ids.dtype not in (torch.int64, torch.int32) or input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ValueError(f"input_ids: {input_ids.dtype} {list(input_ids.shape)}; give integer ids [batch, length]")
    if mask is None:
        inferred = pad is not None and pad not in ends
        mask, name = input_ids != pad if inferred else torch.ones_like(input_ids), "inferred from pad_token_id"
    else:
        name = "as given"
    if mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask: {list(mask.shape)}, and input_ids is {list(input_ids.shape)}; give the same")
    is_token = mask != 0
    counts, places = is_token.sum(1), torch.arange(mask.shape[1], device=mask.device)
    if not counts.all() or not torch.equal(is_token, places >= mask.shape[1] - counts[:, None]):
        raise ValueError(
            f"attention_mask ({name}): zeros may only come before a prompt's tokens, and a prompt has at least one; "
            "pad with padding_side='left', and give the mask where the pad token is also text"
        )
    return input_ids, [row[-count:] for row, count in zip(input_ids.tolist(), counts.tolist(), strict=True)]


def _new_tokens(config: Supported, default: bool, width: int, longest: int, target: Target) -> int:
    """The new tokens that were asked for: max_new_tokens, else max_length, else transformers' 20. `width` is that of
    input_ids with padding, `longest` the length of the longest prompt."""
    positions, length = target.model.config.max_positions, config.max_length or 20
    if config.max_new_tokens is not None:
        name, new = f"max_new_tokens={config.max_new_tokens}", config.max_new_tokens
    elif default:
        name, new = "the default length", min(length, positions - width)
    else:
        name, new = f"max_length={length}", length - width
    if new < 1 or longest + new > positions:
        raise ValueError(
            f"{name}: input_ids has {width} tokens with its padding, the longest prompt {longest}, and the model "
            f"{positions} positions; ask for 1 to {positions - longest} new tokens"
        )
    return new


def _sampling(
    config: Supported, new: int, seed: int | None, count: int, width: int, target: Target
) -> list[SamplingParams]:
    """One SamplingParams for each row. End tokens and suppressed tokens outside the vocabulary are left out."""
    names = ["repetition_penalty", *(PASSED_ON if config.do_sample else ())]
    ends, banned = (
        tuple(token for token in ids if 0 <= token < target.model.config.vocab_size)
        for ids in (config.eos_token_id, config.suppress_tokens)
    )
    least = (config.min_length or 0) - width if config.min_new_tokens is None else config.min_new_tokens
    fixed = {name: value for name in names if (value := getattr(config, name)) is not None}
    fixed |= {"max_new_tokens": new, "min_new_tokens": max(0, least), "banned_token_ids": banned}
    fixed |= {"stop_token_ids": ends, "ignore_eos": True}  # the end tokens are the configuration's, not the target's
    if not config.do_sample:
        return [SamplingParams(**fixed)] * count
    if fixed.setdefault("temperature", 1.0) <= 0:
        raise ValueError(f"temperature={config.temperature}: with do_sample it must be above 0; give do_sample=False")
    params = SamplingParams(**fixed, seed=seed)
    if seed is None:
        seeds = torch.randint(2**63 - 1, (count,)).tolist()
    else:
        seeds = [seed + i - 2**64 * (seed + i >= 2**64) for i in range(count)]
    return [replace(params, seed=row_seed) for row_seed in seeds]


def _stop_strings(
    strings: str | list[str] | None, tokenizer: Any, ids_RP: Tensor, ends: Sequence[int]
) -> Callable[[int, list[int]], bool] | None:
    """A function (row, its new tokens) -> whether the last token completes a stop string, by transformers' own rule.

    That rule also finds strings that begin in the prompt, and strings of special tokens.
    """
    if not strings:
        return None
    if tokenizer is None:
        raise ValueError(f"stop_strings={strings!r}: they need the model's tokenizer; pass tokenizer=")
    if len(ids_RP) > 1 and not ends:
        raise ValueError(
            f"stop_strings={strings!r}: with several rows and no eos_token_id, transformers goes on after "
            "them; set an eos_token_id, or give one prompt a call"
        )
    criterion, prompts = StopStringCriteria(tokenizer, strings), ids_RP.tolist()
    reach = criterion.maximum_token_len

    def stopped(row: int, new: list[int]) -> bool:
        last = (prompts[row] + new)[-reach:] if len(new) < reach else new[-reach:]
        return bool(criterion(torch.tensor([last]), None)[0])  # type: ignore[arg-type]

    return stopped


def _decode(
    engine: Engine,
    prompts: list[list[int]],
    params: list[SamplingParams],
    stopped: Callable[[int, list[int]], bool] | None,
    streamer: BaseStreamer | None,
) -> list[list[int]]:
    """Decode, and return every row's new tokens."""
    rows: list[list[int]] = [[] for _ in prompts]
    ended: set[int] = set()
    for piece in engine.stream(prompts, params):
        for token in piece.tokens:
            if piece.index in ended:
                break
            rows[piece.index].append(token)
            if streamer is not None:
                streamer.put(torch.tensor([token]))
            if stopped is not None and stopped(piece.index, rows[piece.index]):
                ended.add(piece.index)
                engine.cancel(piece.index)
    return rows


def _padded(ids_RP: Tensor, rows: list[list[int]], pad: int | None) -> Tensor:
    """Prompts and new tokens, with shorter rows padded: int64 [R, T]."""
    longest = max(map(len, rows))
    # Without an end token no row ends early, and there is nothing to pad.
    assert pad is not None or all(len(row) == longest for row in rows)
    new = torch.tensor([row + [pad or 0] * (longest - len(row)) for row in rows], device=ids_RP.device)
    return torch.cat([ids_RP.long(), new], dim=1)
