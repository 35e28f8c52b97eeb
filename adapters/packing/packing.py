"""Turns an adapter's matrices into the pages that the pool holds."""

from __future__ import annotations

import numpy as np

from ..adapter import BaseShape, family_of_module
from ..errors import AdapterInvalid
from ..format.content import AdapterContent
from ..format.tensor_file import BFLOAT16, Tensor, is_finite
from .layout import AdapterLayout

PAGE_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": BFLOAT16}


def pack(content: AdapterContent, layout: AdapterLayout) -> Tensor:
    """`[num_pages, num_layers, slab]` in the layout's dtype: slab i of layer l is `[i, l]`.

    B is multiplied by the scaling in float32, so that kernels need no scaling. Elements outside all matrices are zero.
    Raises AdapterInvalid if the adapter does not fit the layout's base, or its numbers do not fit the dtype.
    """
    _check_fit(content, layout.shape)
    dtype = PAGE_DTYPES[layout.dtype]
    offsets = layout.offsets(content.module_ranks)
    num_pages = layout.num_pages(content.module_ranks)
    pages = np.zeros((num_pages, layout.shape.num_layers, layout.slab), dtype)
    for layer in range(layout.shape.num_layers):
        array = np.zeros(num_pages * layout.slab, dtype)
        for module, place in offsets.items():
            part = layout.part(module)
            for index, member in enumerate(layout.shape.members(module)):
                found = content.matrices.get((layer, member))
                if found is None:
                    continue
                a_start, b_start = place.a + index * place.stride, place.b + index * place.stride
                a = found.a[:, slice(*part.inputs)]
                b = found.b[slice(*part.outputs)].astype(np.float32)
                with np.errstate(over="ignore"):  # overflows are checked below
                    array[a_start : a_start + a.size] = a.astype(dtype).reshape(-1)
                    b *= np.float32(found.scaling)
                    array[b_start : b_start + b.size] = b.astype(dtype).T.reshape(-1)  # [rank, out]
        if not is_finite(array):
            raise AdapterInvalid(f"layer {layer} overflows {layout.dtype} once scaled: its numbers are too large")
        pages[:, layer] = array.reshape(num_pages, layout.slab)
    return pages


def _check_fit(content: AdapterContent, shape: BaseShape) -> None:
    for (layer, module), found in content.matrices.items():
        sides = shape.modules.get(family_of_module(module))
        if not shape.has(layer, module) or sides != (found.a.shape[1], found.b.shape[0]):
            raise AdapterInvalid(
                f"{module} of layer {layer} with {found.a.shape[1]} inputs and {found.b.shape[0]} outputs does not fit "
                f"the base: it has {shape.num_layers} layers, and {sides} there"
            )
