"""What files of PEFT say of a base's embedding and head, against what PEFT computes once it has loaded them."""

from __future__ import annotations

import json
import random
import tracemalloc
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec import structs
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from motet.adapters import upload_process
from motet.adapters.adapter import EMBEDDING, END_MODULES, HEAD, OUTER, BaseShape, BaseTensor
from motet.adapters.errors import AdapterCorrupt, AdapterInvalid, UploadTooLarge
from motet.adapters.format import base_weights
from motet.adapters.format.base_weights import BaseWeights
from motet.adapters.format.combination import Combination, WeightedAdapter, combine
from motet.adapters.format.content import AdapterContent, TokenRows
from motet.adapters.format.peft import tensor_name
from motet.adapters.format.validation import validate
from motet.adapters.packing.layout import AdapterLayout, packed_bytes
from motet.adapters.store.store import AdapterStore
from motet.adapters.upload_process import CHECK, STORE, Check, UploadFacts, UploadRefused, Workbench
from motet.tests.rigs.lora_files import SHAPE, lora_files
from motet.tests.rigs.oracle import write_model
from motet.workers.models.config import ModelConfig
from motet.workers.models.stored_tensor import base_tensors

VOCAB, HIDDEN = 32, 16
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
EMBED_TOKENS, LM_HEAD = "base_model.model.model.embed_tokens", "base_model.model.lm_head"


def llama(is_tied: bool, **facts: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": is_tied}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **facts)).eval()


@dataclass(frozen=True)
class Base:
    """A base in a folder."""

    folder: Path

    @property
    def shape(self) -> BaseShape:
        return ModelConfig.from_folder(self.folder).shape

    @property
    def weights(self) -> BaseWeights:
        return BaseWeights(base_tensors(self.folder, self.shape))

    def model(self) -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(self.folder)
        return model.eval()


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Base:
    folder = tmp_path_factory.mktemp("base")
    llama(request.param).save_pretrained(folder)
    return Base(folder)


def train(model: PeftModel) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)


def save(
    base: Base,
    folder: Path,
    config: Mapping[str, Any],
    options: Mapping[str, Any] = {},
    change: Callable[[PeftModel], None] | None = None,
) -> None:
    """An adapter that PEFT has trained and saved. `change`: of the model before."""
    fields = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], **deepcopy(config)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT reports ends that are tied
        model = get_peft_model(base.model(), LoraConfig(**fields))
        train(model)
        if change is not None:
            change(model)
        model.save_pretrained(folder, **options)


def content_of(base: Base, folder: Path, **options: Any) -> AdapterContent:
    """`options`: other ones of `validate`."""
    return validate((folder / CONFIG).read_bytes(), folder / TENSORS, base.shape, base=base.weights, **options)


@torch.inference_mode()
def ends_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """What the model makes of each token, and of each column of hidden states: both `[vocab, hidden]`."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    vocab, hidden = embedding.weight.shape
    return {EMBEDDING: embedding(torch.arange(vocab)), HEAD: head(torch.eye(hidden)).T}


def loaded(base: Base, folder: Path) -> dict[str, Tensor]:
    """The ends of PEFT's model, once it has loaded the file on the base."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ends_of(PeftModel.from_pretrained(base.model(), folder).get_base_model())


def computed(base: Base, content: AdapterContent) -> dict[str, Tensor]:
    """The same by an adapter's content."""
    ends = {end: weight.clone() for end, weight in ends_of(base.model()).items()}
    for end, weight in ends.items():
        if (rows := content.token_rows.get(end)) is not None:
            assert (np.diff(rows.token_ids) > 0).all() and rows.token_ids.dtype == np.int64
            weight[torch.tensor(rows.token_ids)] = torch.tensor(rows.rows.astype(np.float32))
        if (lora := content.matrices.get((OUTER, end))) is not None:
            product = lora.scaling * torch.tensor(lora.b.astype(np.float32)) @ torch.tensor(lora.a.astype(np.float32))
            weight += product if end == HEAD else product.T
    return ends


def assert_computes(base: Base, content: AdapterContent, folder: Path) -> None:
    torch.testing.assert_close(computed(base, content), loaded(base, folder), atol=1e-6, rtol=1e-5)


