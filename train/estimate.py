"""`longdraft train --estimate`: what each stage of a config needs on one rank, printed before anything is loaded.

Not here: how it is counted (estimate_memory.py, estimate_operations.py).
"""

from collections.abc import Sequence
from functools import cache

import torch

from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.hf import read_target_config
from longdraft.train.config import Config
from longdraft.train.config_file import Stage
from longdraft.train.estimate_memory import MIB, Estimate, estimate
from longdraft.train.estimate_operations import operations, operations_table


def report(stages: Sequence[Stage], n_ranks: int | None = None, gpu: bool | None = None) -> str:
    """For each stage, a table of bytes and one of operations, for one of `n_ranks` ranks.

    Args:
        n_ranks: the ranks on all machines. None: one for each GPU of this machine, or a single one without GPUs.
        gpu: a rank is a GPU, here or elsewhere, unless train.device says cpu; else it is a process on a CPU. None: as
            on this machine.

    Raises ValueError where a target cannot be read, is not for our decoder or has too few positions, or that number of
    ranks cannot share rows.
    """
    targets = [stage.config.target for stage in stages]
    for target in targets:
        if target.loader != "longdraft":
            raise ValueError(
                f"target.loader: {target.loader}, but --estimate counts what our decoder allocates; set it to "
                "longdraft where that knows the model, or train without an estimate"
            )
    gpu = torch.cuda.is_available() if gpu is None else gpu
    gpu = gpu and all(stage.config.train.device != "cpu" for stage in stages)
    n_ranks = (torch.cuda.device_count() if gpu else 1) if n_ranks is None else n_ranks
    if n_ranks < 1:
        raise ValueError(f"num_gpus: {n_ranks}; give at least 1")
    read = cache(read_target_config)  # reading the metadata of a .gguf file takes seconds
    configs = [read(target.path, target.gguf_file, target.max_positions) for target in targets]
    return "\n\n".join(_describe(stage, target, n_ranks, gpu) for stage, target in zip(stages, configs, strict=True))


def _describe(stage: Stage, target: DecoderConfig, n_ranks: int, gpu: bool) -> str:
    config = stage.config
    config.data.check_positions(config.target.path, target.max_positions)
    bytes_table = memory_table(estimate(config, target, n_ranks, gpu))
    train, data = config.train, config.data
    devices = f"{n_ranks} {'GPU' if gpu else 'CPU process'}{'' if n_ranks == 1 else 's' if gpu else 'es'}"
    name = "" if stage.name is None else f"Stage {stage.name}: "
    shared = f", {train.sequence_parallel} ranks a row" if train.sequence_parallel > 1 else ""
    head = (
        f"{name}{config.draft.method} for {config.target.path} in {train.precision} on {devices}{shared}; a pass of "
        f"{train.pass_rows} x {data.seq_len:,} tokens, {config.train.n_passes(n_ranks)} a "
        f"step, on each{_idle(config, n_ranks)}"
    )
    return "\n\n".join([head, bytes_table, operations_table(operations(config, target))])


def _idle(config: Config, n_ranks: int) -> str:
    """A remark about passes of a step that have no rows, where there are any."""
    empty, train = config.train.n_empty_passes(n_ranks), config.train
    if not empty:
        return ""
    passes = config.train.n_passes(n_ranks) * n_ranks // train.sequence_parallel
    return f"; {empty} of {passes} passes are empty, as {train.global_batch} rows a step do not fill them"


def memory_table(found: Estimate) -> str:
    """A table for people: one line for each part, in MiB or GiB."""
    name, peak = found.peak
    unit, word = (2**30, "GiB") if peak >= 2**33 else (MIB, "MiB")
    digits = 2 if unit > MIB else 0

    def line(title: str, n_bytes: int) -> str:
        return f"{title:34}{n_bytes / unit:10,.{digits}f}"

    lines = [f"{'':34}{word:>10}"]
    sections = {"all the time": found.kept} | {f"+ {moment}": parts for moment, parts in found.moments.items()}
    for title, parts in sections.items():
        lines += [line(title, sum(parts.values())), *(line(f"    {part}", n_bytes) for part, n_bytes in parts.items())]
    lines += [line("the process itself", found.process), f"{line('at most', peak)}  in: {name}"]
    return "\n".join([*lines, line("and on the host", found.host)] if found.host else lines)
