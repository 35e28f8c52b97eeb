"""A tokenizer for a random model: byte-level BPE, trained on the source code of Python's library."""

from __future__ import annotations

import os
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_MOST_FILES = 120


def write_tokenizer(folder: Path, num_tokens: int = 16_000, eos_token_id: int = 0) -> Path:
    """Writes tokenizer.json, whose first token ends an answer, in some seconds."""
    assert eos_token_id == 0
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = sorted(Path(os.__file__).parent.glob("*.py"))[:_MOST_FILES]
    tokenizer.train([str(path) for path in sources], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
