"""Reads single values of a model folder's JSON files; every refusal names the field."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvserve.workers.step_result import ModelRefused

Fields = Mapping[str, Any]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the model folder; ModelRefused says what is wrong with it."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelRefused(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelRefused(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelRefused(f"{path} holds no JSON object")
    return content


def positive_int(fields: Fields, name: str, default: int | None = None) -> int:
    """`default` stands for a missing or null value; without one the field is required."""
    value = fields.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelRefused(f"config.json: {name} must be a positive integer, not {value!r}")
    return value


def positive_number(fields: Fields, name: str, default: float | None = None) -> float:
    """Like positive_int, for finite numbers."""
    value = fields.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelRefused(f"config.json: {name} must be a positive number, not {value!r}")
    return float(value)
