"""Kernels run on a CUDA device where there is one, otherwise in Triton's interpreter."""

import importlib.util
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def _take_loop_bounds_from_arrays() -> None:
    """Triton 3.6's interpreter converts arrays of one element by ``int``, which NumPy 2.4 ended."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


if importlib.util.find_spec("triton") is not None:
    _take_loop_bounds_from_arrays()


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
