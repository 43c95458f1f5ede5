"""transformers' `model.generate` with the engine behind it: the same arguments, types and shapes, in fewer steps.

Greedy tokens are those of `model.generate` (in half precision up to the rounding of nearly equal logits); sampled ones
follow the same distribution from a noise of our own. What a configuration asks for and this engine does not do is
refused by name, nothing is ignored. Not here: the conversion of the model (models/from_transformers.py).
Shapes: B prompts, R rows (each prompt num_return_sequences times), P prompt tokens with padding, T = P + the longest
row's new tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from longdraft.infer.drafters.base import Drafter
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.values import is_integer, is_number, short_repr
from longdraft.models.draft_folder import draft_method
from longdraft.models.from_transformers import refresh, target_from_transformers
from longdraft.models.hf import load_tokenizer
from longdraft.models.hf_config import decoder_config
from longdraft.models.target import Target

DEFAULT_DRAFTER = "token_recycling"
# The fields of GenerationConfig that are done here, and one that says nothing about the result.
DONE = frozenset(
    {
        *("max_length", "max_new_tokens", "stop_strings", "eos_token_id", "pad_token_id", "bos_token_id"),
        *("do_sample", "temperature", "top_k", "top_p", "min_p", "eta_cutoff", "repetition_penalty", "suppress_tokens"),
        *("num_return_sequences", "return_dict_in_generate", "disable_compile"),
    }
)
# transformers itself does not look at these without do_sample.
SAMPLING_ONLY = frozenset({"top_h", "typical_p", "epsilon_cutoff"})
# Values besides None, False and transformers' defaults that leave everything as it is.
NEUTRAL = {"guidance_scale": 1, "penalty_alpha": 0, "cache_implementation": "dynamic"}
# Whole numbers, and the least that each may be.
LEAST = {"max_new_tokens": 1, "max_length": 1, "num_return_sequences": 1}
REAL = ("temperature", "top_p", "min_p", "eta_cutoff", "repetition_penalty")
REMEDIES = {
    "bad_words_ids": "single tokens can be banned by suppress_tokens",
    "min_length": "suppress_tokens with the end tokens goes on to the full length",
    "min_new_tokens": "suppress_tokens with the end tokens goes on to the full length",
    "assistant_model": "a drafter does that; name one by drafter=",
    "prompt_lookup_num_tokens": "a drafter does that: drafter='prompt_lookup'",
    "use_cache": "decoding always keeps a cache",
    "inputs": "the prompt is input_ids here",
}


def generate(
    model: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    tokenizer: Any = None,
    streamer: BaseStreamer | None = None,
    drafter: str | Drafter = DEFAULT_DRAFTER,
    draft: Any = None,
    options: Mapping[str, Any] | None = None,
    seed: int | None = None,
    **kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Generate as `model.generate` does, with a drafter.

    Some of the model's weights are copied once (see `target_from_transformers`) and kept, with an engine and its cache,
    as long as the model lives or until `forget(model)`. Every call compares the copies with the model's own weights,
    so training in between is seen, however it writes.

    Args:
        model: a loaded transformers model of a supported architecture.
        input_ids: int [B, P], padded on the left; None begins with the BOS token.
        attention_mask: [B, P], 0 on padding. None: all ones, or inferred from pad_token_id as transformers does.
        generation_config, kwargs: as for `model.generate`; kwargs win, the model's own generation_config fills in.
        tokenizer: needed with stop_strings, and with a draft folder, which is checked against it.
        streamer: is given the prompt and then every token, of one row.
        drafter, draft, options: as for `Engine`; a Drafter instance serves one call at a time.
        seed: of the first row, the others count up; None draws them from torch's generator (`torch.manual_seed`).

    Returns:
        int64 [R, T] on the device of input_ids, rows that ended early filled with pad_token_id (else the first end
        token); with return_dict_in_generate as the `sequences` of a GenerateDecoderOnlyOutput that has nothing else.

    Raises:
        ValueError: an unsupported model, a field that is not done here, padding that is not on the left, or a length
            beyond the model's positions.
    """
    _check_kinds(model, input_ids, attention_mask, generation_config, streamer, options, kwargs)
    _check_fields(kwargs)  # before transformers, which compares and adds them as they are
    asked = [source.max_length for source in (generation_config, model.generation_config) if source is not None]
    default_length = all(length is None for length in (*asked, kwargs.get("max_length")))
    config, others = model._prepare_generation_config(generation_config, **kwargs)
    _refuse_what_is_not_done(config, others)
    _check_fields(vars(config))
    ends = _token_ids(config.eos_token_id)
    pad = config.pad_token_id if config.pad_token_id is not None or not ends else ends[0]
    ids_BP, prompts = _read_prompts(model, input_ids, attention_mask, config.bos_token_id, pad, ends)
    copies = 1 if config.num_return_sequences is None else config.num_return_sequences
    ids_RP, prompts = ids_BP.repeat_interleave(copies, 0), [prompt for prompt in prompts for _ in range(copies)]
    if streamer is not None and len(prompts) > 1:
        raise ValueError(f"streamer: it shows one sequence, and {len(prompts)} are asked for; leave it out")
    if isinstance(draft, str | Path) and tokenizer is None:
        raise ValueError("tokenizer: a draft folder is checked against the model's tokenizer; give it too")
    stopped = _stop_strings(config.stop_strings, tokenizer, ids_RP, ends)
    kept = _keep(model, None if draft is None else tokenizer)
    new = _new_tokens(config, default_length, ids_BP.shape[1], max(map(len, prompts)), kept.target)
    params = _sampling(config, ends, new, seed, len(prompts), kept.target)
    with kept.engine(drafter, draft, options) as engine:
        if streamer is not None:
            streamer.put(ids_RP.cpu())
        rows = _decode(engine, prompts, params, stopped, streamer)
    if streamer is not None:
        streamer.end()
    sequences = _padded(ids_RP, rows, pad)
    return GenerateDecoderOnlyOutput(sequences=sequences) if config.return_dict_in_generate else sequences  # type: ignore[arg-type]


