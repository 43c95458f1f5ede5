"""Asks several engines the same questions in turns, one prompt at a time, all warmed up in the same way."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from tqdm import tqdm

from longdraft.benchmarks.drafters.prompts import Asked, Question
from longdraft.benchmarks.drafters.provenance import hardware, provenance
from longdraft.benchmarks.drafters.record import Answer, Entry, Record
from longdraft.benchmarks.drafters.timing import Log, peak_memory_mib, quiet, seconds_of
from longdraft.infer.drafters.token_recycling import TokenRecycling
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.models.target import Target

WARM_UP_TOKENS, WARM_UP_PROMPT = 16, 1024
PARTS = ("prefill", "first_token", "decode", "draft", "target", "commit")  # of an answer's seconds


class EngineAnswers:
    """Answers of one of our engines.

    Attributes:
        learns: whether its drafter keeps something from one answer to the next.
    """

    def __init__(self, engine: Engine):
        self.engine, drafter = engine, engine.drafter
        self.learns = any(isinstance(one, TokenRecycling) for one in drafter.parts or [drafter])
        self.max_depth = drafter.max_depth

    def answer(self, prompt: list[int], params: SamplingParams) -> Answer:
        began, lengths, arrivals, last = time.perf_counter(), [], [], None
        for piece in self.engine.stream([prompt], params):
            lengths.append(len(piece.tokens))
            arrivals.append(round(time.perf_counter() - began, 6))
            last = piece.generation
        assert last is not None
        stats = last.stats
        seconds = {f"{part}_seconds": round(getattr(stats, f"{part}_seconds"), 6) for part in PARTS}
        told = len(prompt), last.tokens, last.text, last.finish_reason, lengths, arrivals, stats.drafted
        return Answer(*told, **seconds)


class TransformersAnswers:
    """Answers of transformers' own greedy `generate`. Each token counts as a step."""

    learns, max_depth = False, 0

    def __init__(self, model, eos_token_ids: Sequence[int]):
        self.model, self._eos, self._device = model, list(eos_token_ids), next(model.parameters()).device

    def answer(self, prompt: list[int], params: SamplingParams) -> Answer:
        """The prefill is timed as a call that generates one token."""
        prefill, _ = self._timed(prompt, replace(params, max_new_tokens=1))
        whole, tokens = self._timed(prompt, params)
        count = len(tokens)
        seconds = (whole - prefill) * count / (count - 1) if count > 1 else whole  # one token is the prefill's
        return Answer(len(prompt), tokens, None, "", [1] * count, [], decode_seconds=seconds, prefill_seconds=prefill)

    @torch.no_grad()
    def generate(self, prompt: list[int], params: SamplingParams) -> list[int]:
        """The new tokens; the checkpoint's own generation config is replaced."""
        from transformers import GenerationConfig

        end = None if params.ignore_eos else self._eos
        self.model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=end)
        ids = torch.tensor([prompt], device=self._device)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": params.max_new_tokens}
        return self.model.generate(ids, **options)[0, ids.shape[1] :].tolist()

    def _timed(self, prompt: list[int], params: SamplingParams) -> tuple[float, list[int]]:
        tokens = list[int]()
        return seconds_of(lambda: tokens.extend(self.generate(prompt, params)), self._device), tokens


Answerer = EngineAnswers | TransformersAnswers


def ask(
    target: Target,
    answerers: Mapping[str, Answerer],
    asked: Sequence[Asked],
    params: SamplingParams,
    record: Record,
    log: Log = quiet,
) -> None:
    """Ask every question of everybody before the next one. What the record holds is not asked again, unless a drafter
    that learns from its answers has some left: it is then asked everything, as an undisturbed run would.

    The warm-up uses another text, so that no drafter has seen an answer that is timed.
    """
    temperature = params.temperature
    steps = [(one.question, name, (one.question.id, name, temperature)) for one in asked for name in answerers]
    again = {name for _, name, key in steps if answerers[name].learns and key not in record.entries}
    todo = [(question, name) for question, name, key in steps if name in again or key not in record.entries]
    if not todo:
        return
    log(f"timing at T {temperature:g}: {len(todo)} answers of {', '.join(answerers)}")
    record.add("machine", machine(target))
    warm = asked[0].question.prompt(target)[-WARM_UP_PROMPT:][::-1]
    for answerer in answerers.values():
        answerer.answer(warm, replace(params, max_new_tokens=min(WARM_UP_TOKENS, params.max_new_tokens)))
    for question, name in tqdm(todo, desc="answers", leave=False, disable=None):
        answerer, key = answerers[name], (question.id, question.task, question.category, name, temperature)
        turns, stopped = converse(target, answerer, question, params)
        record.add("entry", Entry(*key, turns, answerer.max_depth, stopped))


def machine(target: Target) -> dict:
    """Where and with what the answers are made."""
    weight = target.model.embed_tokens.weight
    return provenance(weight.dtype, ("longdraft", "torch", "transformers")) | {
        "target": target.name,
        "device": hardware(weight.device),
        "on_gpu": weight.is_cuda,
        "peak_memory_mib": peak_memory_mib(weight.device),
    }


def converse(
    target: Target, answerer: Answerer, question: Question, params: SamplingParams
) -> tuple[list[Answer], str]:
    """Return the answers to a question's turns, each turn following this answerer's own earlier answers, and in words
    why turns are missing ("" if none are)."""
    turns: list[Answer] = []
    texts: list[str] = []
    positions = target.model.config.max_positions
    for number in range(len(question.turns)):
        prompt = question.prompt(target, texts)
        if turns and len(prompt) + params.max_new_tokens > positions:
            return turns, f"turn {number + 1} has {len(prompt)} tokens, too long for the target's {positions} positions"
        answer = answerer.answer(prompt, params)
        turns.append(answer)
        if number + 1 < len(question.turns):
            decode = target.tokenizer.decode
            texts.append(answer.text if answer.text is not None else decode(answer.tokens, skip_special_tokens=True))
    return turns, ""
