"""Decodes held-out prompts during training with the current weights, by the runtime's own engine and drafter.

Loss and hit rates are misleading measures of a draft; what counts is tokens/step. These numbers are a function of the
weights alone: everything proposed is verified, no drafter decides anything by the clock, and the text depends only on
target, prompt and seed. TokenSwift decodes without its n-grams, since they come from the text and are not learned. The
weights that decode are a copy, so training is not affected.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count, pairwise, takewhile
from typing import Any, NamedTuple

import numpy as np
import torch

from longdraft.data_prep.shards import ShardSet
from longdraft.infer.drafters.base import Drafter
from longdraft.infer.drafters.build import build_drafter
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.models.decoder import Decoder
from longdraft.models.draft_folder import Draft
from longdraft.models.drafts.longspec import WIDTHS, LongSpec
from longdraft.models.passes import Pass
from longdraft.models.target import Target
from longdraft.train import checkpoint
from longdraft.train.config import Config, to_dict
from longdraft.train.deepspeed_engine import DraftEngine
from longdraft.train.methods.build import frozen_draft
from longdraft.train.ranks import Ranks

# A contiguous span of tokens in a row: (row, start, stop).
RowSpan = tuple[int, int, int]


class Task(NamedTuple):
    """One prompt to decode. `setting`: its length and temperature, as in the names of metrics: ctx512.T0."""

    setting: str
    prompt: list[int]
    params: SamplingParams


class Evaluator:
    """Decodes during a run, after every `decoding.every` steps and after the last one, and keeps the best weights.

    Every rank has one, and all ranks call its methods together. The prompts are divided among them, and all get the
    same results.

    Args:
        target: the run's. rows: its held-out rows.

    Raises ValueError if the held-out documents have too few prompts for `decoding`, or the target too few positions.
    """

    def __init__(self, config: Config, target: Target, rows: ShardSet, ranks: Ranks):
        self.config, self.target, self.ranks = config, target, ranks
        section, limit = config.decoding, target.model.config.max_positions
        if max(section.contexts) + section.new_tokens > limit:
            most = limit - section.new_tokens
            raise ValueError(f"decoding.contexts: {max(section.contexts)}; the target has positions for at most {most}")
        documents, self.tasks = beginnings(rows), []
        for context in section.contexts:
            prompts = held_out_prompts(rows, documents, context, section.prompts)
            for temperature in section.temperatures:
                for i, prompt in enumerate(prompts):
                    seed, n_new = (config.train.seed + i) % 2**63, section.new_tokens
                    params = SamplingParams(temperature, seed=seed, max_new_tokens=n_new, ignore_eos=True)
                    self.tasks.append(Task(f"ctx{context}.T{temperature:g}", prompt, params))

    def after_step(
        self, engine: DraftEngine, step: int, heldout: Mapping[str, Any], stop: Sequence[int] = ()
    ) -> dict[str, Any] | None:
        """Decode after `step` steps, and keep the weights if they are the best so far. A rank ends its part once its
        `stop` is non-empty; nothing is then measured.

        Args:
            heldout: this step's validation, if there was one; it is saved with the weights (validation.py).

        Returns: the record to log; None if it was stopped.
        """
        config, ranks, run_dir = self.config, self.ranks, self.config.train.run_dir
        begin, weights = time.monotonic(), engine.weights()
        drafter = open_drafter(config.draft.method, self.target, frozen_draft(config.draft, self.target, weights))
        record = decode(self.target, drafter, self.tasks, ranks, stop)
        if record is None:
            return None
        score, best = record["decode_tokens_per_step"], ranks.from_first(lambda: checkpoint.best(run_dir))
        if best is None or score > best.state["score"]:
            target_weights = self.target.fingerprint.get("weights")
            extra = {"heldout": heldout, "decoding": record, "target_weights": target_weights}
            state = {"step": step, "score": score, "config": to_dict(config), "extra": extra}
            checkpoint.write_folder(ranks, checkpoint.best_folder(run_dir), state, weights, keep=1)
        return record | {"decode_s": time.monotonic() - begin}


def open_drafter(method: str, target: Target, draft: Draft) -> Drafter:
    """The method's drafter, with the same tree as an exported draft without measured rates."""
    options: dict[str, Any] = {}
    if isinstance(draft, LongSpec):
        options = {"widths": WIDTHS[: draft.config.noise], "extended": max(WIDTHS)}  # the same on a CPU and a GPU
    elif method == "tokenswift":
        options = {"draft_pass": "never", "ngrams": 0}
    return build_drafter(method, target, draft, options)


