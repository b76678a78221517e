"""Fills this rank's weights: from safetensors, or with random numbers.

Each rank reads only its own slices. Every parameter is loaded exactly once, or the model is refused
with the parameter's name.
"""

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from nvserve.workers.models.fields import read_json
from nvserve.workers.models.layers import Parameter
from nvserve.workers.step_result import ModelRefused

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
LFS_POINTER: Final = b"version https://git-lfs"
EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
COMPARED_ROWS: Final = 4096  # of the two above, at a time
DUMMY_STD: Final = 0.02
DUMMY_CHUNK: Final = 1 << 24  # values of a random tensor that are made at a time

_FLOATS: Final = ("F64", "F32", "F16", "BF16")
# Checkpoints carry these buffers; they follow from config.json.
_KNOWN_EXTRAS: Final = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")

Report = Callable[[float], None]  # the part that is done, 0 to 1


def load(model: Path, parameters: list[Parameter], is_tied: bool, report: Report) -> None:
    """Fill all parameters from the checkpoint in `model`; ModelRefused when anything is amiss.

    A tied model may carry a head in its checkpoint, which must be its embedding again.
    """
    wanted = {parameter.name: parameter for parameter in parameters}
    assert len(wanted) == len(parameters), "two parameters share a name"
    files = _files_by_name(model)
    missing = sorted(wanted.keys() - files.keys())
    if missing:
        raise ModelRefused(f"the checkpoint lacks {_some(missing)}")
    extras = sorted(n for n in files.keys() - wanted.keys() if not _is_known_extra(n, is_tied))
    if extras:
        raise ModelRefused(f"this model has no place for the checkpoint's {_some(extras)}")
    total = sum(parameter.target.numel() for parameter in parameters)
    num_done = 0
    for path in sorted(set(files.values())):
        with _open(path) as checkpoint:
            for name in sorted(n for n in wanted if files[n] == path):
                _fill(wanted[name], checkpoint.get_slice(name), path)
                if name == EMBEDDING and is_tied and HEAD in files:
                    _check_head(wanted[name], files[HEAD])
                num_done += wanted[name].target.numel()
                report(num_done / total)


def _check_head(embedding: Parameter, path: Path) -> None:
    """Refuse a tied model whose head in this file is another one.

    transformers unties such a model without a word; here config.json has to say so.
    """
    with _open(path) as checkpoint:
        if _holds(checkpoint.get_slice(HEAD), embedding):
            return
    raise ModelRefused(
        f"{HEAD} in {path.name} differs from {EMBEDDING}, though config.json says"
        " tie_word_embeddings; transformers would serve the stored head: to have that here,"
        " tie_word_embeddings must say false"
    )


def _holds(source: Any, parameter: Parameter) -> bool:
    """Is the checkpoint's tensor what this parameter was filled with, as far as this rank sees?"""
    if tuple(source.get_shape()) != parameter.full_shape:
        return False
    for first in range(0, len(parameter.target), COMPARED_ROWS):
        here = parameter.target[first : first + COMPARED_ROWS].cpu()
        start = parameter.start + first
        if not torch.equal(source[start : start + len(here)].to(here.dtype), here):
            return False
    return True


