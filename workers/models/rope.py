"""Rotary settings of config.json: rope_parameters, or rope_theta and rope_scaling of older files.

Knows numbers only; layers.py makes the table of them.
"""

import math
from dataclasses import dataclass

from nvserve.workers.models.fields import MAX_INT, Fields, positive_int, positive_number
from nvserve.workers.step_result import ModelRefused


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base, and how its frequencies are scaled for longer contexts."""

    theta: float
    kind: str = "default"  # default, linear, llama3 or yarn
    factor: float = 1.0
    original_max_position: int = 8192  # llama3 and yarn
    widened_context: int = 0  # yarn, in tokens; 0 where config.json has no original context
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn, like those below
    beta_slow: float = 1.0
    is_truncated: bool = True
    attention_factor: float = 1.0  # multiplies cosines and sines


def read_rope(fields: Fields, max_position: int) -> RopeConfig:
    """The rotary embedding of a model whose max_position_embeddings is max_position."""
    scaling = _scaling(fields)
    theta = positive_number(
        {"rope_theta": _first(scaling, fields, "rope_theta")}, "rope_theta", 1e4
    )
    partial = _first(scaling, fields, "partial_rotary_factor")
    if partial not in (None, 1.0):
        raise ModelRefused(
            f"config.json: partial_rotary_factor {partial!r} is not supported, only whole heads"
        )
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    match kind:
        case "default" | "dynamic":  # dynamic scales beyond max_position only, which none may pass
            return RopeConfig(theta)
        case "linear":
            return RopeConfig(theta, kind, positive_number(scaling, "factor"))
        case "llama3":
            return _read_llama3(scaling, theta, _original(scaling, fields) or max_position)
        case "yarn":
            return _read_yarn(scaling, theta, _original(scaling, fields), max_position)
    raise ModelRefused(
        f"config.json: rope_type {kind!r} is not supported;"
        " default, linear, dynamic, llama3 and yarn are"
    )


def _scaling(fields: Fields) -> Fields:
    """The older key wins where both are, as in transformers."""
    for name in ("rope_scaling", "rope_parameters"):
        found = fields.get(name)
        if not found:
            continue
        if not isinstance(found, dict):
            raise ModelRefused(f"config.json: {name} must be an object, not {found!r}")
        nested = [key for key, value in found.items() if isinstance(value, dict)]
        if nested:
            raise ModelRefused(
                f"config.json: {name} differs between layers ({', '.join(nested)}),"
                " which is not supported"
            )
        return found
    return {}


def _first(scaling: Fields, fields: Fields, name: str) -> object:
    value = scaling.get(name)
    return fields.get(name) if value is None else value


def _original(scaling: Fields, fields: Fields) -> int | None:
    """The context before scaling: beside the settings if it is there, else among them, or none."""
    name = "original_max_position_embeddings"
    value = _first(fields, scaling, name)
    if isinstance(value, float) and value.is_integer():  # 8192.0: the other numbers are floats too
        value = int(value)
    return None if value is None else positive_int({name: value}, name)


def _read_llama3(scaling: Fields, theta: float, original: int) -> RopeConfig:
    rope = RopeConfig(
        theta,
        "llama3",
        positive_number(scaling, "factor"),
        original,
        low_freq_factor=positive_number(scaling, "low_freq_factor"),
        high_freq_factor=positive_number(scaling, "high_freq_factor"),
    )
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise ModelRefused(
            f"config.json: high_freq_factor {rope.high_freq_factor:g} must be more than"
            f" low_freq_factor {rope.low_freq_factor:g}"
        )
    return rope


def _read_yarn(
    scaling: Fields, theta: float, original: int | None, max_position: int
) -> RopeConfig:
    if theta <= 1.0:
        raise ModelRefused(f"config.json: rope_theta {theta:g} must be more than 1 for yarn")
    factor = positive_number(scaling, "factor", max_position / (original or max_position))
    widened = 0 if original is None else int(factor * original)
    if widened > MAX_INT:
        raise ModelRefused(
            f"config.json: factor {factor:g} makes a context of more than {MAX_INT} tokens"
        )
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original or max_position,
        widened,
        beta_fast=_beta(scaling, "beta_fast", 32.0),
        beta_slow=_beta(scaling, "beta_slow", 1.0),
        is_truncated=bool(scaling.get("truncate", True)),
        attention_factor=_yarn_attention_factor(scaling, factor),
    )


def _beta(scaling: Fields, name: str, default: float) -> float:
    """Here 0 stands for the default as well."""
    return positive_number({name: scaling.get(name) or default}, name)


def _yarn_attention_factor(scaling: Fields, factor: float) -> float:
    """As given, or what the method's authors found to suit the factor."""

    def growth(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    default = growth(1.0)
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        weights = positive_number(scaling, "mscale"), positive_number(scaling, "mscale_all_dim")
        default = growth(weights[0]) / growth(weights[1])
    return positive_number(scaling, "attention_factor", default)