def decode(
    target: Target, drafter: Drafter, tasks: Sequence[Task], ranks: Ranks, stop: Sequence[int] = ()
) -> dict[str, float] | None:
    """Decode the tasks, divided among the ranks, one sequence at a time and past end tokens, as `longdraft bench` does.
    If the target's weights are sharded (train/sharding.py), every pass is collective.

    Args:
        stop: once it is non-empty, this rank stops decoding.

    Returns: for each setting decode_tokens_per_step/ctx512.T0, and for each depth decode_acceptance/ctx512.T0.depth1,
    the share of steps that accepted at least so many nodes of a path; decode_tokens_per_step, the mean over settings.
    None if a rank was stopped.
    """
    own_tasks = tasks[ranks.rank :: ranks.world_size]
    settings = list(dict.fromkeys(task.setting for task in tasks))
    sums = torch.zeros(len(settings), 2 + drafter.max_depth, dtype=torch.float64)
    engine = Engine(target, drafter, nodes=None, slots=1)
    with nullcontext() if target.model.weights_stay else _one_pass_of_all(target.model, ranks):
        for piece in engine.stream([task.prompt for task in own_tasks], [task.params for task in own_tasks]):
            if stop:
                break
            if piece.generation is not None:
                stats = piece.generation.stats
                counts = [len(piece.generation.tokens), stats.steps, *stats.accepted_at_depth]
                sums[settings.index(own_tasks[piece.index].setting), : len(counts)] += torch.tensor(counts)
    stopped, *totals = ranks.sum([float(bool(stop)), *sums.flatten().tolist()])
    if stopped:
        return None
    record = {}
    for name, (tokens, steps, *accepted) in zip(settings, torch.tensor(totals).view_as(sums).tolist(), strict=True):
        record[f"decode_tokens_per_step/{name}"] = tokens / steps
        record |= {f"decode_acceptance/{name}.depth{d}": n / steps for d, n in enumerate(accepted, start=1)}
    mean = sum(record[f"decode_tokens_per_step/{name}"] for name in settings) / len(settings)
    return {"decode_tokens_per_step": mean} | record


@contextmanager
def _one_pass_of_all(model: Decoder, ranks: Ranks) -> Iterator[None]:
    """For a sharded target, whose passes are collective. Before each pass, the ranks agree that at least one of them
    has one; a rank that has none left runs placeholder passes until no rank has any."""

    def announce(*_: object) -> None:
        ranks.sum([1.0])

    hook = model.register_forward_pre_hook(announce)
    try:
        yield
    finally:
        hook.remove()
    token_11 = torch.zeros(1, 1, dtype=torch.int64, device=model.embed_tokens.weight.device)
    while ranks.sum([0.0])[0]:
        model(Pass(token_11, needs={"last_kv"}))


def beginnings(rows: ShardSet) -> list[list[RowSpan]]:
    """For each document, the spans of its pieces in order, up to the first missing piece. They may lie in several
    rows."""
    pieces: dict[str, dict[int, RowSpan]] = defaultdict(dict)
    for i in range(len(rows)):
        for (name, number), (start, stop) in zip(rows.pieces(i), pairwise(rows[i]["borders"].tolist()), strict=True):
            pieces[name][number] = i, start, stop
    return [[spans[number] for number in takewhile(spans.__contains__, count())] for spans in pieces.values()]


def held_out_prompts(rows: ShardSet, documents: Sequence[Sequence[RowSpan]], context: int, n: int) -> list[list[int]]:
    """n prompts of `context` tokens: the beginnings of documents, evenly spread over those that are long enough. Raises
    ValueError if there are fewer."""
    found = [spans for spans in documents if sum(stop - start for _, start, stop in spans) >= context]
    if len(found) < n:
        raise ValueError(
            f"decoding.contexts: held-out documents of {context} tokens: {len(found)}, but decoding.prompts is {n}; "
            "set fewer, or prepare more or longer documents"
        )
    chosen = [found[i * len(found) // n] for i in range(n)]
    texts = [np.concatenate([rows[row]["tokens"][start:stop] for row, start, stop in spans]) for spans in chosen]
    return [text[:context].tolist() for text in texts]