BOTH = ["q_proj", "embed_tokens", "lm_head"]
SAVE: dict[str, Any] = {"save_embedding_layers": True}
LEAVE: dict[str, Any] = {"save_embedding_layers": False}
# What PEFT trains, how it is saved, and which entries of module_ranks of the ends an untied base and a tied one get.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "LoRA of the embedding": ({"target_modules": ["q_proj", "embed_tokens"]}, {}, "E4", "E4"),
    "LoRA of the head": ({"target_modules": ["q_proj", "lm_head"]}, LEAVE, "H4", "H4"),
    "LoRA of both": ({"target_modules": BOTH}, {}, "E4 H4", "E4 H4"),
    "LoRA of both, tied": ({"target_modules": BOTH, "ensure_weight_tying": True}, {}, "E4 H4", "E4 H4"),
    "LoRA of one, tied": ({"target_modules": ["lm_head"], "ensure_weight_tying": True}, LEAVE, "H4", "E4 H4"),
    "an expression": ({"target_modules": r".*(q_proj|embed_tokens|lm_head)"}, {}, "E4 H4", "E4 H4"),
    "an expression, tied": (
        {"target_modules": r"(.*\.)?(q_proj|embed_tokens)", "ensure_weight_tying": True},
        LEAVE,
        "E4",
        "E4 H4",
    ),
    "an expression of whole names, tied": (
        {"target_modules": r"(.*q_proj|model.embed_tokens)", "ensure_weight_tying": True},
        LEAVE,
        "E4",
        "E4",
    ),
    "all linears": ({"target_modules": "all-linear"}, {}, "", ""),
    "all linears, tied": ({"target_modules": "all-linear", "ensure_weight_tying": True}, {}, "", ""),
    "ranks and scalings": (
        {"target_modules": BOTH, "rank_pattern": {"embed_tokens": 2, "lm_head": 3}, "alpha_pattern": {"lm_head": 5}},
        {},
        "E2 H3",
        "E2 H3",
    ),
    "ranks and scalings, tied": (
        {
            "target_modules": BOTH,
            "rank_pattern": {"embed_tokens": 2},
            "alpha_pattern": {"lm_head": 5},
            "ensure_weight_tying": True,
        },
        {},
        "E2 H4",
        "E2 H2",
    ),
    "rsLoRA": ({"target_modules": BOTH, "use_rslora": True}, {}, "E4 H4", "E4 H4"),
    "one is excluded": ({"target_modules": BOTH, "exclude_modules": ["lm_head"]}, {}, "E4", "E4"),
    "the head is excluded, tied": (
        {"target_modules": BOTH, "exclude_modules": ["lm_head"], "ensure_weight_tying": True},
        {},
        "E4",
        "E4 H4",
    ),
    "layers": ({"target_modules": ["q_proj", "embed_tokens"], "layers_to_transform": [0]}, {}, "", ""),
    "layers, and whole names": (
        {"target_modules": ["q_proj", "model.embed_tokens", "lm_head"], "layers_to_transform": [0]},
        {},
        "E4 H4",
        "E4 H4",
    ),
    "the head's parameter": ({"target_parameters": ["lm_head.weight"]}, LEAVE, "H4", "H4"),
    "only the embedding": ({"target_modules": ["embed_tokens"]}, LEAVE, "E4", "E4"),
    "tokens": ({"trainable_token_indices": [7, 3, 30]}, {}, "e3", "e3 h3"),
    "tokens, tied": ({"trainable_token_indices": [7, 3], "ensure_weight_tying": True}, {}, "e2", "e2 h2"),
    "tokens of the head": ({"trainable_token_indices": {"lm_head": [7, 3]}}, {}, "h2", "h2"),
    "tokens of the embedding": ({"trainable_token_indices": {"model.embed_tokens": [7]}}, {}, "e1", "e1 h1"),
    "the same tokens of both": (
        {"trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [7, 3]}},
        {},
        "e2 h2",
        "e2 h2",
    ),
    "other tokens of both": (
        {"trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [5]}},
        {},
        "e2 h1",
        "e2 h1",
    ),
    "tokens, and LoRA of the head": (
        {"trainable_token_indices": [7, 3], "target_modules": ["q_proj", "lm_head"]},
        {},
        "e2 H4",
        "e2 h2 H4",
    ),
    "tokens, and saved": ({"trainable_token_indices": [7, 3]}, SAVE, "e2", "e2 h2"),
    "all tokens, and saved": ({"trainable_token_indices": [*range(VOCAB)]}, SAVE, "e32", "e32 h32"),
    "tokens of the head, LoRA of the embedding, and saved": (
        {"trainable_token_indices": {"lm_head": [7, 3]}, "target_modules": ["q_proj", "embed_tokens"]},
        SAVE,
        "E4 h2",
        "E4 h2",
    ),
    "tokens, LoRA of the head, and saved": (
        {"trainable_token_indices": [7, 3], "target_modules": ["q_proj", "lm_head"]},
        SAVE,
        "e2 H4",
        "e2 h2 H4",
    ),
    "the embedding": ({"modules_to_save": ["embed_tokens"]}, {}, "e32", "e32"),
    "the head": ({"modules_to_save": ["lm_head"]}, {}, "h32", "h32"),
    "both": ({"modules_to_save": ["model.embed_tokens", "lm_head"]}, {}, "e32 h32", "e32 h32"),
    "both, tied": (
        {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
        {},
        "e32 h32",
        "e32 h32",
    ),
    "the embedding, tied": ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, {}, "e32", "e32 h32"),
    "the head, tied": ({"modules_to_save": ["lm_head"], "ensure_weight_tying": True}, {}, "h32", "e32 h32"),
    "both, and saved": ({"modules_to_save": ["embed_tokens", "lm_head"]}, SAVE, "e32 h32", "e32 h32"),
    "the embedding, tied, and saved": (
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        SAVE,
        "e32",
        "e32 h32",
    ),
    "the embedding, and LoRA of the head": (
        {"modules_to_save": ["embed_tokens"], "target_modules": ["q_proj", "lm_head"]},
        {},
        "e32 H4",
        "e32 H4",
    ),
    "the embedding twice": (
        {"modules_to_save": ["embed_tokens"], "target_modules": ["q_proj", "embed_tokens"]},
        {},
        "e32",
        "e32",
    ),
    "tokens, and the head": (
        {"modules_to_save": ["lm_head"], "trainable_token_indices": {"embed_tokens": [7]}},
        {},
        "e1 h32",
        "-",
    ),
    "saved": ({}, SAVE, "", ""),
}
_ENTRIES = {"E": EMBEDDING, "H": HEAD, "e": f"{EMBEDDING}.rows", "h": f"{HEAD}.rows"}


def ranks_of_ends(content: AdapterContent) -> dict[str, int]:
    return {entry: rank for entry, rank in content.module_ranks.items() if entry.startswith(END_MODULES)}


@pytest.mark.parametrize("case", CASES)
def test_ends_are_those_that_peft_computes_once_it_has_loaded_the_file(case: str, base: Base, tmp_path: Path) -> None:
    config, options, *ranks = CASES[case]
    expected = ranks[base.shape.ends is not None and base.shape.ends.is_tied]
    save(base, tmp_path, config, options)
    if expected == "-":
        with pytest.raises(AdapterInvalid, match="PEFT does not compute both"):
            content_of(base, tmp_path)
        return
    content = content_of(base, tmp_path)
    assert_computes(base, content, tmp_path)
    assert ranks_of_ends(content) == {_ENTRIES[each[0]]: int(each[1:]) for each in expected.split()}


def edit(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Changes the tensors of an adapter's file."""
    tensors = load_file(folder / TENSORS)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / TENSORS)


def configure(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / CONFIG).read_bytes())
    (folder / CONFIG).write_text(json.dumps({**config, **fields}))


