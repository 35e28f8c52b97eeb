"""Names of a base's tensors: those of a model that was saved without its head, as for embeddings, lack a prefix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, TypeVar

from .stored_tensor import are_equal, shards, stored_tensors

T = TypeVar("T")

HEAD: Final = "lm_head.weight"
_PREFIX: Final = "model."  # of all but the head's, where there may be one
_EMBEDDING: Final = "embed_tokens.weight"


def named_in_full(stored: Mapping[str, T]) -> dict[str, T]:
    """The same by the names that the model has with a head."""
    if _EMBEDDING not in stored:
        return dict(stored)
    return {name if name == HEAD else _PREFIX + name: value for name, value in stored.items()}


def lacks_head(stored: Iterable[str]) -> bool:
    """The names are those of a model that was saved without its head."""
    names = {*stored} & {_EMBEDDING, HEAD}
    return names == {_EMBEDDING}


def has_other_head(folder: Path) -> bool:
    """Whether a model folder has a head that is not its embedding. Raises ValueError for a damaged file."""
    stored = named_in_full({tensor.name: tensor for path in shards(folder) for tensor in stored_tensors(path)})
    head, embedding = stored.get(HEAD), stored.get(_PREFIX + _EMBEDDING)
    return head is not None and embedding is not None and not are_equal(head, embedding)


def folder_lacks_head(folder: Path) -> bool:
    """The same of a model folder. Raises ValueError for a damaged file."""
    return lacks_head(tensor.name for path in shards(folder) for tensor in stored_tensors(path))
