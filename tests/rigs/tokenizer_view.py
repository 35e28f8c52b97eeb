"""All that a router gets of a tokenizer, for a comparison. Imports no torch by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from motet.router.text.model_tokenizer import load_tokenizer

TEXTS = ["the quick brown fox", "  héllo 你好 🎉\n\tfox ,  wörld !", "<|start|>fox<|end|> <s>zebra</s>", "", "▁fox"]
CHATS = [
    [{"role": "user", "content": "the <fox> & 'you'"}],
    [{"role": "system", "content": "héllo"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
]


def seen(folder: Path) -> dict[str, Any]:
    """Plain data, as JSON has it."""
    tokenizer = load_tokenizer(folder)
    backend = tokenizer.backend_tokenizer
    encoded = [backend.encode(text, add_special_tokens=special).ids for text in TEXTS for special in (True, False)]
    return {
        "class": type(tokenizer).__name__,
        "backend": json.loads(backend.to_str()),
        "template": tokenizer.chat_template,
        "special tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "encoded": encoded,
        "decoded": [backend.decode(ids, skip_special_tokens=skip) for ids in encoded for skip in (True, False)],
        "prompts": [
            tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompted)
            for chat in CHATS
            for prompted in (True, False)
        ],
    }