def _some(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _is_known_extra(name: str, is_tied: bool) -> bool:
    return name.endswith(_KNOWN_EXTRAS) or (is_tied and name == HEAD)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError:
        raise ModelRefused(f"{path} does not exist") from None
    except (OSError, SafetensorError) as error:
        if _is_lfs_pointer(path):
            raise ModelRefused(f"{path} is a Git LFS pointer; git lfs pull gets the file") from None
        raise ModelRefused(f"{path} cannot be read: {error}") from error


def _is_lfs_pointer(path: Path) -> bool:
    """A clone made without Git LFS holds a few lines of text in place of each large file."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(LFS_POINTER)) == LFS_POINTER


def _files_by_name(model: Path) -> dict[str, Path]:
    """Which file holds each tensor; refuses doubled tensors and an index that is not true."""
    files: dict[str, Path] = {}
    index = {} if (model / SINGLE).exists() else _read_index(model)
    paths = sorted({model / shard for shard in index.values()}) if index else _unindexed(model)
    for path in paths:
        with _open(path) as checkpoint:
            for name in checkpoint.keys():  # noqa: SIM118  (no mapping, it only has this method)
                if name in files:
                    raise ModelRefused(f"{name} is in both {files[name].name} and {path.name}")
                files[name] = path
    for name, shard in index.items():
        if files.get(name) != model / shard:
            raise ModelRefused(f"{INDEX} places {name} in {shard}, which does not hold it")
    return files


def _read_index(model: Path) -> dict[str, str]:
    """Tensor name -> file name; empty when the checkpoint has no index."""
    if not (model / INDEX).exists():
        return {}
    weight_map = read_json(model / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelRefused(f"{model / INDEX} has no weight_map")
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelRefused(f"{model / INDEX} names {shard!r}, which is no file of this folder")
    return weight_map


def _unindexed(model: Path) -> list[Path]:
    if (model / SINGLE).exists():
        return [model / SINGLE]
    paths = sorted(model.glob("*.safetensors"))
    if not paths:
        raise ModelRefused(f"{model} holds no safetensors weights")
    return paths


def _fill(parameter: Parameter, source: Any, path: Path) -> None:
    """Copy one rank's slice of a checkpoint tensor to its place."""
    shape, kind = tuple(source.get_shape()), source.get_dtype()
    if shape != parameter.full_shape:
        raise ModelRefused(
            f"{parameter.name} in {path.name} has shape {list(shape)},"
            f" the config asks for {list(parameter.full_shape)}"
        )
    if kind not in _FLOATS:
        raise ModelRefused(f"{parameter.name} in {path.name} has dtype {kind}, no plain float")
    where = [slice(None)] * len(shape)
    size = parameter.target.shape[parameter.axis]
    where[parameter.axis] = slice(parameter.start, parameter.start + size)
    if size:
        parameter.target.copy_(source[tuple(where)])


# -- random weights ----------------------------------------------------------------------------


def load_dummy(parameters: list[Parameter], seed: int, report: Report) -> None:
    """Random weights that depend on seed and parameter names only, not on the number of ranks.

    Normal with deviation 0.02; the scales of norms are 1, so that activations keep their size.
    """
    total = sum(math.prod(parameter.full_shape) for parameter in parameters)
    num_done = 0
    for parameter in parameters:
        if parameter.name.endswith("norm.weight"):
            parameter.target.fill_(1.0)
        else:
            _fill_random(parameter, seed)
        num_done += math.prod(parameter.full_shape)
        report(num_done / total)


def _fill_random(parameter: Parameter, seed: int) -> None:
    """The full tensor is a stack of chunks of rows, each with a seed of its own."""
    target, num_rows = parameter.target, parameter.full_shape[0]
    row_size = math.prod(parameter.full_shape[1:])
    rows_per_chunk = max(1, DUMMY_CHUNK // row_size)
    first, last = 0, num_rows
    if parameter.axis == 0:
        first, last = parameter.start, parameter.start + target.shape[0]
    generator = torch.Generator(target.device)
    for start in range(first // rows_per_chunk * rows_per_chunk, last, rows_per_chunk):
        end = min(start + rows_per_chunk, num_rows)
        generator.manual_seed(_seed_of(parameter.name, start, seed))
        shape = (end - start, *parameter.full_shape[1:])
        values = torch.empty(shape, device=target.device).normal_(0, DUMMY_STD, generator=generator)
        here, there = max(start, first), min(end, last)
        values = values[here - start : there - start]
        if parameter.axis == 1:
            values = values[:, parameter.start : parameter.start + target.shape[1]]
        target[here - first : there - first].copy_(values)


def _seed_of(name: str, start: int, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed} {start} {name}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")