def change_base(model: PeftModel) -> None:
    for end in (model.get_base_model().get_input_embeddings(), model.get_base_model().get_output_embeddings()):
        layer = getattr(end, "base_layer", end)
        layer.weight.data[[2, 9, 31]] += 0.5


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "embed_tokens"], ["q_proj", "lm_head"], BOTH])
def test_of_a_saved_base_the_changed_rows_count(targets: list[str], base: Base, tmp_path: Path) -> None:
    save(base, tmp_path, {"target_modules": targets}, SAVE, change_base)
    content = content_of(base, tmp_path)
    assert_computes(base, content, tmp_path)
    is_tied = base.shape.ends is not None and base.shape.ends.is_tied
    ends = {name for name in END_MODULES if targets == ["q_proj"] or name in targets or is_tied}
    assert content.token_rows.keys() == ends
    assert all(rows.token_ids.tolist() == [2, 9, 31] for rows in content.token_rows.values())
    if is_tied:
        assert content.token_rows[EMBEDDING] is content.token_rows[HEAD]
        assert content.num_bytes < content_without_sharing(content).num_bytes


def content_without_sharing(content: AdapterContent) -> AdapterContent:
    rows = {end: TokenRows(rows.token_ids, rows.rows) for end, rows in content.token_rows.items()}
    return replace(content, token_rows=rows)


@pytest.mark.parametrize("base_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_rows_are_the_base_s_in_whichever_dtype_training_held_them(
    dtype: torch.dtype, base_dtype: torch.dtype, tmp_path: Path
) -> None:
    model = llama(False).to(base_dtype)
    model.get_input_embeddings().weight.data[0] *= 1e-4  # what float16 does not hold exactly
    model.save_pretrained(tmp_path / "base")
    base = Base(tmp_path / "base")
    save(base, tmp_path, {}, SAVE)
    stored = load_file(base.folder / "model.safetensors")["model.embed_tokens.weight"]
    edit(tmp_path, lambda tensors: tensors.update({f"{EMBED_TOKENS}.weight": stored.to(dtype)}))
    assert not content_of(base, tmp_path).token_rows
    stored[5, 3] += 0.25
    edit(tmp_path, lambda tensors: tensors.update({f"{EMBED_TOKENS}.weight": stored.to(dtype)}))
    (rows,) = content_of(base, tmp_path).token_rows.values()
    assert rows.token_ids.tolist() == [5]
    assert np.array_equal(rows.rows.astype(np.float32), stored[[5]].to(dtype).float().numpy())


