"""What a client reads of the tokenizer in an adapter's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from motet.adapters.errors import AdapterInvalid
from motet.adapters.format.own_tokenizer import (
    OwnTokenizer,
    TokenFlag,
    read_own_tokenizer,
    template_digest,
    tokenizer_files,
)

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}\n"


def saved(folder: Path, **options: Any) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
    tokenizer.chat_template = TEMPLATE
    tokenizer.add_tokens(["<think>", "<act>"])
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    tokenizer.save_pretrained(folder, **options)


@pytest.mark.parametrize("in_a_file", [True, False])
def test_what_transformers_saves_is_read(tmp_path: Path, in_a_file: bool) -> None:
    saved(tmp_path, save_jinja_files=in_a_file)
    assert (tmp_path / "chat_template.jinja").exists() == in_a_file
    flags: dict[str, tuple[TokenFlag, ...]] = {
        "<think>": ("normalized",),
        "<act>": ("normalized",),
        "<end>": ("special",),
    }
    own = OwnTokenizer({"<think>": 2, "<act>": 3, "<end>": 4}, template_digest(TEMPLATE), flags, "<end>")
    assert read_own_tokenizer(tmp_path) == (own, TEMPLATE)
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(tokenizer_files(tmp_path))


def test_a_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert (read_own_tokenizer(tmp_path), tokenizer_files(tmp_path)) == ((OwnTokenizer(), ""), [])


HALF = "\ud800"


@pytest.mark.parametrize(
    "fields",
    [
        {"added_tokens_decoder": {"7": {"content": HALF}}},
        {"eos_token": HALF},
        {"bos_token": HALF},
        {"chat_template": HALF},
    ],
)
def test_half_characters_are_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Which JSON escapes, and no text holds."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    with pytest.raises(AdapterInvalid, match=r"cannot be read .* surrogates not allowed"):
        read_own_tokenizer(tmp_path)


def test_special_tokens_have_names_that_transformers_knows() -> None:
    """Others would be arguments of templates, such as `messages`."""
    for fields in ({"special_tokens": {"messages": "a"}}, {"special_tokens": {"eos_token": "a"}}):
        with pytest.raises(msgspec.ValidationError, match="Invalid enum value"):
            msgspec.convert(fields, OwnTokenizer)


def test_slow_tokenizers_and_several_templates(tmp_path: Path) -> None:
    (tmp_path / "added_tokens.json").write_text('{"<pad>": 7}')
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<end>", "lstrip": false}}')
    templates = [{"name": "tools", "template": "x"}, {"name": "default", "template": TEMPLATE}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert read_own_tokenizer(tmp_path) == (
        OwnTokenizer({"<pad>": 7}, template_digest(TEMPLATE), {"<pad>": ("normalized",)}, "<end>"),
        TEMPLATE,
    )


def test_line_ends_make_no_other_template() -> None:
    assert template_digest("a\nb") == template_digest("a\r\nb\n") != template_digest("a b")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("added_tokens.json", '{"<pad>": "seven"}'),
        ("added_tokens.json", "[]"),
        ("added_tokens.json", "{"),
        ("tokenizer.json", '{"added_tokens": [{"id": 1}]}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": []}'),
        ("tokenizer_config.json", '{"chat_template": 1}'),
    ],
)
def test_a_broken_tokenizer_is_named(tmp_path: Path, file: str, content: str) -> None:
    (tmp_path / file).write_text(content)
    with pytest.raises(AdapterInvalid, match=r"the tokenizer in .* cannot be read|added_tokens\.json"):
        read_own_tokenizer(tmp_path)
