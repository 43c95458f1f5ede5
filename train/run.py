"""All that is open during training. Not here: opening it (setup.py), what happens in a step (step.py)."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tqdm import tqdm

from longdraft.data_prep.shards import ShardSet
from longdraft.train.batches import EpochRow
from longdraft.train.config import Config
from longdraft.train.deepspeed_engine import DraftEngine
from longdraft.train.evaluate import Evaluator
from longdraft.train.methods.base import Method, MicroBatch
from longdraft.train.ranks import Ranks
from longdraft.train.teacher import Teacher
from longdraft.train.tracking import Tracker


@dataclass
class StepInput:
    """What a step reads, before it begins.

    `all_rows`: the rows of all ranks. `places` and `micro_batches`: this rank's passes. `n_labels` [P]: this rank's
    labels of each part of the loss.
    """

    all_rows: list[EpochRow]
    places: list[list[EpochRow]]
    micro_batches: list[MicroBatch]
    n_labels: Sequence[float]


@dataclass
class Run:
    """A run, from its opening to its last checkpoint.

    `target_weights`: the hash of the target's weights (models/fingerprint.py). `decoding`: None where the config does
    not ask for it. `step`: steps done. `skipped`: passes and steps that were left out because their loss or gradient
    was not a number. `heldout`: the latest validation. `stop`: the run ends once there is something in it on any rank.
    `tracker` and a visible `bar` exist on the first rank alone. `recent`: the last logged records.

    Between two steps, `sums` waits for what the ranks sum at a step's end and returns it (step.py), and `next_input` is
    the next step's, read while the device was still working.
    """

    config: Config
    ranks: Ranks
    method: Method
    engine: DraftEngine
    teacher: Teacher
    rows: ShardSet
    heldout_rows: ShardSet
    target_weights: str | None
    decoding: Evaluator | None = None
    step: int = 0
    skipped: int = 0
    sums: Callable[[], list[float]] | None = None
    next_input: StepInput | None = None
    heldout: dict[str, Any] = field(default_factory=dict)
    stop: Sequence[int] = ()
    tracker: Tracker | None = None
    bar: tqdm = field(default_factory=partial(tqdm, disable=True))
    recent: deque[dict[str, Any]] = field(default_factory=partial(deque, maxlen=200))
