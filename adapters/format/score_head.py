"""Heads of sequence classifiers and reward models, which PEFT saves beside their LoRA (`modules_to_save`: `score`).

transformers' `…ForSequenceClassification` has the linear `score` in place of the head of the vocabulary. It reads the
last token's state, after the model's last norm.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from ..adapter import BaseShape
from ..errors import AdapterInvalid, quote
from .tensor_file import DTYPE_NAMES, Tensor, TensorEntry, TensorFile, is_finite, tensor_bytes

MAX_LABELS: Final = 4096
MAX_HEAD_BYTES: Final = 16 << 20  # as uploaded: routers keep heads in memory
_WEIGHT: Final = "base_model.model.score.weight"
_NAME: Final = re.compile(r"base_model\.model\.score\.(?:modules_to_save\.(?:[^.]+\.)?)?(?P<part>weight|bias)")
_STORED_NAME: Final = re.compile(r"(?P<part>weight|bias)\.(?P<crc>[0-9a-f]{8})")


@dataclass(frozen=True, eq=False)
class ScoreHead:
    weight: Tensor  # [num_labels, hidden]
    bias: Tensor | None = None  # [num_labels]; no decoder of transformers has one

    @property
    def num_labels(self) -> int:
        return len(self.weight)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return {"weight": self.weight} | ({} if self.bias is None else {"bias": self.bias})

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def identity(self) -> Iterable[bytes | memoryview]:
        """What a digest is of."""
        for name, tensor in self.tensors.items():
            yield json.dumps(["score", name, DTYPE_NAMES[tensor.dtype], list(tensor.shape)]).encode() + b"\n"
            yield tensor_bytes(tensor)

    def in_float32(self) -> ScoreHead:
        """A copy that does not keep the file."""
        return ScoreHead(*(tensor.astype(np.float32) for tensor in self.tensors.values()))

    def logits(self, states: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """`[n, num_labels]` of n states `[hidden]`. A row does not depend on the others. What overflows is not finite.

        The head is `in_float32`.
        """
        logits = np.empty((len(states), self.num_labels), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            for row, state in zip(logits, states, strict=True):
                np.matmul(self.weight, state, out=row)
            return logits if self.bias is None else logits + self.bias


def head_names(names: Iterable[str]) -> list[str]:
    """Those of a head's tensors."""
    return [name for name in names if _NAME.fullmatch(name)]


def check_head(names: Iterable[str], entries: Mapping[str, TensorEntry], shape: BaseShape, *, is_named: bool) -> None:
    """Raises AdapterInvalid unless the tensors called `names` are a head of this base.

    `is_named`: in the config; then there must be one.
    """
    parts: dict[str, str] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        assert match is not None
        if parts.setdefault(match["part"], name) != name:
            raise AdapterInvalid(f"the file holds a tensor twice: as {parts[match['part']]} and as {quote(name, 160)}")
    if not parts and not is_named:
        return
    if "weight" not in parts:
        raise AdapterInvalid(f"the file lacks {_WEIGHT}, the head that modules_to_save in adapter_config.json names")
    weight = entries[parts["weight"]]
    hidden = None if shape.ends is None else shape.ends.hidden_size
    if len(weight.shape) != 2 or weight.shape[1] != hidden:
        raise AdapterInvalid(
            f"{parts['weight']} has shape {list(weight.shape)}, expected [number of labels, {hidden}]: the base has "
            f"{hidden} features"
        )
    num_labels, num_bytes = weight.shape[0], sum(entries[name].end - entries[name].start for name in parts.values())
    if num_labels > MAX_LABELS or num_bytes > MAX_HEAD_BYTES:
        raise AdapterInvalid(
            f"the score head has {num_labels} labels in {num_bytes} bytes: at most {MAX_LABELS} labels in "
            f"{MAX_HEAD_BYTES} bytes are served"
        )
    if "bias" in parts and (bias := entries[parts["bias"]].shape) != (num_labels,):
        raise AdapterInvalid(f"{parts['bias']} has shape {list(bias)}, expected [{num_labels}]: the number of labels")


def read_head(file: TensorFile, names: Iterable[str]) -> ScoreHead | None:
    """The head that `check_head` has passed; None: there is none. Raises AdapterInvalid for NaN and infinity."""
    tensors = {}
    for name in names:
        tensors[name.rpartition(".")[2]] = tensor = file.tensor(name)
        if not is_finite(tensor):
            raise AdapterInvalid(f"{name} holds NaN or infinity: only finite numbers are accepted")
    return ScoreHead(**tensors) if tensors else None


# A head beside its adapter's tensors in the store. Each tensor has its CRC-32, since the digest is of all of them.


def stored_tensors(head: ScoreHead) -> dict[str, Tensor]:
    return {f"{part}.{crc32(tensor_bytes(tensor)):08x}": tensor for part, tensor in head.tensors.items()}


def stored_head(file: TensorFile) -> ScoreHead:
    """Raises ValueError for a file that is damaged."""
    tensors = {}
    for name in file.entries:
        match, tensor = _STORED_NAME.fullmatch(name), file.tensor(name)
        if match is None or f"{crc32(tensor_bytes(tensor)):08x}" != match["crc"]:
            raise ValueError(f"the checksum of {name!r} does not match")
        tensors[match["part"]] = tensor
    if "weight" not in tensors:
        raise ValueError("it has no weight")
    return ScoreHead(**tensors)
