"""Questions asked of several answerers in turns, like with like: same prompts, one at a time, warmed up alike.

Not here: what becomes of the answers (answers.py, figures.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from longdraft.benchmarks.answers import (
    Answer,
    EngineAnswers,
    Entry,
    Record,
    TransformersAnswers,
    prefill_cost,
    transformers_cost,
)
from longdraft.benchmarks.measure import surroundings
from longdraft.benchmarks.progress import Phase, Watch
from longdraft.benchmarks.questions import Asked, Question
from longdraft.infer.sampling import SamplingParams
from longdraft.models.target import Target

Answerer = EngineAnswers | TransformersAnswers
WARM_UP_TOKENS, WARM_UP_PROMPT = 16, 1024


@dataclass(frozen=True)
class Turns:
    """All questions at one temperature. what: how that is called."""

    what: str
    asked: Sequence[Asked]
    params: SamplingParams

    def phases(self, names: Sequence[str]) -> list[Phase]:
        """The parts of `ask`."""
        phases = [Phase(f"{self.what} warm-up", "warm-up", len(names) * self._cost("", self.asked[0], warm=True))]
        return phases + [
            Phase(self._name(name, number), name, self._cost(name, asked))
            for number, asked in enumerate(self.asked, start=1)
            for name in names
        ]

    def _name(self, name: str, number: int) -> str:
        return f"{self.what} {name}, prompt {number} of {len(self.asked)}"

    def _cost(self, name: str, asked: Asked, warm: bool = False) -> float:
        if warm:
            return prefill_cost(min(asked.tokens, WARM_UP_PROMPT)) + min(WARM_UP_TOKENS, self.params.max_new_tokens)
        if name == "transformers":
            return transformers_cost(asked.tokens, self.params) * len(asked.question.turns)
        return (prefill_cost(asked.tokens) + self.params.max_new_tokens) * len(asked.question.turns)

    def ask(self, target: Target, answerers: Mapping[str, Answerer], record: Record, watch: Watch) -> None:
        """Every question of every answerer, the answerers in turns; what the record has is not asked again.

        The warm-up is on another text, so that no drafter has seen an answer that is timed.
        """
        temperature = self.params.temperature
        todo = [
            (number, asked.question, name)
            for number, asked in enumerate(self.asked, start=1)
            for name in answerers
            if not record.has(asked.question.id, name, temperature)
        ]
        if not todo:
            return
        record.set_machine(surroundings(target))
        watch.begin(f"{self.what} warm-up")
        warm = self.asked[0].question.prompt(target)[-WARM_UP_PROMPT:][::-1]
        few = replace(self.params, max_new_tokens=min(WARM_UP_TOKENS, self.params.max_new_tokens))
        for name, answerer in answerers.items():
            answerer.answer(warm, few, watch)
            record.restore(name, temperature, _tables(answerer))
        for number, question, name in todo:
            watch.begin(self._name(name, number))
            turns, stopped = converse(target, answerers[name], question, self.params, watch)
            entry = Entry(
                question.id,
                question.task,
                question.category,
                name,
                temperature,
                turns,
                answerers[name].max_depth,
                stopped,
            )
            record.add(entry, _tables(answerers[name]))


def _tables(answerer: Answerer) -> list:
    return answerer.tables() if isinstance(answerer, EngineAnswers) else []


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
