"""What adapters have of the base's embedding and head beside LoRA: whole weights, and rows of trained tokens.

All become rows of tokens in place of the base's (`TokenRows`), as PEFT computes once it has loaded the file:

- `modules_to_save` has a weight of the adapter's own. Of a base whose embedding is its head it is that of one of them
  alone, unless `ensure_weight_tying` is set.
- `save_embedding_layers` saves the base's weight, and loading replaces it: for both where they are one.
- `trainable_token_indices` has whole rows, though the file calls them a delta. Where embedding and head are one, those
  of the embedding are the head's, too.

Rows that are the base's are left out: most of a saved weight are.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..adapter import EMBEDDING, END_MODULES, HEAD, BaseEnds, BaseShape
from ..errors import AdapterInvalid, quote
from .base_weights import BaseWeights
from .content import TokenRows
from .peft import CONFIG_FILE, TENSORS_FILE, LoraConfig, parse_end_name
from .targets import are_tied, end_names, suffixes
from .tensor_file import Tensor, TensorFile, tensor_bytes

_GATHERED_BYTES = 4 << 20  # of rows that are copied at once
_WEIGHTS: Mapping[str, str] = {EMBEDDING: "model.embed_tokens.weight", HEAD: "lm_head.weight"}  # in the base
_HEAD_BIAS = "lm_head.bias"
_Tokens = tuple[str, tuple[int, ...]]  # the file's name of rows, and their tokens in its order


@dataclass(frozen=True)
class EndTensors:
    """The file's names of the tensors that decide an adapter's rows, by EMBEDDING and HEAD."""

    weights: Mapping[str, str] = field(default_factory=dict)  # of all tokens
    tokens: Mapping[str, _Tokens] = field(default_factory=dict)
    biases: tuple[str, ...] = ()  # of the head


@dataclass(frozen=True, eq=False)
class ChangedRows:
    """Rows of a file's tensors that are not the base's."""

    token_ids: Tensor  # [n] int64, ascending
    sources: tuple[Tensor, ...]  # each [m, hidden]
    source_ids: Tensor  # [n], which of the sources
    places: Tensor  # [n], the row there


def match_end_tensors(
    names: Iterable[str],
    config: LoraConfig,
    targets: Iterable[tuple[int, str]],
    file: TensorFile,
    shape: BaseShape,
    prefix: str,
) -> EndTensors:
    """The tensors of embedding and head beside LoRA, once they are as config and base say.

    `names`: those that `parse_end_name` knows. `targets`: of LoRA, as (layer, module). Raises AdapterInvalid for
    missing, extra and doubled tensors, for shapes that do not fit, and for what PEFT does not load.
    """
    keys, is_tied = end_names(config, shape, prefix), are_tied(config, shape, prefix)
    by_kind, biases = _by_kind(names, keys)
    saved = _saved_ends(config, keys)
    if shape.ends is None:
        if by_kind or biases or saved or config.trained_tokens:
            raise AdapterInvalid("embedding and head of this base cannot be trained: train its linears alone")
        return EndTensors()
    ends, token_ids = shape.ends, _trained_tokens(config, keys, shape.ends)
    if saved and is_tied and config.ties_ends:
        saved = {*END_MODULES}
    loras = {module for _, module in targets if module in END_MODULES}
    tied_tokens = is_tied and _tokens_are_tied(config, token_ids)
    _check_conflicts(saved, token_ids, loras, tied_tokens)
    tokens = {
        end: (_needed(by_kind, end, "tokens", "trainable_token_indices"), ids)
        for end, ids in token_ids.items()
        if not (end == HEAD and tied_tokens)
    }
    with_tokens = {*tokens, HEAD} if tied_tokens else {*tokens}
    if HEAD in with_tokens and ends.head_has_bias:
        raise AdapterInvalid(
            "trainable_token_indices has rows of lm_head, and the head of this base has a bias, which PEFT leaves out "
            "there: name tokens of embed_tokens alone, or lm_head in modules_to_save"
        )
    for (end, kind), name in by_kind.items():
        _check_kind(end, kind, name, shape.path(end), saved, loras, with_tokens)
        rows = len(token_ids[end if end in tokens else EMBEDDING]) if kind == "tokens" else ends.vocab_size
        _check_shape(name, file.entries[name].shape, (rows, ends.hidden_size), kind, ends)
    for name in biases:
        _check_shape(name, file.entries[name].shape, (ends.vocab_size,), "bias", ends)
    weights = {end: name for end in END_MODULES if (name := _base_weight(by_kind, end, saved))}
    if weights and is_tied:  # one weight, and of two in a file PEFT loads the head's last
        weights = dict.fromkeys(END_MODULES, weights.get(HEAD) or weights[EMBEDDING])
    weights |= {end: by_kind.get((end, "weight")) or _needed(by_kind, end, "copy", "modules_to_save") for end in saved}
    if saved and is_tied and config.ties_ends:
        weights[EMBEDDING] = weights[HEAD]
    if tied_tokens:
        tokens[HEAD] = tokens[EMBEDDING]
    return EndTensors(weights, tokens, biases)


def changed_rows(
    tensors: EndTensors, file: TensorFile, shape: BaseShape, base: BaseWeights | None
) -> dict[str, ChangedRows]:
    """The adapter's rows by EMBEDDING and HEAD, which share one value where all of them are the same.

    Tensors and the base's weights are read by pieces; without these all rows count. Raises AdapterInvalid for NaN and
    infinity, and for a bias of the head that is not the base's.
    """
    for name in tensors.biases:
        _check_bias(file.tensor(name), name, base)
    by_source: dict[tuple[str, _Tokens | None, str], ChangedRows] = {}
    rows: dict[str, ChangedRows] = {}
    for end in END_MODULES:
        of_all, of_tokens = tensors.weights.get(end, ""), tensors.tokens.get(end)
        if not of_all and of_tokens is None:
            continue
        assert shape.ends is not None, "it was checked"
        source = of_all, of_tokens, _WEIGHTS[EMBEDDING if shape.ends.is_tied else end]
        if source not in by_source:
            by_source[source] = _changed(*source, file, base)
        if len(by_source[source].token_ids):
            rows[end] = by_source[source]
    return rows


def gathered(rows: Mapping[str, ChangedRows], folder: Path) -> dict[str, TokenRows]:
    """The rows themselves: a tensor of the file, or copies from several, which lie in another one, in `folder`.

    It has no name, is gone with its last use, and is mapped, so that memory holds pieces of it.
    """
    distinct = {id(each): each for each in rows.values()}
    by_id = {key: TokenRows(each.token_ids, _gather(each, folder)) for key, each in distinct.items()}
    return {end: by_id[id(each)] for end, each in rows.items()}


def _by_kind(names: Iterable[str], keys: Mapping[str, str]) -> tuple[dict[tuple[str, str], str], tuple[str, ...]]:
    """The names by end and kind, and those of biases of the head."""
    by_kind: dict[tuple[str, str], str] = {}
    biases = list[str]()
    for name in names:
        key = parse_end_name(name)
        assert key is not None, "only names of the ends"
        if key[0] not in keys:
            raise AdapterInvalid(
                f"{TENSORS_FILE} holds {quote(name, 160)}, and the model that was trained has no {key[0]}, by the "
                f"names of the other tensors or task_type in {CONFIG_FILE}"
            )
        if key == (HEAD, "bias"):
            biases.append(name)
        elif by_kind.setdefault(key, name) != name:
            raise AdapterInvalid(
                f"{TENSORS_FILE} holds a tensor twice: as {quote(by_kind[key], 160)} and as {quote(name, 160)}"
            )
    return by_kind, tuple(biases)


def _saved_ends(config: LoraConfig, keys: Mapping[str, str]) -> set[str]:
    saved = set[str]()
    for name in config.modules_to_save:
        end = _end_of(name, keys)
        if end is None and name == HEAD:
            continue  # the model that was trained has none, and PEFT passes over it
        if end is None:
            raise AdapterInvalid(
                f"modules_to_save names {quote(name)}: of whole modules {' and '.join(END_MODULES)} are served, train "
                "others by LoRA"
            )
        saved.add(end)
    return saved


def _trained_tokens(config: LoraConfig, keys: Mapping[str, str], ends: BaseEnds) -> dict[str, tuple[int, ...]]:
    tokens: dict[str, tuple[int, ...]] = {}
    for name, ids in config.trained_tokens.items():
        end = _end_of(name, keys)
        if end is None or end in tokens:
            raise AdapterInvalid(
                f"trainable_token_indices names {quote(name)}: {' and '.join(END_MODULES)} are served, each once"
            )
        seen = set[int]()
        for each in ids:
            if not 0 <= each < ends.vocab_size:
                raise AdapterInvalid(
                    f"trainable_token_indices names token {each} of {end}: the base has rows for the tokens 0 to "
                    f"{ends.vocab_size - 1}"
                )
            if each in seen:
                raise AdapterInvalid(f"trainable_token_indices names token {each} of {end} twice: name it once")
            seen.add(each)
        tokens[end] = ids
    return tokens


def _end_of(name: str, keys: Mapping[str, str]) -> str | None:
    """The end that a name of PEFT's means. `keys`: names of the ends in full."""
    return next((end for end, key in keys.items() if name == end or name in suffixes(key)), None)


