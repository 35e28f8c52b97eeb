"""The tokens of a model folder as grammars see them: their bytes, and which of them end an answer."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from ..decoding.mask_source import mask_of


class VocabularyError(ValueError):
    """Grammars cannot be served with this folder's tokenizer; the message says why."""


class Vocabulary:
    """All tokens that logits have a column for; columns behind the tokenizer's last token are in no grammar."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """Takes a second for large vocabularies. Raises VocabularyError."""
        if not eos_token_ids:
            raise VocabularyError("the model has no end-of-sequence token, which an answer to a grammar ends with")
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise VocabularyError(f"{folder.name} has no tokenizer.json, which grammars need")
        try:
            tokenizer = Tokenizer.from_file(str(file))
            tokenizer.no_padding()
            tokenizer.no_truncation()
            self.tokens = LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=sorted(eos_token_ids))
        except Exception as error:  # both libraries raise plain exceptions
            raise VocabularyError(f"the tokenizer of {folder.name} cannot be used with grammars: {error}") from error
        self.folder, self.vocab_size, self.eos_token_ids = folder, vocab_size, sorted(eos_token_ids)
        self.num_words = -(-vocab_size // 32)  # of a mask
        self.eos_mask = np.frombuffer(mask_of((*eos_token_ids,), vocab_size), np.int32)
