"""The stages that a YAML file lists, such as LongSpec's short, long and instruction data (Appendix E).

A YAML file may list stages: `stages: {short: {data: {...}, train: {...}}, long: {...}}`. A stage's config is the file's
own sections with the stage's laid over them. Each stage trains in a folder of its own (run_dir/1-short), ends in an
exported draft, and begins with the weights of the stage before it. A file without stages is a single run. Not here:
training them (loop.py), the sections (config_sections.py).
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
    """A run with its config. `name`: None for a file without stages."""

    name: str | None
    config: Config

    @property
    def draft(self) -> Path:
        """The folder of the stage's exported draft."""
        return Path(self.config.train.run_dir) / "draft"

    @property
    def is_exported(self) -> bool:
        return (self.draft / "config.json").is_file()  # written last


def load_stages(
    path: str | Path, overrides: Sequence[str] = (), first: str | None = None, from_draft: str | None = None
) -> list[Stage]:
    """The stages of a YAML file, from `first` on.

    Args:
        overrides: `section.field=value` holds for every stage, `stages.NAME.section.field=value` for one. Of two that
            set the same field, or two fields of a pair in EITHER, the later holds.
        first: name of the stage to begin with. The stages before it must be trained, unless `from_draft` is given.
        from_draft: draft folder whose weights the first of these stages begins with.

    Raises ValueError as load_config does, for an unknown stage, and for `first` in a file without stages.
    """
    raw = read_layer(path)
    listed = raw.pop("stages", None)
    if listed is not None and (not isinstance(listed, dict) or not listed):
        raise ValueError(f"stages: expected a section for each stage, got {listed}")
    stages = {str(name): layer for name, layer in (listed or {}).items()}
    for name in stages:
        if not STAGE_NAME.fullmatch(name):
            raise ValueError(
                f"stages: {name!r} cannot name a stage, and so a folder; give up to 64 letters, digits, _ and -"
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
    for i, (name, sections) in enumerate(stages.items()):
        if not isinstance(sections, dict):
            raise ValueError(f"stages.{name}: expected a section of fields, got {sections}")
        try:
            config = config_from_layers([raw, sections, *(layer for stage, layer in layers if stage in (None, name))])
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
    """The overrides in order, each with the name of its stage, or None where it is for all stages."""
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