def _tokens_are_tied(config: LoraConfig, token_ids: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the embedding's rows of tokens are the head's, too, where both are one in the base, as in PEFT."""
    if EMBEDDING not in token_ids:
        return False
    is_same = token_ids.get(HEAD, token_ids[EMBEDDING]) == token_ids[EMBEDDING]
    if config.ties_ends and not is_same:
        raise AdapterInvalid(
            "trainable_token_indices has other tokens for embed_tokens than for lm_head, and ensure_weight_tying is "
            "set, which PEFT cannot load: name the same tokens in the same order, or do not set it"
        )
    return is_same


def _check_conflicts(
    saved: set[str], token_ids: Mapping[str, tuple[int, ...]], loras: set[str], tied_tokens: bool
) -> None:
    for end in token_ids:
        for field_name, named in (("modules_to_save", saved), ("target_modules", loras)):
            if end in named:
                raise AdapterInvalid(
                    f"{field_name} and trainable_token_indices both name {end}, which PEFT does not compute: name it "
                    "in one of the two"
                )
    if tied_tokens and HEAD in saved:
        raise AdapterInvalid(
            "modules_to_save names lm_head, and trainable_token_indices tokens of embed_tokens, which is the head of "
            "this base, too: PEFT does not compute both, name one of them"
        )


def _needed(by_kind: Mapping[tuple[str, str], str], end: str, kind: str, field_name: str) -> str:
    name = by_kind.get((end, kind))
    if name is None:
        called = "token_adapter.trainable_tokens_delta" if kind == "tokens" else "weight"
        raise AdapterInvalid(f"{TENSORS_FILE} lacks {end}.{called}, and {field_name} in {CONFIG_FILE} names it")
    return name


def _base_weight(by_kind: Mapping[tuple[str, str], str], end: str, saved: set[str]) -> str:
    """The file's name of the base's weight; empty: it has none."""
    return by_kind.get((end, "base")) or ("" if end in saved else by_kind.get((end, "weight"), ""))


def _check_kind(
    end: str, kind: str, name: str, path: str, saved: set[str], loras: set[str], with_tokens: set[str]
) -> None:
    """Raises AdapterInvalid for a tensor that PEFT does not read with this config. `path`: what it calls the end.

    `saved`, `loras`, `with_tokens`: ends that have their own weight, LoRA, and trained tokens.
    """
    problem = ""
    if kind == "copy" and end not in saved:
        problem = f"modules_to_save does not name {end}"
    elif kind == "tokens" and end not in with_tokens:
        problem = f"trainable_token_indices names no tokens of {end}"
    elif kind == "base" or (kind == "weight" and end not in saved):
        wrappers = ["base_layer."] * (end in loras) + ["token_adapter.base_layer."] * (end in with_tokens)
        called = f"{path}.{'original_module.' if end in saved else ''.join(wrappers)}weight"
        problem = "" if name.endswith(f".{called}") else f"the base's weight is {called}"
    elif kind == "bias":
        problem = f"{end} has no bias"
    if problem:
        raise AdapterInvalid(f"{TENSORS_FILE} holds {quote(name, 160)}, and by {CONFIG_FILE} {problem}")


def _check_shape(name: str, got: tuple[int, ...], expected: tuple[int, ...], kind: str, ends: BaseEnds) -> None:
    if got == expected:
        return
    problem = f"{quote(name, 160)} has shape {[*got]}, expected {[*expected]}"
    if kind == "tokens":
        raise AdapterInvalid(f"{problem}: a row of {ends.hidden_size} for each token in trainable_token_indices")
    raise AdapterInvalid(problem + vocabulary_problem(got[0], ends))


def vocabulary_problem(num_rows: int, ends: BaseEnds) -> str:
    """Says what is wrong with a file whose embedding or head has `num_rows`; empty: it is not their number."""
    if num_rows == ends.vocab_size:
        return ""
    return (
        f": the vocabulary was resized, the base has {ends.vocab_size} rows and the file {num_rows}. Train without "
        "resize_token_embeddings: new tokens may take ids that the base has rows for and its tokenizer does not use"
    )


def _check_bias(bias: Tensor, name: str, base: BaseWeights | None) -> None:
    base_bias = None if base is None else base.bias(_HEAD_BIAS, len(bias))
    if base_bias is None or not np.array_equal(base_bias.astype(bias.dtype), bias):
        raise AdapterInvalid(
            f"{TENSORS_FILE} holds {quote(name, 160)}, which is not the bias of the base's head: a trained bias of "
            "lm_head is not supported, its weight is"
        )


def _changed(
    of_all: str, of_tokens: _Tokens | None, weight: str, file: TensorFile, base: BaseWeights | None
) -> ChangedRows:
    """Rows of a whole weight, where there is one, below those of trained tokens. `weight`: the base's."""
    sources, ids, places = list[Tensor](), list[Tensor](), list[Tensor]()
    if of_tokens is not None:
        name, token_ids = of_tokens
        unordered = np.array(token_ids, np.int64)
        order = np.argsort(unordered)
        sources, ids, places = [file.finite(name)], [unordered[order]], [order]
    if of_all:
        sources.append(file.finite(of_all))
        is_left = np.ones(len(sources[-1]), np.bool_)
        for ids_of_tokens in ids:
            is_left[ids_of_tokens] = False
        ids.append(np.flatnonzero(is_left))
        places.append(ids[-1])
    changed = [
        np.ones(len(row_ids), np.bool_) if base is None else base.changed_rows(weight, row_ids, source, rows)
        for source, row_ids, rows in zip(sources, ids, places, strict=True)
    ]
    token_ids_of_all, masks = np.concatenate(ids), np.concatenate(changed)
    source_ids = np.repeat(np.arange(len(sources)), [len(row_ids) for row_ids in ids])
    order = np.argsort(token_ids_of_all[masks])
    kept_ids, kept_sources, kept_places = (
        each[masks][order] for each in (token_ids_of_all, source_ids, np.concatenate(places))
    )
    return ChangedRows(kept_ids, tuple(sources), kept_sources, kept_places)


def _gather(rows: ChangedRows, folder: Path) -> Tensor:
    first, num_rows = rows.sources[0], len(rows.token_ids)
    if len(rows.sources) == 1 and np.array_equal(rows.places, np.arange(len(first))):
        return first
    dtypes = {source.dtype for source in rows.sources}
    dtype = first.dtype if len(dtypes) == 1 else np.dtype(np.float32)
    width = first.shape[1]
    step = max(_GATHERED_BYTES // (width * dtype.itemsize), 1)
    with tempfile.TemporaryFile(dir=folder) as file:
        for start in range(0, num_rows, step):
            part = slice(start, start + step)
            block = np.empty((len(rows.places[part]), width), dtype)
            for number, source in enumerate(rows.sources):
                mask = rows.source_ids[part] == number
                block[mask] = source[rows.places[part][mask]].astype(dtype, copy=False)
            file.write(tensor_bytes(block))
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(mapped, np.uint8).view(dtype).reshape(num_rows, width)
