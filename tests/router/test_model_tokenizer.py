"""Transformers reads tokenizers without torch as it does with it, and then loads neither torch nor models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, processors

from motet.router.text.model_tokenizer import import_transformers_without_torch, load_tokenizer
from motet.tests.rigs.router_rig import byte_level_tokenizer
from motet.tests.rigs.tokenizer_view import seen
from motet.tests.router.test_text import byte_fallback_tokenizer

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo" / "base"
TEMPLATE = """
{%- for message in messages %}
{%- if message.role == 'system' %}{% continue %}{% endif %}
{{- bos_token + message.role + ': ' + message.content | trim + (message | tojson) }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}{% endif %}
{%- endfor %}
{{- strftime_now('%Y') }}{% if add_generation_prompt %}{{ 'assistant:' + eos_token }}{% endif %}"""
# By name: the class that tokenizer_config.json names, the model's type, the kind of tokenizer, further settings.
FOLDERS: dict[str, tuple[str | None, str, str, dict[str, Any]]] = {
    "plain": ("TokenizersBackend", "llama", "bytes", {}),
    "older": ("PreTrainedTokenizerFast", "llama", "bytes", {"clean_up_tokenization_spaces": True}),
    "llama": ("LlamaTokenizer", "llama", "pieces", {"add_bos_token": True, "add_eos_token": True}),
    "llama without bos": ("LlamaTokenizerFast", "llama", "pieces", {"add_bos_token": False, "legacy": False}),
    "llama of bytes": ("LlamaTokenizerFast", "llama", "bytes", {"add_bos_token": True}),
    "mistral": ("LlamaTokenizer", "mistral", "pieces", {"add_prefix_space": True}),
    "mixtral": ("LlamaTokenizer", "mixtral", "pieces", {"clean_up_tokenization_spaces": False}),
    "qwen2": ("Qwen2Tokenizer", "qwen2", "bytes", {"additional_special_tokens": ["<|start|>", "<|new|>"]}),
    "qwen2_moe": ("Qwen2Tokenizer", "qwen2_moe", "bytes", {}),
    "qwen3": ("Qwen2Tokenizer", "qwen3", "bytes", {"add_bos_token": False}),
    "gemma2": ("GemmaTokenizer", "gemma2", "pieces", {"add_bos_token": True}),
    "gemma3": ("GemmaTokenizerFast", "gemma3_text", "pieces", {}),
    "gpt2's in a llama": ("GPT2Tokenizer", "llama", "bytes", {"add_prefix_space": False}),
    "unnamed": (None, "llama", "bytes", {"split_special_tokens": True}),
}


def write_folder(folder: Path, name: str) -> Path:
    class_name, model_type, kind, settings = FOLDERS[name]
    tokenizer = byte_level_tokenizer() if kind == "bytes" else byte_fallback_tokenizer()
    first, last = ("<|start|>", "<|end|>") if kind == "bytes" else ("<s>", "</s>")
    tokenizer.add_special_tokens([first, last])
    tokenizer.post_processor = _with_first(tokenizer, first)
    path = folder / name.replace(" ", "-").replace("'", "")
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    named = {} if class_name is None else {"tokenizer_class": class_name}
    config = {**named, "bos_token": first, "eos_token": last, "chat_template": TEMPLATE, **settings}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def _with_first(tokenizer: Tokenizer, first: str) -> Any:
    token_id = tokenizer.token_to_id(first)
    return processors.TemplateProcessing(single=f"{first} $A", special_tokens=[(first, token_id)])


_IN_A_ROUTER = """
import json, re, sys
from pathlib import Path
from motet.router.text.model_tokenizer import import_transformers_without_torch, load_tokenizer
import_transformers_without_torch()
from motet.tests.rigs.tokenizer_view import seen
found = [seen(Path(path)) for path in sys.argv[1:]]
unwanted = re.compile(r"torch(\\..*)?|transformers\\.models\\..*\\.modeling_.*")
loaded = sorted(filter(unwanted.fullmatch, sys.modules))
print(json.dumps([loaded, found]))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {"demo": DEMO, **{name: write_folder(folder, name) for name in FOLDERS}}


@pytest.fixture(scope="module")
def in_a_router(folders: dict[str, Path]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Modules that a process without torch has loaded, and what it has seen of each folder."""
    command = [sys.executable, "-c", _IN_A_ROUTER, *map(str, folders.values())]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    loaded, found = json.loads(answer.stdout)
    return loaded, dict(zip(folders, found, strict=True))


def test_no_torch_is_loaded(in_a_router: tuple[list[str], object]) -> None:
    assert in_a_router[0] == []


@pytest.mark.parametrize("name", ["demo", *FOLDERS])
def test_without_torch_nothing_is_read_otherwise(
    name: str, folders: dict[str, Path], in_a_router: tuple[object, dict[str, dict[str, Any]]]
) -> None:
    assert torch.__version__  # this process has it
    expected = json.loads(json.dumps(seen(folders[name])))
    assert in_a_router[1][name] == expected
    assert any(expected["encoded"]) and all(expected["prompts"])


def test_where_torch_is_loaded_nothing_changes() -> None:
    from transformers.utils import is_torch_available

    import_transformers_without_torch()
    assert sys.modules["torch"] is torch
    assert is_torch_available()


def test_a_processors_chat_template_is_the_tokenizers_where_that_has_none(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "gemma3")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    assert load_tokenizer(folder).chat_template == TEMPLATE
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(folder).chat_template == "of the processor"
    (folder / "chat_template.json").write_text("[]")
    with pytest.raises(ValueError, match=r"chat_template\.json holds no chat template"):
        load_tokenizer(folder)
