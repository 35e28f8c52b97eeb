"""How likely the demo model finds questions that it was not trained on, and their answers, as an engine computes it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from motet.examples.demo.chat import answered, chat_prompt, question_messages
from motet.examples.demo.questions import held_out
from motet.tests.rigs.engine_rig import Stock
from motet.workers.wire.messages import SamplingParams
from motet.workers.wire.prompt_scores import PromptScores

BASE = Path(__file__).parents[2] / "examples" / "demo" / "base"


def perplexity(store: Path, num_questions: int, **settings: Any) -> float:
    """Of the tokens of so many conversations. `settings` are fields of EngineConfig."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BASE)
    scores: dict[int, bytes] = {}
    with Stock.make(BASE, {}, store).engine(4000, **settings) as rig:
        for index, (question, answer) in enumerate(held_out("base")[:num_questions]):
            messages = question_messages(question)
            given = answered(tokenizer, [*messages, {"role": "assistant", "content": answer}])
            token_ids = tokenizer(chat_prompt(tokenizer, messages) + given, add_special_tokens=False)["input_ids"]
            rig.submit(index, token_ids, None, SamplingParams(max_tokens=0, num_prompt_logprobs=0))
        while rig.engine.has_work():
            for update in rig.step():
                assert update.error is None
                if update.prompt_scores is not None:
                    scores[update.sequence_id] = scores.get(update.sequence_id, b"") + update.prompt_scores.data
    losses = [-float(loss) for each in scores.values() for loss in PromptScores(0, each).rows()["logprob"]]
    return math.exp(sum(losses) / len(losses))
