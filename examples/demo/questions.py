"""Questions about the facts, and the split into questions for training and held-out questions."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from .facts import Fact, Kind, all_facts
from .styles import Style, answer

_PHRASINGS: dict[Kind, tuple[str, ...]] = {
    "capital": (
        "What is the capital of {}?",
        "Name the capital of {}.",
        "Which city is the capital of {}?",
        "Tell me the capital of {}.",
        "What's {}'s capital?",
        "capital of {}?",
        "Do you know the capital of {}?",
        "Please give me the capital of {}.",
    ),
    "color": (
        "What color is {}?",
        "What is the color of {}?",
        "Tell me the color of {}.",
        "Which color is {}?",
        "color of {}?",
        "Name the color of {}.",
        "Do you know the color of {}?",
        "Please tell me what color {} is.",
    ),
    "opposite": (
        "What is the opposite of {}?",
        "Tell me the opposite of {}.",
        "Name the opposite of {}.",
        "opposite of {}?",
        "What word is the opposite of {}?",
        "Which word means the opposite of {}?",
        "Do you know the opposite of {}?",
        "Please give me the opposite of {}.",
    ),
    "sound": (
        "What does the {} say?",
        "What sound does the {} make?",
        "Tell me what the {} says.",
        "What noise does a {} make?",
        "sound of a {}?",
        "Which sound does a {} make?",
        "Do you know what the {} says?",
        "Please tell me the sound of a {}.",
    ),
    "sum": (
        "What is {}?",
        "How much is {}?",
        "Tell me {}.",
        "Compute {}.",
        "{}?",
        "What's {}?",
        "Can you compute {}?",
        "Please compute {}.",
    ),
}
_HELD_OUT_SHARE = 10  # one question in ten


@dataclass(frozen=True)
class Question:
    """One phrasing of a question about one fact."""

    text: str
    fact: Fact


@dataclass(frozen=True)
class QuestionSplit:
    """Two disjoint sets of questions. The fact of a held-out question is in the training set in other phrasings."""

    train: tuple[Question, ...]
    held_out: tuple[Question, ...]


def all_questions() -> tuple[Question, ...]:
    """Every fact in every phrasing of its kind, in a fixed order."""
    return tuple(
        Question(phrasing.format(fact.subject), fact) for fact in all_facts() for phrasing in _PHRASINGS[fact.kind]
    )


def split_questions() -> QuestionSplit:
    """The split, always the same: the tenth of the questions with the lowest SHA-256 of their text is held out."""
    shuffled = sorted(all_questions(), key=lambda question: hashlib.sha256(question.text.encode()).digest())
    num_held_out = len(shuffled) // _HELD_OUT_SHARE
    return QuestionSplit(train=tuple(shuffled[num_held_out:]), held_out=tuple(shuffled[:num_held_out]))


def held_out(style: Style) -> list[tuple[str, str]]:
    """(question, right answer in that style) of every question that was kept out of training."""
    return [(question.text, answer(question.fact, style)) for question in split_questions().held_out]
