"""Reads single values of a model folder's JSON files; every refusal names the field."""

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from nvserve.workers.step_result import ModelRefused

Fields = Mapping[str, Any]

MAX_INT: Final = 2**31 - 1  # messages and kernels hold sizes and positions in 32 bits
MIN_NUMBER: Final = 1e-30  # no model is near either end; all arithmetic in between is finite
MAX_NUMBER: Final = 1e30


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the model folder; ModelRefused says what is wrong with it."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelRefused(f"{path.parent}: no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelRefused(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelRefused(f"{path}: not a JSON object")
    return content


def positive_int(fields: Fields, name: str, default: int | None = None) -> int:
    """`default` stands for a missing or null value; without one the field is required."""
    value = fields.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise _refusal(name, "a positive integer", value)
    if value > MAX_INT:
        raise _refusal(name, f"at most {MAX_INT}", value)
    return value


def positive_number(fields: Fields, name: str, default: float | None = None) -> float:
    """Like positive_int, for numbers that float32 holds with room to reckon."""
    value = fields.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise _refusal(name, "a positive number", value)
    if not MIN_NUMBER <= value <= MAX_NUMBER:
        raise _refusal(name, f"between {MIN_NUMBER:g} and {MAX_NUMBER:g}", value)
    return float(value)


def _refusal(name: str, wanted: str, value: object) -> ModelRefused:
    return ModelRefused(f"config.json: {name} must be {wanted}, not {reprlib.repr(value)}")
