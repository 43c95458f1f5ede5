"""Reads YAML files with overrides, of which a file for training may list stages, as LongSpec's short, long and
instruction data (Appendix E): `stages: {short: {data: {...}, train: {...}}, long: {...}}`.

A stage's config is the file's own sections with the stage's laid over them. Each stage trains in a folder of its own
(run_dir/1-short), ends in an exported draft, and begins with the weights of the stage before it. A file without stages
is a single run.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from longdraft.train.config import EITHER, Config, config_from_dict

UNREADABLE = (OmegaConfBaseException, YAMLError, RecursionError, UnicodeDecodeError, OSError)
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


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config of a YAML file of one run. Raises ValueError of one line, which names the field, for a file or an
    override that cannot be read and for a value that is not valid."""
    return _config([_plain(read_yaml(path)), *map(read_override, overrides)])


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
    raw = _plain(read_yaml(path))
    sections = _by_stage(raw.pop("stages")) if raw.get("stages") is not None else {}
    layers = [(stage, layer) for override in overrides for stage, layer in _of_stages(read_override(override))]
    for name in [name for name in (*(stage for stage, _ in layers), first) if name is not None]:
        if name not in sections:
            near = get_close_matches(name, sections, n=1, cutoff=0.0)
            hint = f"did you mean {near[0]}? (known: {', '.join(sections)})" if near else f"{path} lists no stages"
            raise ValueError(f"stages.{name}: unknown stage; {hint}")
    if not sections:
        config = _config([raw, *(layer for _, layer in layers)])
        return [Stage(None, config if from_draft is None else config.changed(draft={"start_from": from_draft}))]
    first, start, stages = next(iter(sections)) if first is None else first, None, []
    for number, (name, section) in enumerate(sections.items(), start=1):
        try:
            config = _config([raw, section, *(layer for stage, layer in layers if stage in (None, name))])
        except ValueError as error:
            raise ValueError(f"stages.{name}: {error}") from error
        start = from_draft if from_draft is not None and name == first else start or config.draft.start_from
        run_dir = f"{config.train.run_dir}/{number}-{name}"
        stages.append(Stage(name, config.changed(train={"run_dir": run_dir}, draft={"start_from": start})))
        start = str(stages[-1].draft)
    return stages[list(sections).index(first) :]


def _by_stage(listed: Any, where: str = "stages") -> dict[str, dict[str, Any]]:
    """Checks the sections that a mapping has by stage."""
    if not isinstance(listed, Mapping) or not listed:
        raise ValueError(f"{where}: expected a section for each stage, got {listed}")
    for name, section in listed.items():
        if not STAGE_NAME.fullmatch(str(name)):
            raise ValueError(
                f"{where}: {name!r} cannot name a stage, and so a folder; give up to 64 letters, digits, _ and -"
            )
        if not isinstance(section, Mapping):
            raise ValueError(f"{where}.{name}: expected a section of fields, got {section}")
    return {str(name): dict(section) for name, section in listed.items()}


def _of_stages(layer: Mapping[str, Any]) -> list[tuple[str | None, Mapping[str, Any]]]:
    """An override with the stage that it is for, None where it is for all."""
    return list(_by_stage(layer["stages"]).items()) if "stages" in layer else [(None, layer)]


def read_yaml(path: str | Path, overrides: Sequence[str] = ()) -> DictConfig:
    """The file's mapping with the overrides laid over it in order, unchecked and with `${...}` as written.

    Raises ValueError where the file or an override cannot be read.
    """
    path, root = Path(path), Path(__file__).resolve().parents[1]
    if not path.is_file() and path.parts[:1] == ("configs",):  # the recipes that come along, from any folder
        path = root / path
    if not path.is_file():
        raise ValueError(f"config: no file {path}; give one of the YAML files in {root / 'configs'}")
    try:
        raw = OmegaConf.load(path)
    except UNREADABLE as error:
        raise ValueError(f"config: {path} cannot be read: {_one_line(error)}") from error
    if not isinstance(raw, DictConfig):
        raise ValueError(f"config: {path} holds a list, expected sections of fields, as `train: {{steps: 100}}`")
    return lay_over([raw, *map(read_override, overrides)])


def read_override(override: str) -> dict[str, Any]:
    """`section.field=value` as a nested mapping; raises ValueError for any other form."""
    name, _, value = override.partition("=")
    if "=" not in override or override.startswith("-") or not all(name.split(".")):
        raise ValueError(f"override: {override!r} has not the form section.field=value, as train.steps=100")
    if value.strip("'\" ") == "???":
        raise ValueError(f"{name}: ??? stands for a value that is still to be given; give one")
    try:
        return _plain(OmegaConf.from_dotlist([override]))
    except UNREADABLE as error:
        raise ValueError(f"override: {override!r} cannot be read: {_one_line(error)}") from error


def lay_over(layers: Sequence[Any]) -> DictConfig:
    """Lay each mapping over those before it; raises ValueError where a list meets a section of fields."""
    try:
        return OmegaConf.merge(*layers)  # pyright: ignore[reportReturnType]
    except (*UNREADABLE, TypeError) as error:
        raise ValueError(f"config: {_one_line(error)}; give fields as `train: {{steps: 100}}` everywhere") from error


def resolve(raw: DictConfig) -> dict[str, Any]:
    """Plain values with every `${...}` resolved by OmegaConf: `${target.path}` stands for another field,
    `${oc.env:HOME}` for an environment variable.

    Raises ValueError where a reference is unknown or circular, or a value is `???`, still to be given.
    """
    try:
        return OmegaConf.to_container(raw, resolve=True, throw_on_missing=True)  # pyright: ignore[reportReturnType]
    except (OmegaConfBaseException, RecursionError) as error:
        raise ValueError(
            f"{getattr(error, 'full_key', None) or 'config'}: {_one_line(error)}; give a value, a field as "
            "${section.field}, a variable of the environment as ${oc.env:NAME}, or \\${ for the characters themselves"
        ) from error


def _plain(raw: DictConfig) -> dict[str, Any]:
    return OmegaConf.to_container(raw, resolve=False)  # pyright: ignore[reportReturnType]


def _config(layers: Sequence[Mapping[str, Any]]) -> Config:
    """Lay each layer over those before it. One that sets a field of a pair in EITHER unsets the other field."""
    raw = OmegaConf.create()
    for layer in layers:
        for section, fields in layer.items():
            if isinstance(fields, list):
                raise ValueError(f"{section}: expected a section of fields, got {fields}")
            pair = EITHER.get(section, ())
            given = [name for name in pair if isinstance(fields, Mapping) and fields.get(name) is not None]
            if len(given) == 1:
                raw = lay_over([raw, {section: {name: None for name in pair if name not in given}}])
        raw = lay_over([raw, layer])
    return config_from_dict(resolve(raw))


def _one_line(error: BaseException) -> str:
    """The error's message in one line, without the lines that OmegaConf appends about the key."""
    text = " ".join(str(error).split("\n    full_key:")[0].split()) or type(error).__name__
    return f'{text}; write "${{...}}" in quotes within {{ }} or [ ]' if "parsing a flow" in text else text