def generate_with_draft(
    draft: str, model: Any, inputs: Tensor | None = None, input_ids: Tensor | None = None, **kwargs: Any
) -> Tensor | GenerateDecoderOnlyOutput:
    """What a draft's custom_generate/generate.py calls, with the arguments of `model.generate`: `generate` with this
    draft folder or hub name, and with the tokenizer that the model came with, where none is given."""
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
    """A model's target, and the engine of the last call: its cache and what its drafter and budget learned."""

    def __init__(self, target: Target):
        self.target = target
        self._key, self._engine = (), None

    @contextmanager
    def engine(self, drafter: str | Drafter, draft: Any, options: Mapping[str, Any] | None) -> Iterator[Engine]:
        """The engine for these arguments; calls of several threads at once have one each."""
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
    """What is kept for this model, up to date with its weights; made anew where it is another model by now."""
    kept, weight = _KEPT.get(model), model.get_input_embeddings().weight
    if kept is not None:
        target, own = kept.target, kept.target.model.embed_tokens.weight
        same = (own.dtype, own.device) == (weight.dtype, weight.device) and tokenizer in (None, target.tokenizer)
        if same and target.model.config == decoder_config(model.config):
            refresh(target, model)
            return kept
    forget(model)
    kept = _KEPT[model] = _Kept(target_from_transformers(model, tokenizer))
    return kept


def _check_kinds(
    model: Any, input_ids: Any, mask: Any, config: Any, streamer: Any, options: Any, kwargs: Mapping[str, Any]
) -> None:
    """Raise ValueError for the first argument that is not what `generate` takes under its name."""
    kinds = {
        "model": (hasattr(model, "generation_config"), model, "a loaded transformers model"),
        "input_ids": (isinstance(input_ids, Tensor | None), input_ids, "a tensor of integer ids [batch, length]"),
        "attention_mask": (isinstance(mask, Tensor | None), mask, "a tensor as input_ids is, 0 on padding"),
        "generation_config": (isinstance(config, GenerationConfig | None), config, "a GenerationConfig"),
        "streamer": (streamer is None or hasattr(streamer, "put"), streamer, "one of transformers' streamers"),
        "options": (isinstance(options, Mapping | None), options, "a dict of the drafter's options"),
        # transformers walks through these two before we see them.
        "suppress_tokens": _ids_of(kwargs, "suppress_tokens", single=False),
        "eos_token_id": _ids_of(kwargs, "eos_token_id", single=True),
    }
    for name, (fits, value, want) in kinds.items():
        if not fits:
            raise ValueError(f"{name}={short_repr(value)}: give {want}")


