"""Whether TokenSwift's draft pass pays: one more target pass a step, on a selected cache, for one more tree level.

What pays depends on how much of a pass is reading weights and how much is reading keys and values, so it is measured:
some steps without, some with, the better until the longest context has doubled. Not here: the pass
(infer/drafters/tokenswift.py).
"""

from statistics import mean, median

TRIAL_STEPS = 8


class DraftPassChoice:
    """The state of an `auto`.

    Attributes:
        phase: "short" (a context within the budget is in the selected cache whole, so the pass costs a whole one and
            brings the one token that plain decoding would bring for it), "without" and "with" (steps being measured),
            "prepare" (the selected cache is to be built), "decided".
        with_pass: whether steps have the pass now.
        words: what was decided, for people.
    """

    def __init__(self, budget: int):
        self.phase, self.with_pass, self._budget = "short", False, budget
        self.words = f"never: up to {budget} tokens of context the selected cache is the whole one"
        self._decided_at = 0
        self._samples: dict[bool, list[tuple[float, float]]] = {False: [], True: []}

    @property
    def measuring(self) -> bool:
        """Whether `record` waits for the next step."""
        return self.phase in ("without", "with")

    @property
    def holds_cache(self) -> bool:
        """Whether the selected cache has to be kept up."""
        return self.phase == "with" or (self.phase == "decided" and self.with_pass)

    def plan(self, longest: int) -> None:
        """A step begins; `longest`: tokens of the longest context."""
        if longest <= self._budget:
            if self.phase != "short":
                self.__init__(self._budget)
        elif self.phase == "short" or (self.phase == "decided" and longest >= 2 * self._decided_at):
            self.phase, self._samples = "without", {False: [], True: []}
            self.with_pass, self._decided_at = False, longest
            self.words = f"not decided: fewer than {2 * TRIAL_STEPS} steps at {longest} tokens of context and above"

    def prepared(self) -> None:
        """The selected cache is built."""
        assert self.phase == "prepare"
        self.phase, self.with_pass = "with", True

    def record(self, seconds: float, tokens: float) -> None:
        """What a measured step took, and how many tokens a sequence it brought."""
        samples = self._samples[self.with_pass]
        samples.append((seconds, tokens))
        if len(samples) < TRIAL_STEPS:
            return
        if not self.with_pass:
            self.phase = "prepare"
            return
        costs = {kind: _milliseconds_a_token(taken) for kind, taken in self._samples.items()}
        self.phase, self.with_pass = "decided", costs[True] < costs[False]
        name, better, worse = "always" if self.with_pass else "never", min(costs.values()), max(costs.values())
        self.words = (
            f"{name}: {better:.1f} against {worse:.1f} ms a token after {2 * TRIAL_STEPS} steps "
            f"at {self._decided_at} tokens of context"
        )


def _milliseconds_a_token(samples: list[tuple[float, float]]) -> float:
    """The median step over the mean tokens: one slow step says nothing, one long acceptance does."""
    return 1e3 * median(seconds for seconds, _ in samples) / mean(tokens for _, tokens in samples)
