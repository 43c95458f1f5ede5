"""Whether TokenSwift's draft pass pays, by trying it out.

The draft pass is one more pass of the target in a step, on a part of its cache, for one more level of the tree. What it
costs beside a whole pass depends on how much of a pass is reading weights and how much is reading keys and values.
"""

from statistics import mean, median

# Steps that are measured without the draft pass, and then with it.
TRIAL_STEPS = 8


class DraftPassTrial:
    """Measures some steps without the draft pass and some with it, and keeps to the better way until the longest
    context has doubled.

    In every step the runner calls `plan` before the proposal; the drafter reads `with_pass` and sets `taken`; the
    runner calls `record` when the step is read.

    Attributes:
        phase: "short" (the context is within the budget, so the selected cache holds all of it: the pass would cost as
            much as a whole one, for the one token that plain decoding would bring at that price), "without" or "with"
            (steps being measured), "decided".
        with_pass: whether the next proposal is to have the pass.
        taken: whether the last proposal had it.
        description: what was decided, in words.
    """

    def __init__(self, budget: int):
        self._budget, self._decided_at, self.taken = budget, 0, False
        self._samples: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        self._be_short()

    def _be_short(self) -> None:
        self.phase, self.with_pass = "short", False
        self.description = f"never: up to {self._budget} tokens of context the selected cache is the whole one"

    def plan(self, longest: int) -> None:
        """Begin a step. longest: tokens of the longest context."""
        self.taken = False
        if longest <= self._budget:
            self._be_short()
        elif self.phase == "short" or (self.phase == "decided" and longest >= 2 * self._decided_at):
            self.phase, self._samples = "without", {False: [], True: []}
            self.with_pass, self._decided_at = False, longest
            self.description = (
                f"not decided: fewer than {2 * TRIAL_STEPS} steps at {longest} tokens of context and above"
            )

    def record(self, took: bool, seconds: float, tokens: float) -> None:
        """Note whether a step had the pass, the seconds it took, and how many tokens it brought a sequence."""
        if self.phase not in ("without", "with") or took != self.with_pass:
            return
        samples = self._samples[self.with_pass]
        samples.append((seconds, tokens))
        if len(samples) < TRIAL_STEPS:
            return
        if not self.with_pass:
            self.phase, self.with_pass = "with", True
            return
        costs = {had_pass: _milliseconds_a_token(steps) for had_pass, steps in self._samples.items()}
        self.phase, self.with_pass = "decided", costs[True] < costs[False]
        name, better, worse = "always" if self.with_pass else "never", min(costs.values()), max(costs.values())
        self.description = (
            f"{name}: {better:.1f} against {worse:.1f} ms a token after {2 * TRIAL_STEPS} steps "
            f"at {self._decided_at} tokens of context"
        )


def _milliseconds_a_token(samples: list[tuple[float, float]]) -> float:
    """Median time of a step over mean number of tokens: one slow step says nothing, one long acceptance does."""
    return 1e3 * median(seconds for seconds, _ in samples) / mean(tokens for _, tokens in samples)