def _ids_of(kwargs: Mapping[str, Any], name: str, single: bool) -> tuple[bool, Any, str]:
    value = kwargs.get(name)
    listed = isinstance(value, Sequence) and not isinstance(value, str | bytes) and all(map(is_integer, value))
    fits = value is None or isinstance(value, Tensor) or listed or (single and is_integer(value))
    return fits, value, "a token id or a list of them" if single else "a list of token ids"


def _check_fields(values: Mapping[str, Any]) -> None:
    """Raise ValueError for the first field that is no number, or neither True nor False, where it must be."""
    given = {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        if name in LEAST and not (is_integer(value) and value >= LEAST[name]):
            raise ValueError(f"{name}={short_repr(value)}: give a whole number of at least {LEAST[name]}")
        if name in ("pad_token_id", "bos_token_id") and not is_integer(value):
            raise ValueError(f"{name}={short_repr(value)}: give a token id")
        if name in ("do_sample", "return_dict_in_generate") and not isinstance(value, bool):
            raise ValueError(f"{name}={short_repr(value)}: give True or False")
        if name in REAL and not is_number(value):
            raise ValueError(f"{name}={short_repr(value)}: give a number")


def _refuse_what_is_not_done(config: GenerationConfig, others: Mapping[str, Any]) -> None:
    """Raise for the first field that says something else than nothing and is not done here."""
    defaults = GenerationConfig._get_default_generation_params() | {"use_cache": True}
    known = vars(GenerationConfig()).keys() - DONE - {"transformers_version"}
    fields = {name: getattr(config, name) for name in sorted(known) if not name.startswith("_")}
    for name, value in fields.items():
        neutral = (defaults.get(name), NEUTRAL.get(name))
        if value is None or (value is False and name != "use_cache") or value in neutral:
            continue
        if name in SAMPLING_ONLY and not config.do_sample:
            continue
        raise ValueError(f"{name}={value!r} is not done here; {_remedy(name)}")
    for name, value in others.items():
        if value is not None and value is not False and not (isinstance(value, Sequence) and not value):
            raise ValueError(f"{name}: this argument is not taken here; {_remedy(name)}")


def _remedy(name: str) -> str:
    return f"{REMEDIES[name]}, or use model.generate" if name in REMEDIES else "leave it out, or use model.generate"


def _token_ids(ids: Any) -> list[int]:
    """Token ids as configurations write them."""
    ids = ids.tolist() if isinstance(ids, Tensor) else ids
    return [] if ids is None else [ids] if isinstance(ids, Integral) else list(ids)  # type: ignore[list-item]


def _read_prompts(
    model: Any, input_ids: Tensor | None, mask: Tensor | None, bos: int | None, pad: int | None, ends: list[int]
) -> tuple[Tensor, list[list[int]]]:
    """input_ids [B, P] and each row's tokens without its padding."""
    if input_ids is None:
        if bos is None:
            raise ValueError("input_ids: not given, and there is no bos_token_id to begin with; give one of them")
        input_ids = torch.tensor([[bos]], device=model.get_input_embeddings().weight.device)
    whole = input_ids.dtype in (torch.int64, torch.int32) and input_ids.dim() == 2
    if not whole or 0 in input_ids.shape:
        raise ValueError(f"input_ids: {input_ids.dtype} {list(input_ids.shape)}; give integer ids [batch, length]")
    if mask is None:
        inferred = pad is not None and pad not in ends
        mask, name = input_ids != pad if inferred else torch.ones_like(input_ids), "inferred from pad_token_id"
    else:
        name = "as given"
    if mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask: {list(mask.shape)}, and input_ids is {list(input_ids.shape)}; give the same")
    given = mask != 0
    counts, places = given.sum(1), torch.arange(mask.shape[1], device=mask.device)
    if not counts.all() or not torch.equal(given, places >= mask.shape[1] - counts[:, None]):
        raise ValueError(
            f"attention_mask ({name}): zeros may stand only before a prompt's tokens, of which there is at least one; "
            "pad with padding_side='left', and give the mask where the pad token is also text"
        )
    return input_ids, [row[-count:] for row, count in zip(input_ids.tolist(), counts.tolist(), strict=True)]


def _new_tokens(config: GenerationConfig, default: bool, width: int, longest: int, target: Target) -> int:
    """How many new tokens are asked for: max_new_tokens, else max_length, else transformers' 20."""
    positions = target.model.config.max_positions
    if config.max_new_tokens is not None:
        name, new = f"max_new_tokens={config.max_new_tokens}", config.max_new_tokens
    elif default:
        name, new = "the default length", min(config.max_length, positions - width)
    else:
        name, new = f"max_length={config.max_length}", config.max_length - width
    if new < 1 or longest + new > positions:
        raise ValueError(
            f"{name}: input_ids has {width} tokens with its padding, the longest prompt {longest}, and the model "
            f"{positions} positions; ask for 1 to {positions - longest} new tokens"
        )
    return new


def _sampling(
    config: GenerationConfig, ends: list[int], new: int, seed: int | None, count: int, target: Target
) -> list[SamplingParams]:
    """One SamplingParams a row. Ids outside of the vocabulary, which never come, may end or be suppressed."""

    def known(ids: list[int]) -> tuple[int, ...]:
        return tuple(token for token in ids if 0 <= token < target.model.config.vocab_size)

    def given(*names: str) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(config, name)) is not None}

    fixed: dict[str, Any] = {
        "max_new_tokens": new,
        "stop_token_ids": known(ends),
        "ignore_eos": True,  # the configuration's end tokens count, not the target's
        "banned_token_ids": known(_token_ids(config.suppress_tokens)),
        **given("repetition_penalty"),
    }
    if not config.do_sample:
        return [SamplingParams(**fixed)] * count
    fixed |= {"temperature": 1.0, **given("temperature", "top_k", "top_p", "min_p", "eta_cutoff")}
    if fixed["temperature"] <= 0:
        raise ValueError(f"temperature={config.temperature}: with do_sample it is above 0; for greedy, do_sample=False")
    SamplingParams(**fixed, seed=seed)  # names a seed that is none
    if seed is None:
        seeds = torch.randint(2**63 - 1, (count,)).tolist()
    else:
        seeds = [seed + i - 2**64 * (seed + i >= 2**64) for i in range(count)]
    return [SamplingParams(**fixed, seed=own) for own in seeds]


def _stop_strings(
    strings: str | list[str] | None, tokenizer: Any, ids_RP: Tensor, ends: list[int]
) -> Callable[[int, list[int]], bool] | None:
    """(row, its new tokens) -> whether the last one completes a stop string, by transformers' own rule.

    That rule also finds a string that begins in the prompt, or one of special tokens.
    """
    if not strings:
        return None
    if tokenizer is None:
        raise ValueError(f"stop_strings={strings!r}: they need the model's tokenizer; pass tokenizer=")
    if len(ids_RP) > 1 and not ends:
        raise ValueError(
            f"stop_strings={strings!r}: with several rows and no eos_token_id transformers goes on writing behind "
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
    """Every row's new tokens."""
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
    """Prompts and new tokens, shorter rows filled: int64 [R, T]."""
    longest = max(map(len, rows))
    # Without an end token nothing ends early, and nothing is filled.
    assert pad is not None or all(len(row) == longest for row in rows)
    new = torch.tensor([row + [pad or 0] * (longest - len(row)) for row in rows], device=ids_RP.device)
    return torch.cat([ids_RP.long(), new], dim=1)