@pytest.mark.parametrize("apart", [1, 2, 8, 9, 300])
@pytest.mark.parametrize("block_bytes", [1, 4000, 1 << 20])
def test_the_base_s_rows_are_read_in_few_pieces(
    apart: int, block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many tokens near one another, and groups of them; what the reads take is what was said before."""
    stored = torch.randn(2000, HIDDEN)
    (tmp_path / "weight").write_bytes(b"x" * 12 + stored.numpy().tobytes())
    row_ids = np.concatenate([np.arange(first, first + 500, apart) for first in (3, 900)])
    places = np.random.default_rng(0).permutation(len(row_ids))
    rows = np.empty((len(row_ids), HIDDEN), np.float32)
    rows[places] = stored.numpy()[row_ids]
    expected = np.arange(len(row_ids)) % 3 == 1
    rows[places[expected], 5] += 1
    reads, said = list[int](), list[int]()

    def read(*arguments: Any, **options: Any) -> Any:
        reads.append(arguments[2])
        return fromfile(*arguments, **options)

    fromfile = np.fromfile
    monkeypatch.setattr(np, "fromfile", read)
    monkeypatch.setattr(base_weights, "_BLOCK_BYTES", block_bytes)
    weights = BaseWeights({"w": BaseTensor(str(tmp_path / "weight"), "F32", (2000, HIDDEN), 12)}, said.append)
    assert np.array_equal(weights.changed_rows("w", row_ids, rows, places), expected)
    assert said[0] >= 4 * sum(reads) and said[0] <= 8 * rows.nbytes
    if block_bytes == 1 << 20:
        assert len(reads) == (2 if apart <= 8 else len(row_ids)) and said == [4 * sum(reads)]


def test_all_rows_count_where_the_base_cannot_be_compared(base: Base, tmp_path: Path) -> None:
    save(base, tmp_path, {}, SAVE)
    assert not content_of(base, tmp_path).token_rows
    whole = {f"{EMBEDDING}.rows": VOCAB, f"{HEAD}.rows": VOCAB}
    tensors = base_tensors(base.folder, base.shape)
    quantised = {name: replace(tensor, dtype="I8") for name, tensor in tensors.items()}
    shorter = {name: replace(tensor, shape=(VOCAB - 1, HIDDEN)) for name, tensor in tensors.items()}
    for weights in (None, BaseWeights({}), BaseWeights(quantised), BaseWeights(shorter)):
        content = validate((tmp_path / CONFIG).read_bytes(), tmp_path / TENSORS, base.shape, base=weights)
        assert ranks_of_ends(content) == whole
        assert_computes(base, content, tmp_path)


def test_of_two_tensors_for_one_weight_peft_loads_the_head_s_last(base: Base, tmp_path: Path) -> None:
    other = torch.randn(VOCAB, HIDDEN)
    for number, fields in enumerate(({}, {"modules_to_save": [*END_MODULES], "ensure_weight_tying": True})):
        folder = tmp_path / str(number)
        save(base, folder, fields, SAVE if not fields else {})
        edit(folder, lambda tensors: tensors.update({f"{LM_HEAD}.weight": other}))
        assert_computes(base, content_of(base, folder), folder)
    folder = tmp_path / "lora"
    save(base, folder, {"target_modules": BOTH, "ensure_weight_tying": True}, LEAVE)
    edit(folder, lambda tensors: tensors.update({f"{LM_HEAD}.lora_B.weight": torch.randn(VOCAB, 4)}))
    assert_computes(base, content_of(base, folder), folder)


@pytest.mark.parametrize("is_cast", [False, True])
def test_lora_that_came_apart_in_training_has_a_warning(is_cast: bool, tmp_path: Path) -> None:
    """As PEFT trains it: once the model is cast both ends have parameters of their own."""
    llama(True).save_pretrained(tmp_path / "base")
    base, ids = Base(tmp_path / "base"), torch.arange(20)[None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lora = LoraConfig(r=4, target_modules=["embed_tokens"], ensure_weight_tying=True)
        model = get_peft_model(base.model(), lora)
        model = model.double().float() if is_cast else model
        optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.5)
        for _ in range(3):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.save_pretrained(tmp_path, **LEAVE)
    content = content_of(base, tmp_path)
    assert_computes(base, content, tmp_path)
    assert [each.partition(",")[0] for each in content.warnings] == ["ensure_weight_tying is set"] * is_cast


def test_other_names_of_a_saved_weight(base: Base, tmp_path: Path) -> None:
    """As PEFT leaves them in a file beside its own, or other programs in its place."""
    save(base, tmp_path, {"modules_to_save": ["embed_tokens"]})
    expected = content_of(base, tmp_path).digest
    for name in ("modules_to_save.weight", "modules_to_save.default.weight", "weight"):
        tensors = load_file(tmp_path / TENSORS)
        (old,) = [each for each in tensors if each.startswith(EMBED_TOKENS)]
        tensors[f"{EMBED_TOKENS}.{name}"] = tensors.pop(old)
        save_file(tensors, tmp_path / TENSORS)
        assert content_of(base, tmp_path).digest == expected
    edit(tmp_path, lambda tensors: tensors.update({f"{EMBED_TOKENS}.weight": torch.ones(VOCAB, HIDDEN)}))
    assert content_of(base, tmp_path).digest != expected


TOKENS = f"{EMBED_TOKENS}.token_adapter.trainable_tokens_delta"
# How a file is trained, what is changed in its tensors (None: left out) and in its config, and what the refusal says.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Tensor | None], dict[str, Any], list[str]]] = {
    "another whole module": (
        {"modules_to_save": ["norm"]},
        {},
        {},
        ["modules_to_save names 'norm'", "embed_tokens and lm_head"],
    ),
    "part of a name": ({"modules_to_save": ["tokens"]}, {}, {}, ["modules_to_save names 'tokens'"]),
    "a text": ({}, {}, {"modules_to_save": "lm_head"}, ["modules_to_save = 'lm_head'", "a list of names"]),
    "saved, and missing": ({}, {}, {"modules_to_save": ["lm_head"]}, ["lacks lm_head.weight", "modules_to_save"]),
    "a copy, and not named": (
        {"modules_to_save": ["lm_head"]},
        {f"{EMBED_TOKENS}.modules_to_save.weight": torch.ones(VOCAB, HIDDEN)},
        {},
        ["modules_to_save does not name embed_tokens"],
    ),
    "two copies": (
        {"modules_to_save": ["lm_head"]},
        {f"{LM_HEAD}.modules_to_save.{each}weight": torch.ones(VOCAB, HIDDEN) for each in ("", "default.")},
        {},
        ["holds a tensor twice"],
    ),
    "no number": (
        {"modules_to_save": ["lm_head"]},
        {f"{LM_HEAD}.weight": torch.full((VOCAB, HIDDEN), float("nan"))},
        {},
        ["NaN"],
    ),
    "a resized embedding": (
        {"modules_to_save": ["embed_tokens"]},
        {f"{EMBED_TOKENS}.weight": torch.ones(VOCAB + 3, HIDDEN)},
        {},
        ["[35, 16], expected [32, 16]", "the base has 32 rows and the file 35", "resize_token_embeddings"],
    ),
    "another width": (
        {"modules_to_save": ["embed_tokens"]},
        {f"{EMBED_TOKENS}.weight": torch.ones(VOCAB, HIDDEN + 1)},
        {},
        ["[32, 17], expected [32, 16]"],
    ),
    "LoRA of a resized embedding": (
        {"target_modules": ["embed_tokens"]},
        {f"{EMBED_TOKENS}.lora_embedding_A": torch.ones(4, VOCAB - 1), f"{EMBED_TOKENS}.base_layer.weight": None},
        {},
        ["the base has 32 rows and the file 31"],
    ),
    "LoRA of a resized head": (
        {"target_modules": ["lm_head"]},
        {f"{LM_HEAD}.lora_B.weight": torch.ones(VOCAB + 1, 4), f"{LM_HEAD}.base_layer.weight": None},
        {},
        ["the base has 32 rows and the file 33"],
    ),
    "another rank": ({"target_modules": ["embed_tokens"]}, {}, {"r": 5}, ["[4, 32], expected [5, 32]"]),
    "LoRA, and missing": (
        {"target_modules": ["embed_tokens"]},
        {f"{EMBED_TOKENS}.lora_embedding_B": None},
        {},
        ["lacks", f"{EMBED_TOKENS}.lora_embedding_B"],
    ),
    "LoRA, and not named": (
        {"target_modules": ["embed_tokens"]},
        {f"{EMBED_TOKENS}.base_layer.weight": None},
        {"target_modules": ["q_proj"]},
        ["does not target", "lora_embedding_A"],
    ),
    "LoRA twice": (
        {"target_modules": ["embed_tokens"]},
        {f"{EMBED_TOKENS}.lora_embedding_A.default": torch.ones(4, VOCAB)},
        {},
        ["holds a matrix twice"],
    ),
    "names of two kinds": (
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"base_model.model.embed_tokens.lora_embedding_A": torch.ones(4, VOCAB)},
        {},
        ["names modules in two ways"],
    ),
    "a weight beside LoRA": (
        {"target_modules": ["lm_head"]},
        {f"{LM_HEAD}.weight": torch.ones(VOCAB, HIDDEN)},
        {},
        ["lm_head.base_layer.weight"],
    ),
    "a weight within nothing": (
        {},
        {f"{LM_HEAD}.base_layer.weight": torch.ones(VOCAB, HIDDEN)},
        {},
        ["lm_head.weight"],
    ),
    "tokens, and missing": ({}, {}, {"trainable_token_indices": [3]}, ["lacks embed_tokens.token_adapter"]),
    "tokens, and not named": (
        {"trainable_token_indices": [3]},
        {},
        {"trainable_token_indices": None},
        ["trainable_token_indices names no tokens of embed_tokens"],
    ),
    "other tokens": (
        {"trainable_token_indices": [3]},
        {},
        {"trainable_token_indices": [3, 4]},
        ["[1, 16], expected [2, 16]", "for each token"],
    ),
    "a token below all": ({"trainable_token_indices": [3]}, {}, {"trainable_token_indices": [-1]}, ["-1", "0 to 31"]),
    "a token beyond all": ({"trainable_token_indices": [3]}, {}, {"trainable_token_indices": [32]}, ["32", "0 to 31"]),
    "a token twice": (
        {"trainable_token_indices": [3, 4]},
        {},
        {"trainable_token_indices": [3, 3]},
        ["token 3", "twice"],
    ),
    "tokens of another module": ({}, {}, {"trainable_token_indices": {"q_proj": [3]}}, ["'q_proj'"]),
    "tokens of one module twice": (
        {"trainable_token_indices": [3]},
        {},
        {"trainable_token_indices": {"embed_tokens": [3], "model.embed_tokens": [3]}},
        ["each once"],
    ),
    "no list of tokens": ({}, {}, {"trainable_token_indices": "3"}, ["trainable_token_indices = '3'", "token ids"]),
    "truth": ({}, {}, {"trainable_token_indices": [True]}, ["token ids is needed"]),
    "no tokens": ({}, {}, {"trainable_token_indices": {"lm_head": []}}, ["token ids is needed"]),
    "tokens, and LoRA": (
        {"trainable_token_indices": [3]},
        {},
        {"target_modules": ["q_proj", "embed_tokens"]},
        ["target_modules and trainable_token_indices both name embed_tokens"],
    ),
    "tokens, and saved": (
        {"trainable_token_indices": [3]},
        {},
        {"modules_to_save": ["embed_tokens"]},
        ["modules_to_save and trainable_token_indices both name embed_tokens"],
    ),
    "a parameter of the embedding": (
        {},
        {},
        {"target_parameters": ["embed_tokens.weight"]},
        ["name embed_tokens in target_modules"],
    ),
    "DoRA of the embedding": (
        {"target_modules": ["embed_tokens"], "use_dora": True},
        {},
        {},
        ["DoRA (use_dora) of embed_tokens"],
    ),
    "DoRA of the head": ({"target_modules": ["lm_head"], "use_dora": True}, {}, {}, ["DoRA (use_dora) of lm_head"]),
    "a bias of LoRA": ({"target_modules": ["lm_head"], "lora_bias": True}, {}, {}, ["lora_bias of lm_head"]),
    "activated": (
        {"target_modules": ["lm_head"]},
        {},
        {"alora_invocation_tokens": [3]},
        ["alora_invocation_tokens", "lm_head"],
    ),
    "activated, and saved": (
        {"modules_to_save": ["lm_head"]},
        {},
        {"alora_invocation_tokens": [3]},
        ["alora_invocation_tokens", "lm_head"],
    ),
    "a bias of the head": ({}, {f"{LM_HEAD}.bias": torch.ones(VOCAB)}, {}, ["not the bias of the base's head"]),
    "a bias of the embedding": ({}, {f"{EMBED_TOKENS}.bias": torch.ones(VOCAB)}, {}, ["embed_tokens has no bias"]),
    "a long name": ({}, {f"{LM_HEAD}.{'modules_to_save.' * 60}bias": torch.ones(1)}, {}, ["lm_head"]),
    "another embedding": (
        {},
        {"base_model.model.model.wpe.lora_embedding_A": torch.ones(4, 9)},
        {},
        ["not that of the tokens"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_by_name(case: str, base: Base, tmp_path: Path) -> None:
    config, changes, fields, named = REFUSED[case]
    save(base, tmp_path, config)
    tensors = {**load_file(tmp_path / TENSORS), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path / TENSORS)
    configure(tmp_path, **fields)
    with pytest.raises(AdapterInvalid) as refusal:
        content_of(base, tmp_path)
    assert all(part in str(refusal.value) for part in named), str(refusal.value)


def test_what_peft_cannot_load_of_a_tied_base_is_refused(tmp_path: Path) -> None:
    llama(True).save_pretrained(tmp_path / "base")
    base = Base(tmp_path / "base")
    save(base, tmp_path, {"target_modules": BOTH, "ensure_weight_tying": True})
    configure(tmp_path, exclude_modules=["embed_tokens"])
    with pytest.raises(AdapterInvalid, match=r"exclude_modules names embed_tokens, .* PEFT cannot load"):
        content_of(base, tmp_path)
    save(base, tmp_path, {"trainable_token_indices": {"embed_tokens": [1], "lm_head": [2]}})
    configure(tmp_path, ensure_weight_tying=True)
    with pytest.raises(AdapterInvalid, match="ensure_weight_tying is set, which PEFT cannot load"):
        content_of(base, tmp_path)


@pytest.mark.parametrize("kind", ["IA3", "VERA", "LOHA", "LOKR"])
def test_other_kinds_of_ends_are_refused(kind: str, base: Base, tmp_path: Path) -> None:
    save(base, tmp_path, {"target_modules": ["lm_head"]}, LEAVE)
    configure(tmp_path, peft_type=kind, target_modules=["q_proj", "lm_head"], feedforward_modules=[])
    with pytest.raises(AdapterInvalid, match=f"peft_type {kind} of lm_head is not supported: LORA is"):
        content_of(base, tmp_path)
    for field, value in (("modules_to_save", ["lm_head"]), ("trainable_token_indices", [1])):
        configure(tmp_path, **{"modules_to_save": None, field: value})
        with pytest.raises(AdapterInvalid, match=f"{field} = .* is not supported"):
            content_of(base, tmp_path)


@pytest.mark.parametrize("fields", [{"modules_to_save": ["lm_head"]}, {"target_modules": ["lm_head"]}, {"bias": "all"}])
def test_a_bias_of_the_head_may_be_the_base_s_own(fields: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False, "use_bias": True}
    experts = {"moe_num_experts": 2, "moe_k": 1, "moe_intermediate_size": 8, "moe_layer_start_index": 0}
    model = Ernie4_5_MoeForCausalLM(Ernie4_5_MoeConfig(**sizes, **heads, **experts))
    torch.nn.init.normal_(model.lm_head.bias)
    model.save_pretrained(tmp_path / "base")
    base = Base(tmp_path / "base")
    peft = get_peft_model(model, LoraConfig(r=4, **{"target_modules": ["q_proj"], **fields}))
    peft.save_pretrained(tmp_path, **SAVE)
    assert any(name.startswith(LM_HEAD) and name.endswith("bias") for name in load_file(tmp_path / TENSORS))
    assert not content_of(base, tmp_path).token_rows
    configure(tmp_path, trainable_token_indices={"lm_head": [1]}, modules_to_save=None, target_modules=["q_proj"])
    edit(
        tmp_path, lambda tensors: tensors.update({f"{LM_HEAD}.{TOKENS.partition('tokens.')[2]}": torch.ones(1, HIDDEN)})
    )
    with pytest.raises(AdapterInvalid, match="the head of this base has a bias, which PEFT leaves out there"):
        content_of(base, tmp_path)
    train(peft)
    for name, parameter in peft.named_parameters():
        if "lm_head" in name and name.endswith("bias"):
            parameter.data += 1
    peft.save_pretrained(tmp_path, **SAVE)
    with pytest.raises(AdapterInvalid, match="a trained bias of lm_head is not supported"):
        content_of(base, tmp_path)


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("", ""),
        ("model.language_model.", "lm_head"),
        ("language_model.model.", "language_model.lm_head"),
        ("language_model.", ""),
    ],
)
def test_names_of_a_base_that_was_loaded_otherwise(prefix: str, head: str, tmp_path: Path) -> None:
    llama(False).save_pretrained(tmp_path / "base")
    base = Base(tmp_path / "base")
    targets = ["q_proj", "embed_tokens", *(["lm_head"] if head else [])]
    save(base, tmp_path, {"target_modules": targets, "rank_pattern": {"embed_tokens": 2}}, LEAVE)
    expected = content_of(base, tmp_path).digest
    tensors = {
        name.replace("model.model.model.", f"model.model.{prefix}").replace("model.lm_head", f"model.{head}"): tensor
        for name, tensor in load_file(tmp_path / TENSORS).items()
    }
    save_file(tensors, tmp_path / TENSORS)
    assert content_of(base, tmp_path).digest == expected
    key = f"{prefix}embed_tokens"
    configure(tmp_path, target_modules=f"{key.replace('.', '[.]')}|.*q_proj|{head}", rank_pattern={f"^{key}": 2})
    assert content_of(base, tmp_path).digest == expected


@pytest.mark.parametrize("model_class", [AutoModel, AutoModelForSequenceClassification])
@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": BOTH},
        {"target_modules": BOTH, "ensure_weight_tying": True},
        {"trainable_token_indices": [3, 1]},
        {"trainable_token_indices": [3, 1], "ensure_weight_tying": True},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        {},
    ],
)
def test_a_model_without_the_head(
    config: dict[str, Any], model_class: type[AutoModel], base: Base, tmp_path: Path
) -> None:
    """Whatever the head of the base is, nothing is of it."""
    task = "SEQ_CLS" if model_class is AutoModelForSequenceClassification else "FEATURE_EXTRACTION"
    fields = {"r": 4, "target_modules": ["q_proj"], **deepcopy(config), "task_type": task}  # PEFT changes its lists
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"pad_token_id": 0}
        model = get_peft_model(model_class.from_pretrained(base.folder, **options), LoraConfig(**fields))
        train(model)
        embedding = model.get_base_model().get_input_embeddings()
        if not config:
            embedding.weight.data[[2, 9]] += 1
        model.save_pretrained(tmp_path, **SAVE)
    edit(tmp_path, lambda tensors: tensors.update({f"{LM_HEAD}.weight": torch.ones(VOCAB, HIDDEN)}))
    with pytest.raises(AdapterInvalid, match="the model that was trained has no lm_head"):
        content_of(base, tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop(f"{LM_HEAD}.weight"))
    content = content_of(base, tmp_path)
    assert content.token_rows.keys() | {end for _, end in content.matrices if end in END_MODULES} == {EMBEDDING}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = PeftModel.from_pretrained(model_class.from_pretrained(base.folder, **options), tmp_path)
    with torch.inference_mode():
        expected = peft.get_base_model().get_input_embeddings()(torch.arange(VOCAB))
    torch.testing.assert_close(computed(base, content)[EMBEDDING], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["embeddings", "lm_head"]},
        {"target_modules": "model[.]embeddings", "rank_pattern": {"embeddings": 2}},
        {"trainable_token_indices": [3, 1]},
        {"trainable_token_indices": {"embeddings": [3, 1], "lm_head": [2]}},
        {"modules_to_save": ["embeddings"]},
        {"modules_to_save": ["embeddings", "lm_head"], "ensure_weight_tying": True},
        {},
    ],
)
def test_an_embedding_of_another_name(config: dict[str, Any], tmp_path: Path) -> None:
    base = Base(write_model("nemotron_h", tmp_path / "base"))
    save(base, tmp_path, config, SAVE, change_base)
    content = content_of(base, tmp_path)
    assert content.token_rows or ranks_of_ends(content)
    assert_computes(base, content, tmp_path)


def test_ranks_are_checked_before_tensors_are_read_and_rows_once_they_are_counted(base: Base, tmp_path: Path) -> None:
    seen: list[dict[str, int]] = []

    def check(module_ranks: Mapping[str, int]) -> None:
        seen.append({entry: rank for entry, rank in module_ranks.items() if entry.startswith(END_MODULES)})
        if any(entry.endswith(".rows") for entry in module_ranks):
            raise UploadTooLarge("too many rows")

    save(base, tmp_path, {"target_modules": BOTH})
    content_of(base, tmp_path, check_ranks=check)
    assert seen == [{EMBEDDING: 4, HEAD: 4}], "a saved base takes nothing"
    seen.clear()
    save(base, tmp_path, {"modules_to_save": ["lm_head"]})
    with pytest.raises(UploadTooLarge):
        content_of(base, tmp_path, check_ranks=check)
    assert seen == [{}, {f"{HEAD}.rows": VOCAB}]
    edit(tmp_path, lambda tensors: tensors.update({f"{LM_HEAD}.weight": torch.full((VOCAB, HIDDEN), np.inf)}))
    configure(tmp_path, r=2, rank_pattern={"q_proj": 4})

    def refuse(module_ranks: Mapping[str, int]) -> None:
        raise UploadTooLarge("too much")

    with pytest.raises(UploadTooLarge, match="too much"):
        content_of(base, tmp_path, check_ranks=refuse)


@pytest.mark.parametrize("share", [1, 2, 50])
def test_a_large_saved_embedding_is_read_by_pieces(share: int, tmp_path: Path) -> None:
    """`share`: of the rows one of so many is the adapter's."""
    vocab, hidden = 1 << 16, 128
    config = llama(False).config
    config.vocab_size, config.hidden_size, config.head_dim = vocab, hidden, 8
    config.architectures = ["LlamaForCausalLM"]
    folder = tmp_path / "base"
    folder.mkdir()
    config.save_pretrained(folder)
    weight = torch.randn(vocab, hidden)
    save_file({"model.embed_tokens.weight": weight, "lm_head.weight": weight.clone()}, folder / "model.safetensors")
    base = Base(folder)
    weight[::share] += 1
    names = [tensor_name(layer, "q_proj", letter) for layer in range(2) for letter in "AB"]
    loras = {name: torch.ones((4, hidden) if "lora_A" in name else (16, 4)) for name in names}
    save_file({**loras, f"{EMBED_TOKENS}.weight": weight}, tmp_path / TENSORS)
    fields = {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}
    (tmp_path / CONFIG).write_text(json.dumps({"peft_type": "LORA", **fields}))
    shape, weights, scratch = base.shape, base.weights, tmp_path / "scratch"
    scratch.mkdir()
    tracemalloc.start()
    content = validate((tmp_path / CONFIG).read_bytes(), tmp_path / TENSORS, shape, base=weights, scratch=scratch)
    digest, (_, peak_bytes) = content.digest, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 24 << 20 < weight.nbytes, "32 MiB of rows"
    rows = content.token_rows[EMBEDDING]
    assert np.array_equal(rows.token_ids, np.arange(0, vocab, share))
    assert np.array_equal(rows.rows, weight[::share].numpy())
    assert not [*scratch.iterdir()]
    copied = replace(content, token_rows={EMBEDDING: TokenRows(rows.token_ids, np.array(rows.rows))})
    assert copied.digest == digest


@pytest.fixture
def ends(base: Base, tmp_path: Path) -> AdapterContent:
    """LoRA of both ends, and rows in whole and in part."""
    save(base, tmp_path, {"target_modules": BOTH}, SAVE, change_base)
    return content_of(base, tmp_path)


def test_the_store_gives_back_what_was_put(ends: AdapterContent, base: Base, tmp_path: Path) -> None:
    layout = AdapterLayout(base.shape, slab=64, dtype="float32")
    store = AdapterStore(tmp_path / "store")
    store.put(ends, [layout])
    for mapped in (False, True):
        again = store.load_content(ends.digest, mapped)
        assert (again.digest, again.module_ranks, again.num_bytes) == (ends.digest, ends.module_ranks, ends.num_bytes)
        assert_computes(base, again, tmp_path)
    folder = tmp_path / "store" / ends.digest[:2] / ends.digest
    expected = store.load_packed(ends.digest, layout)
    (packed,) = folder.glob("*.packed")
    packed.write_bytes(packed.read_bytes()[:-1])
    assert np.array_equal(store.load_packed(ends.digest, layout), expected)
    manifest = (folder / "manifest.json").read_text()
    assert '"2,9,31"' in manifest
    for wrong in ('"2,9"', '"2,9,30"', '"a"', '"2,9,31,31"'):
        (folder / "manifest.json").write_text(manifest.replace('"2,9,31"', wrong))
        with pytest.raises(AdapterCorrupt, match="damaged in the store"):
            store.load_content(ends.digest)
    (folder / "manifest.json").write_text(manifest)
    store.load_content(ends.digest)
    spoil(folder / TENSORS, "rows.0")
    with pytest.raises(AdapterCorrupt, match="its digest is"):
        store.load_content(ends.digest)


def test_the_process_of_uploads_checks_rows_by_the_base_and_bounds_their_pages(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_process, "bound_cpu", lambda seconds: None)  # of the process of tests
    layout = AdapterLayout(base.shape, slab=64, dtype="float32")
    save(base, tmp_path, {"modules_to_save": ["embed_tokens"]}, SAVE)
    expected = content_of(base, tmp_path)
    check = Check(
        tensors=str(tmp_path / TENSORS),
        store=str(tmp_path / "store"),
        layouts=(layout,),
        max_packed_bytes=packed_bytes([layout], expected.module_ranks),
        cpu_s=60.0,
        base=base_tensors(base.folder, base.shape),
    )
    store, bench = AdapterStore(tmp_path / "store"), Workbench()
    config = (tmp_path / CONFIG).read_bytes()
    for each, kind in ((check, UploadFacts), (structs.replace(check, max_packed_bytes=1000), UploadRefused)):
        answer = bench.answer([CHECK, msgspec.msgpack.encode(each), config])
        assert type(answer) is kind
        if isinstance(answer, UploadFacts):
            assert (answer.digest, answer.module_ranks) == (expected.digest, {"q_proj": 4, f"{EMBEDDING}.rows": VOCAB})
            assert isinstance(bench.answer([STORE]), UploadFacts)
    assert_computes(base, store.load_content(expected.digest), tmp_path)


def spoil(path: Path, name: str) -> None:
    tensors = load_file(path)
    tensors[name][0, 0] += 1
    save_file(tensors, path)


def test_a_digest_is_of_rows_tokens_and_ends(ends: AdapterContent) -> None:
    rows = ends.token_rows[HEAD]
    other_rows = np.array(rows.rows)
    other_rows[0, 0] += 1
    others = [
        {EMBEDDING: rows},
        {HEAD: rows},
        {EMBEDDING: rows, HEAD: TokenRows(rows.token_ids + 1, rows.rows)},
        {EMBEDDING: rows, HEAD: TokenRows(rows.token_ids, other_rows)},
        {EMBEDDING: rows, HEAD: TokenRows(rows.token_ids, rows.rows.astype(np.float16))},
        {},
    ]
    digests = {replace(ends, token_rows=each).digest for each in others}
    same = [
        content_without_sharing(ends),
        replace(ends, token_rows=dict(sorted(ends.token_rows.items(), reverse=True))),
    ]
    assert len(digests | {ends.digest}) == 7 and {each.digest for each in same} == {ends.digest}


def test_digests_of_adapters_without_ends_are_what_they_were(tmp_path: Path) -> None:
    files = lora_files()
    assert validate(files.config_bytes, files.write(tmp_path), SHAPE).digest.startswith("9400186fd779")


@pytest.mark.parametrize("kind", ["cat", "svd", "linear", "magnitude_prune", "ties"])
def test_lora_of_ends_is_combined_as_peft_combines_it(kind: Any, base: Base, tmp_path: Path) -> None:
    weights = [0.7, -0.4]
    options: dict[str, Any] = {"density": 0.5} if kind in ("magnitude_prune", "ties") else {}
    for number in range(2):
        save(base, tmp_path / str(number), {"target_modules": BOTH, "lora_alpha": 4 + number}, LEAVE)
    edit(tmp_path / "1", lambda tensors: tensors.update({name: tensor.roll(1) for name, tensor in tensors.items()}))
    contents = [content_of(base, tmp_path / str(number)) for number in range(2)]
    parts = tuple(WeightedAdapter("0" * 64, weight) for weight in weights)
    with (tmp_path / "combined").open("w+b") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        content = combine(contents, Combination(parts=parts, combination_type=kind, **options), file)
        model = PeftModel.from_pretrained(base.model(), tmp_path / "0", "0")
        model.load_adapter(tmp_path / "1", "1")
        model.add_weighted_adapter(["0", "1"], weights, "both", combination_type=kind, **options)
        model.set_adapter("both")
    torch.testing.assert_close(computed(base, content), ends_of(model.get_base_model()), atol=1e-5, rtol=1e-4)


def test_rows_cannot_be_combined(ends: AdapterContent, tmp_path: Path) -> None:
    parts = (WeightedAdapter(ends.digest, 1.0),)
    with (tmp_path / "combined").open("w+b") as file, pytest.raises(AdapterInvalid, match="rows of embed_tokens"):
        combine([ends], Combination(parts=parts), file)


def test_a_damaged_file_is_refused_or_computes_what_peft_loads(base: Base, tmp_path: Path) -> None:
    """Whatever is left out, renamed, cut or not named: no other error, and nothing that PEFT computes otherwise."""
    generator = random.Random(0)
    cases = [each for each, (*_, tied) in CASES.items() if tied != "-"]
    outcomes = {"taken": 0, "refused": 0, "not loaded by PEFT": 0}
    for number in range(60):
        config, options, *_ = CASES[generator.choice(cases)]
        folder = tmp_path / str(number)
        save(base, folder, config, options)
        tensors = load_file(folder / TENSORS)
        name = generator.choice([each for each in tensors if "layers" not in each] or [*tensors])
        other = generator.choice([*tensors, f"{LM_HEAD}.weight", f"{EMBED_TOKENS}.weight", f"{TOKENS}"])
        damage = generator.randrange(5)
        if damage == 0:
            del tensors[name]
        elif damage == 1:
            tensors[other] = tensors.pop(name)
        elif damage == 2:
            tensors[name] = tensors[name][: generator.randrange(len(tensors[name])) + 1].clone()
        elif damage == 3:
            tensors[other] = torch.randn(VOCAB, HIDDEN)
        save_file(tensors, folder / TENSORS)
        if damage == 4:
            fields = (
                "modules_to_save",
                "trainable_token_indices",
                "ensure_weight_tying",
                "target_modules",
                "exclude_modules",
            )
            values: list[Any] = [
                None,
                ["embed_tokens"],
                ["lm_head"],
                [1, 2],
                True,
                {"lm_head": [3]},
                ["q_proj"],
                "lm_head",
            ]
            configure(folder, **{generator.choice(fields): generator.choice(values)})
        try:
            content = content_of(base, folder)
        except AdapterInvalid:
            outcomes["refused"] += 1
            continue
        try:
            expected = loaded(base, folder)
        except (KeyError, ValueError, TypeError, AttributeError, RuntimeError):
            outcomes["not loaded by PEFT"] += 1
            continue
        outcomes["taken"] += 1
        torch.testing.assert_close(computed(base, content), expected, atol=1e-6, rtol=1e-5, msg=f"case {number}")
    assert outcomes["taken"] > 5 and outcomes["refused"] > 20 and outcomes["not loaded by PEFT"] < 5, outcomes
