"""Triton's interpreter, which TRITON_INTERPRET=1 chooses, made right for numpy and less slow.

`mend` changes the interpreter of this process:

- that of triton 3.6 turns arrays of one element into range() bounds with int(), which numpy refuses
  from 2.4 on;
- it patches the whole language again at each call of a device function, which the kernel's own
  patch has done already: a third of the time of a sampling kernel;
- it checks integer sums and products for overflow, which costs several operations each: to be
  left out only where kernels draw many thousand times.
"""

import dataclasses
from typing import Any

from triton.runtime import interpreter

_patch_lang = interpreter._patch_lang
_patch_tensor = interpreter._patch_lang_tensor


class _Patches:
    """The language's patches from a kernel's start to its end; modules see it under many names."""

    active: "_Patches | None" = None

    def __init__(self, function: Any) -> None:
        self._scope = _patch_lang(function)
        self.modules = {function.__module__}

    def restore(self) -> None:
        _Patches.active = None
        self._scope.restore()


def _patch_once(function: Any) -> _Patches:
    active = _Patches.active
    if active is None:
        active = _Patches.active = _Patches(function)
    elif function.__module__ not in active.modules:
        active.modules.add(function.__module__)
        _patch_lang(function)
    return active


def _patch_tensor_for_numpy(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def mend(*, checks_overflow: bool = True) -> None:
    """To be called once in a process, before its first kernel runs."""
    interpreter._patch_lang_tensor = _patch_tensor_for_numpy
    interpreter._patch_lang = _patch_once
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=checks_overflow)
