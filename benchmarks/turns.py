"""Who answers, and questions asked of several of them in turns, like with like: same prompts, one at a time, warmed up
alike.

Not here: what becomes of the answers (answers.py, figures.py).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from longdraft.benchmarks.answers import Answer, Entry, Record
from longdraft.benchmarks.measure import prefill_cost, surroundings
from longdraft.benchmarks.progress import Phase, Watch
from longdraft.benchmarks.questions import Asked, Question
from longdraft.benchmarks.timing import seconds_of
from longdraft.infer.drafters.base import Drafter
from longdraft.infer.drafters.combine import Combined
from longdraft.infer.drafters.token_recycling import TokenRecycling
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.models.target import Target

WARM_UP_TOKENS, WARM_UP_PROMPT = 16, 1024
TRANSFORMERS = 3  # times as long as plain decoding here, about, with the prefill that is timed by itself


class EngineAnswers:
    def __init__(self, engine: Engine):
        self.engine = engine

    def answer(self, prompt: list[int], params: SamplingParams, watch: Watch) -> Answer:
        began, lengths, arrivals, last = time.perf_counter(), [], [], None
        for piece in self.engine.stream([prompt], params):
            lengths.append(len(piece.tokens))
            arrivals.append(round(time.perf_counter() - began, 6))
            watch.advance(len(piece.tokens) + (0 if len(lengths) > 1 else prefill_cost(len(prompt))))
            last = piece.generation
        assert last is not None
        stats = last.stats
        seconds = {
            f"{part}_seconds": round(getattr(stats, f"{part}_seconds"), 6)
            for part in ("prefill", "first_token", "decode", "draft", "target", "commit")
        }
        decisions = dict(stats.decisions)
        return Answer(
            len(prompt), last.tokens, last.text, last.finish_reason, lengths, arrivals, stats.drafted,
            decisions=decisions, **seconds,
        )  # fmt: skip

    @property
    def max_depth(self) -> int:
        return self.engine.drafter.max_depth

    def tables(self) -> list[TokenRecycling]:
        """What its drafter keeps from one request to the next."""
        drafter: Drafter = self.engine.drafter
        parts = drafter.drafters if isinstance(drafter, Combined) else [drafter]
        return [part for part in parts if isinstance(part, TokenRecycling)]


class TransformersAnswers:
    """transformers' own greedy `generate`, of a model that is loaded there. A step is a token."""

    max_depth = 0

    def __init__(self, model, eos_token_ids: Sequence[int]):
        self.model, self._eos, self._device = model, list(eos_token_ids), next(model.parameters()).device

    @torch.no_grad()
    def answer(self, prompt: list[int], params: SamplingParams, watch: Watch) -> Answer:
        """The prefill's time is that of a call which generates one token."""
        prefill, _ = self._timed(prompt, replace(params, max_new_tokens=1))
        whole, tokens = self._timed(prompt, params)
        watch.advance(TRANSFORMERS * (prefill_cost(len(prompt)) + params.max_new_tokens))
        count = len(tokens)
        seconds = (whole - prefill) * count / (count - 1) if count > 1 else whole  # the call of one token made it
        return Answer(len(prompt), tokens, None, "", [1] * count, [], decode_seconds=seconds, prefill_seconds=prefill)

    def tables(self) -> list[TokenRecycling]:
        return []

    def generate(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[list[int]]:
        """The new tokens of prompts of one length. Nothing of the checkpoint's own generation config goes into them."""
        from transformers import GenerationConfig

        end = None if params.ignore_eos else self._eos
        self.model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=end)
        ids = torch.tensor(prompts, device=self._device)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": params.max_new_tokens}
        return self.model.generate(ids, **options)[:, ids.shape[1] :].tolist()

    def _timed(self, prompt: list[int], params: SamplingParams) -> tuple[float, list[int]]:
        out = list[list[int]]()
        return seconds_of(lambda: out.extend(self.generate([prompt], params)), self._device), out[0]


Answerer = EngineAnswers | TransformersAnswers


@dataclass(frozen=True)
class Turns:
    """All questions at one temperature."""

    asked: Sequence[Asked]
    params: SamplingParams

    @property
    def what(self) -> str:
        return f"timing at T {self.params.temperature:g}:" if self.params.temperature else "timing, greedy:"

    def phases(self, names: Sequence[str]) -> list[Phase]:
        warm = prefill_cost(min(self.asked[0].tokens, WARM_UP_PROMPT)) + min(WARM_UP_TOKENS, self.params.max_new_tokens)
        return [Phase(f"{self.what} warm-up", "warm-up", len(names) * warm)] + [
            Phase(self._name(name, number), name, self._cost(name, asked))
            for number, asked in enumerate(self.asked, start=1)
            for name in names
        ]

    def _name(self, name: str, number: int) -> str:
        return f"{self.what} {name}, prompt {number} of {len(self.asked)}"

    def _cost(self, name: str, asked: Asked) -> float:
        one = (prefill_cost(asked.tokens) + self.params.max_new_tokens) * len(asked.question.turns)
        return TRANSFORMERS * one if name == "transformers" else one

    def ask(self, target: Target, answerers: Mapping[str, Answerer], record: Record, watch: Watch) -> None:
        """Every question of every answerer, the answerers in turns; what the record has is not asked again.

        The warm-up is on another text, so that no drafter has seen an answer that is timed.
        """
        temperature = self.params.temperature
        todo = [
            (number, asked.question, name)
            for number, asked in enumerate(self.asked, start=1)
            for name in answerers
            if (asked.question.id, name, temperature) not in record.entries
        ]
        if not todo:
            return
        record.set_machine(surroundings(target))
        watch.begin(f"{self.what} warm-up")
        warm = self.asked[0].question.prompt(target)[-WARM_UP_PROMPT:][::-1]
        few = replace(self.params, max_new_tokens=min(WARM_UP_TOKENS, self.params.max_new_tokens))
        for name, answerer in answerers.items():
            answerer.answer(warm, few, watch)
            record.restore(name, temperature, answerer.tables())
        for number, question, name in todo:
            watch.begin(self._name(name, number))
            answerer, named = answerers[name], (question.id, question.task, question.category, name, temperature)
            turns, stopped = converse(target, answerer, question, self.params, watch)
            record.add(Entry(*named, turns, answerer.max_depth, stopped), answerer.tables())


def converse(
    target: Target, answerer: Answerer, question: Question, params: SamplingParams, watch: Watch
) -> tuple[list[Answer], str]:
    """The answers to a question's turns, each behind its own answers, and why some are missing, if they are."""
    turns: list[Answer] = []
    positions = target.model.config.max_positions
    for number in range(len(question.turns)):
        prompt = question.prompt(target, [_text(target, turn) for turn in turns])
        if turns and len(prompt) + params.max_new_tokens > positions:
            return turns, f"turn {number + 1} has {len(prompt)} tokens, too long for the target's {positions} positions"
        turns.append(answerer.answer(prompt, params, watch))
    return turns, ""


def _text(target: Target, answer: Answer) -> str:
    if answer.text is not None:
        return answer.text
    return target.tokenizer.decode(answer.tokens, skip_special_tokens=True)
