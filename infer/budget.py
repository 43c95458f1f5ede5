"""How many of the proposed nodes are worth verifying, step by step: the ones that bring more tokens than they cost.

A node is worth the chance that the walk reaches it: the product, along its path, of how often nodes of that class were
right when their parent was. These rates are learned from every proposal, verified or not, because the committed tokens
say afterwards which nodes would have been right; so nothing is risked where a method does not pay, and a request on
which nothing pays is decoded plainly. What a pass of so many rows costs is measured as it happens. Only speed depends
on any of this, never a token. Shapes: B slots, N nodes, W nodes kept, C classes.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median

import numpy as np
import torch
from torch import Tensor

from longdraft.infer.tree import TokenTree

# A class that was never seen is right as often as FIRST_RATE, which counts as so many trials.
FIRST_RATE, FIRST_WEIGHT = 0.3, 1.0
# A request starts with what earlier requests taught, as so many trials; its own older trials fade.
EARLIER_WEIGHT, FADING, EARLIER_FADING = 4.0, 0.97, 0.999
# Before it is measured, a further row is taken to cost this share of a pass of one row.
ROW_COST = 0.04
SAMPLES = 9
# Without a gain in this many steps an expensive drafter rests, twice as long every time.
TRIAL_STEPS, FIRST_REST, LONGEST_REST = 8, 16, 128
CHEAP_DRAFT = 0.03


class Costs:
    """Seconds of a step by the rows of its pass, as the median of the last few."""

    def __init__(self):
        self._seconds: dict[int, deque[float]] = {}

    def record(self, width: int, seconds: float) -> None:
        """One step whose pass had `width` rows."""
        self._seconds.setdefault(width, deque(maxlen=SAMPLES)).append(seconds)

    def of(self, widths: Sequence[int]) -> np.ndarray:
        """Estimates for these widths: measured, between two measured ones, or ROW_COST a row beyond them."""
        if not self._seconds:
            return 1 + ROW_COST * (np.asarray(widths) - 1.0)
        known = sorted(self._seconds)
        seconds = np.maximum.accumulate([median(self._seconds[width]) for width in known])
        row = ROW_COST * seconds[0] / (1 + ROW_COST * (known[0] - 1))
        wanted = np.asarray(widths, dtype=float)
        between = np.interp(wanted, known, seconds)
        return between + row * (np.minimum(wanted - known[0], 0) + np.maximum(wanted - known[-1], 0))


class Budget:
    """Learns rates and costs, and prunes proposals.

    Args:
        n_classes: of the drafter.
        widths: rows that a pass may have, 1 included; one of them is chosen each step.
        automatic: False verifies every proposal whole.
    """

    def __init__(self, n_classes: int, widths: Sequence[int], automatic: bool = True):
        self.widths, self.automatic, self.costs = tuple(sorted(widths)), automatic, Costs()
        self._hits = np.full(n_classes, FIRST_RATE * FIRST_WEIGHT)
        self._trials = np.full(n_classes, FIRST_WEIGHT)
        self.start(1)

    def start(self, batch: int) -> None:
        """A call with this many slots begins."""
        shape = batch, len(self._hits)
        self._slot_hits, self._slot_trials = np.zeros(shape), np.zeros(shape)
        self._log_rates_BC = torch.zeros(shape, dtype=torch.float32)
        for slot in range(batch):
            self.begin(slot)
        self._gains: deque[float] = deque(maxlen=TRIAL_STEPS)
        self._resting, self._rest = 0, FIRST_REST
        self._expected: Tensor | None = None
        self._width = self.widths[-1]

    def begin(self, slot: int) -> None:
        """This slot's next request starts with the rates of all earlier ones."""
        share = EARLIER_WEIGHT / np.maximum(self._trials, EARLIER_WEIGHT)
        self._slot_hits[slot], self._slot_trials[slot] = self._hits * share, self._trials * share
        rates = np.clip(self._slot_hits[slot] / self._slot_trials[slot], 1e-3, 0.999)
        self._log_rates_BC[slot] = torch.from_numpy(np.log(rates))

    @property
    def rests(self) -> bool:
        """Whether the drafter need not propose in this step."""
        return self._resting > 0

    def prune(self, tree: TokenTree, active_B: Tensor) -> TokenTree:
        """The nodes of `tree` that are worth a step, best first, at one of the widths."""
        if not self.automatic or tree.width == 1:
            return tree.pad_to(next(width for width in self.widths if width >= tree.width))
        classes_BN = torch.arange(tree.width).expand(tree.tokens.shape) if tree.classes is None else tree.classes
        log_rates_BN = self._log_rates_BC.to(classes_BN.device).gather(1, classes_BN)
        log_rates_BN[:, 0] = 0.0  # the root is certain
        worth_BN = tree.ancestors.float().bmm(log_rates_BN[:, :, None])[:, :, 0].exp()
        worth_BN = worth_BN.masked_fill(tree.parents == -2, 0.0)
        worth_BN, order_BN = worth_BN.sort(dim=1, descending=True, stable=True)
        self._expected = (worth_BN * active_B[:, None]).sum(0).cumsum(0)
        if worth_BN.device.type == "cpu":
            self._decide()
        width = min(self._width, tree.width)
        return tree.take(order_BN[:, :width]).pad_to(next(w for w in self.widths if w >= width))

    def _decide(self) -> None:
        """The width with the most expected tokens a second; on a GPU from the last step's proposal, read late."""
        assert self._expected is not None
        expected = np.asarray(self._expected.tolist())
        widths = [width for width in self.widths if width <= len(expected)]
        if len(expected) not in widths:
            widths.append(len(expected))
        passes = [next(w for w in self.widths if w >= width) for width in widths]
        self._width = widths[int(np.argmax(expected[np.asarray(widths) - 1] / self.costs.of(passes)))]

    def learn(
        self, slot: int, tokens: list[int], parents: list[int], classes: list[int] | None, committed: list[int]
    ) -> None:
        """Which nodes of a slot's whole proposal were right. `committed`: the new tokens behind the root."""
        depth_on_path = {0: 0}
        rates = self._log_rates_BC[slot].numpy()
        for node in range(1, len(tokens)):
            depth = depth_on_path.get(parents[node])
            if depth is None or depth >= len(committed):
                continue
            kind, hit = node if classes is None else classes[node], tokens[node] == committed[depth]
            for hits, trials, fading in (
                (self._hits, self._trials, EARLIER_FADING),
                (self._slot_hits[slot], self._slot_trials[slot], FADING),
            ):
                hits[kind] = hits[kind] * fading + hit
                trials[kind] = trials[kind] * fading + 1
            rate = self._slot_hits[slot, kind] / self._slot_trials[slot, kind]
            rates[kind] = np.log(min(max(rate, 1e-3), 0.999))
            if hit:
                depth_on_path[node] = depth + 1

    def record(self, width: int, seconds: float, draft_seconds: float, tokens: float) -> None:
        """What a step cost and brought.

        Args:
            width: rows of its pass.
            seconds: of the whole step. draft_seconds: of the proposal in it.
            tokens: new ones a slot that took part.
        """
        if self._expected is not None and self._expected.device.type != "cpu":
            self._decide()
        self.costs.record(width, seconds - draft_seconds)
        if self._resting:
            self._resting -= 1
            return
        plain = float(self.costs.of([1])[0])
        self._gains.append(tokens * plain / seconds)
        if not self.automatic or draft_seconds < CHEAP_DRAFT * plain or len(self._gains) < TRIAL_STEPS:
            return
        if sum(self._gains) < len(self._gains):
            self._resting, self._rest = self._rest, min(2 * self._rest, LONGEST_REST)
            self._gains.clear()

    def words(self) -> str:
        """What was decided, for the statistics."""
        if not self.automatic:
            return "every proposed node is verified"
        known = sorted(self.costs._seconds)
        times = ", ".join(f"{width}: {1e3 * median(self.costs._seconds[width]):.1f} ms" for width in known)
        return f"nodes chosen step by step; a step by rows of its pass: {times}"
