"""A study's TOML file: its fields, and the check of all that they name."""

import dataclasses
import tomllib
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any, get_origin

from minigpt.errors import ConfigError, GenerationError, MiniGPTError
from minigpt.files import read_text
from minigpt.norms.foreign.locate import locate
from minigpt.study.settings import Training, check_type, check_types
from minigpt.study.study import AXES, Study, check_cells

SettingFields = dict[str, dataclasses.Field[Any]]  # of a dataclass, by name


def read_study(file: Path) -> Study:
    """Return the study that a TOML file describes, after a check of everything it names.

    An error about a value names the file, and the field as the file does.

    A norm or a site that one of several models lacks is refused in that model's cells alone, when they run.

    Raises:
        ConfigError: if the file cannot be read, or a field is unknown or has another type.
        NormError: if a norm is unknown, or a pattern matches no site of any model.
        GenerationError: if a text is missing.
        CheckpointError: if a model cannot be found.
    """
    try:
        table = tomllib.loads(read_text(file, ConfigError))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error
    try:
        return _checked_study(table, file)
    except MiniGPTError as error:
        if error.argument is None:
            raise
        raise type(error)(f"{file}: {error}") from error


def _checked_study(table: dict[str, Any], file: Path) -> Study:
    study = _study_of(table, file)
    for name, values in study.options.items():
        for value in values:
            check_type(name, value, AXES[name].metadata["kind"])
    for text in (study.text, *study.options.get("fit", ())):
        if text and not Path(text).is_file():
            raise GenerationError(f"{file}: there is no file {text}")
    for metric in study.metrics:
        if ":" not in metric:
            raise ConfigError(f"a metric must be path/to/file.py:name or package.module:name, got {metric!r}")
        locate(metric)
    check_cells(study.cells())
    return study


def _study_of(table: dict[str, Any], file: Path) -> Study:
    """Return the study that a file's table describes, after a check of names and types."""
    known = _fields_by_name(Study)
    del known["options"]  # each has a field of its own in the file
    lists = _as_lists(table, known | AXES, ("models", "norms"), str(file))
    options = {name: lists[name] for name in AXES if name in lists}
    settings: dict[str, Any] = {}
    for name, setting in known.items():
        if name in table:
            is_list = get_origin(setting.type) is list
            settings[name] = lists[name] if is_list else table[name]
    study = Study(**settings, options=options)
    check_types(study)
    if not study.finetune:
        return study
    tuning = _as_lists(study.finetune, _fields_by_name(Training), ("text", "steps"), f"{file}, [finetune]")
    return dataclasses.replace(study, finetune=tuning)


def _fields_by_name(kind: type[Any]) -> SettingFields:
    return {setting.name: setting for setting in fields(kind)}


def _as_lists(table: dict[str, Any], known: SettingFields, needed: Collection[str], where: str) -> dict[str, list[Any]]:
    """Return the fields of a table of the file as lists of values; ``false`` means None, which TOML lacks.

    Args:
        known: the fields of the dataclass.
    """
    unknown = table.keys() - known.keys()
    if unknown:
        raise ConfigError(f"{where}: unknown field {min(unknown)!r}; known are {', '.join(known)}")
    for name in (*needed, *table):
        if table.get(name, []) == []:
            raise ConfigError(f"{where}: {name} is missing")
    lists = {}
    for name, value in table.items():
        values = value if isinstance(value, list) else [value]
        if known[name].default is None:
            values = [None if one is False else one for one in values]
        lists[name] = values
    return lists
