"""The stages that a YAML file lists: LongSpec's short, long and instruction data (Appendix E).

A YAML file may list stages: `stages: {short: {data: {...}, train: {...}}, long: {...}}`. Each is the file's own
sections with the stage's laid over them, trains in a folder of its own (run_dir/1-short), ends in an exported draft,
and begins with the weights of the stage before it. A file without stages is a run of its own. Not here: training them
(loop.py), the sections (config.py).
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longdraft.train.config import Config, check_either, config_from_layers, read_layer
from longdraft.train.typed import read_overrides

STAGE_NAME = re.compile(r"[\w-]{1,64}")


@dataclass(frozen=True)
class Stage:
    """A run with its own config; `name` is None for a file without stages."""

    name: str | None
    config: Config

    @property
    def draft(self) -> Path:
        """Where the stage's exported draft lies."""
        return Path(self.config.train.run_dir) / "draft"

    @property
    def is_exported(self) -> bool:
        return (self.draft / "config.json").is_file()  # written last


def load_stages(
    path: str | Path, overrides: Sequence[str] = (), first: str | None = None, from_draft: str | None = None
) -> list[Stage]:
    """The stages of a YAML file, from `first` on.

    Args:
        overrides: `section.field=value` holds for every stage, `stages.NAME.section.field=value` for one; of two that
            set the same field, or two fields of config.EITHER, the later holds.
        first: name of the stage to begin with; the stages before it must be trained, unless `from_draft` is given.
        from_draft: draft folder whose weights the first of them begins with.

    Raises:
        ValueError: as load_config; an unknown stage; `first` without stages.
    """
    raw = read_layer(path)
    listed = raw.pop("stages", None)
    if listed is not None and (not isinstance(listed, dict) or not listed):
        raise ValueError(f"stages: expected a section for each stage, got {listed}")
    stages = {str(name): own for name, own in (listed or {}).items()}
    for name in stages:
        if not STAGE_NAME.fullmatch(name):
            raise ValueError(
                f"stages: {name!r} is no name of a stage, which becomes a folder's; give up to 64 letters, digits, _ "
                "and -"
            )
    layers = _layers(overrides, path, tuple(stages))
    if first is not None:
        _check_known(first, path, tuple(stages))
    if not stages:
        config = config_from_layers([raw, *(layer for _, layer in layers)])
        if from_draft is not None:
            config = replace(config, draft=replace(config.draft, start_from=from_draft))
        return [Stage(None, config)]
    built: list[Stage] = []
    for i, (name, own) in enumerate(stages.items()):
        if not isinstance(own, dict):
            raise ValueError(f"stages.{name}: expected a section of fields, got {own}")
        try:
            config = config_from_layers([raw, own, *(layer for stage, layer in layers if stage in (None, name))])
        except ValueError as error:
            raise ValueError(f"stages.{name}: {error}") from error
        config = replace(config, train=replace(config.train, run_dir=f"{config.train.run_dir}/{i + 1}-{name}"))
        start = str(built[-1].draft) if built else config.draft.start_from
        if from_draft is not None and name == (first or next(iter(stages))):
            start = from_draft
        built.append(Stage(name, replace(config, draft=replace(config.draft, start_from=start))))
    return built[list(stages).index(first) if first else 0 :]


def _layers(
    overrides: Sequence[str], path: str | Path, known: Sequence[str]
) -> list[tuple[str | None, dict[str, Any]]]:
    """The overrides in their order, each with the stage that it is for; None: for all of them."""
    layers: list[tuple[str | None, dict[str, Any]]] = []
    for layer in read_overrides(overrides):
        if "stages" not in layer:
            layers.append((None, layer))
            continue
        if not isinstance(layer["stages"], dict):
            raise ValueError(f"stages: expected a section for each stage, got {layer['stages']}")
        for name, fields in layer["stages"].items():
            _check_known(str(name), path, known)
            if not isinstance(fields, dict):
                raise ValueError(f"stages.{name}: expected a section of fields, got {fields}")
            layers.append((str(name), fields))
    for stage in (None, *known):
        try:
            check_either([layer for name, layer in layers if name == stage])
        except ValueError as error:
            raise ValueError(f"stages.{stage}: {error}" if stage else str(error)) from error
    return layers


def _check_known(name: str, path: str | Path, known: Sequence[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        hint = f"did you mean {near[0]}? (known: {', '.join(known)})" if known else f"{path} lists no stages"
        raise ValueError(f"stages.{name}: unknown stage; {hint}")
