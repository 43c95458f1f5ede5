"""Asks several engines the same questions in turns, one prompt at a time, with the same warm-up."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace

import torch
from tqdm import tqdm

from longdraft.benchmarks.drafters.provenance import hardware, provenance
from longdraft.benchmarks.drafters.questions import Question
from longdraft.benchmarks.drafters.record import Answer, Entry, Record
from longdraft.benchmarks.drafters.timing import Log, seconds_of
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.models.target import Target

WARM_UP_TOKENS, WARM_UP_PROMPT = 16, 1024
PARTS = ("prefill", "first_token", "decode", "draft", "target", "commit")  # the parts of an answer's seconds
LEARNS = "token_recycling"  # this drafter keeps its table from one answer to the next
# Answers a prompt of token ids.
Answerer = Callable[[list[int], SamplingParams], Answer]


def of_engine(engine: Engine) -> Answerer:
    """An Answerer for one of our engines."""

    def answer(prompt: list[int], params: SamplingParams) -> Answer:
        began, lengths, arrivals, last = time.perf_counter(), [], [], None
        for piece in engine.stream([prompt], params):
            lengths.append(len(piece.tokens))
            arrivals.append(round(time.perf_counter() - began, 6))
            last = piece.generation
        assert last is not None
        stats = last.stats
        seconds = {f"{part}_seconds": round(getattr(stats, f"{part}_seconds"), 6) for part in PARTS}
        return Answer(
            len(prompt), last.tokens, last.text, last.finish_reason, lengths, arrivals, stats.drafted, **seconds
        )

    return answer


def of_transformers(model, eos_token_ids: Sequence[int]) -> Answerer:
    """An Answerer for transformers' own greedy `generate`. Each token counts as a step, and the prefill ends with the
    first."""
    from transformers import GenerationConfig

    device = next(model.parameters()).device

    @torch.no_grad()
    def answer(prompt: list[int], params: SamplingParams) -> Answer:
        end, ids = None if params.ignore_eos else list(eos_token_ids), torch.tensor([prompt], device=device)
        model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=end)
        times, found = list[float](), list[int]()
        # It gets the prompt first, then each token.
        streamer = SimpleNamespace(put=lambda _: times.append(time.perf_counter()), end=lambda: None)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": params.max_new_tokens}
        options["streamer"] = streamer
        begin = time.perf_counter()
        whole = seconds_of(lambda: found.extend(model.generate(ids, **options)[0, len(prompt) :].tolist()), device)
        prefill, count = times[1] - begin, len(found)
        seconds = (whole - prefill) * count / (count - 1) if count > 1 else whole  # the prefill makes one token
        return Answer(
            len(prompt), found, None, "", [1] * count, [], decode_seconds=seconds, target_seconds=seconds,
            prefill_seconds=prefill, first_token_seconds=prefill,
        )  # fmt: skip

    return answer


def ask(
    target: Target,
    answerers: Mapping[str, Answerer],
    asked: Sequence[Question],
    params: SamplingParams,
    record: Record,
    log: Log = print,
) -> None:
    """Ask all answerers a question before the next one. Answers in the record are skipped, except for a drafter that
    learns from its answers and lacks some: it is asked everything again, as in an uninterrupted run.

    The warm-up uses another text, so that no drafter has already seen a timed answer.
    """
    temperature = params.temperature
    keys = [(one.id, name, temperature) for one in asked for name in answerers]
    again = {key[1] for key in keys if LEARNS in key[1] and key not in record.entries}
    todo = [key for key in keys if key[1] in again or key not in record.entries]
    if not todo:
        return
    log(f"timing at T {temperature:g}: answers of {', '.join(answerers)}: {len(todo)}")
    record.add("machine", machine(target))
    warm = asked[0].prompt(target)[-WARM_UP_PROMPT:][::-1]
    for answerer in answerers.values():
        answerer(warm, replace(params, max_new_tokens=min(WARM_UP_TOKENS, params.max_new_tokens)))
    questions = {one.id: one for one in asked}
    for id, name, _ in tqdm(todo, desc="answers", leave=False, disable=None):
        question = questions[id]
        turns = converse(target, answerers[name], question, params)
        record.add("entry", Entry(id, question.task, question.category or question.task, name, temperature, turns))


def machine(target: Target) -> dict:
    """The software and hardware that make the answers."""
    weight = target.model.embed_tokens.weight
    return provenance(weight.dtype, ("longdraft", "torch", "transformers")) | {
        "target": target.name,
        "device": hardware(weight.device),
        "on_gpu": weight.is_cuda,
        "ranks": target.model.ranks.size,
    }


def converse(target: Target, answerer: Answerer, question: Question, params: SamplingParams) -> list[Answer]:
    """The answers to a question's turns, each turn following this answerer's own earlier answers. Turns for which the
    target has no positions are missing."""
    turns: list[Answer] = []
    texts: list[str] = []
    for _ in question.turns:
        prompt = question.prompt(target, texts)
        if turns and len(prompt) + params.max_new_tokens > target.model.config.max_positions:
            break
        found = answerer(prompt, params)
        if found.text is None and target.tokenizer is not None:  # transformers'
            found = replace(found, text=target.tokenizer.decode(found.tokens, skip_special_tokens=True))
        turns.append(found)
        texts.append(found.text or "")
    return turns
