"""A Dockerfile as its instructions."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Instruction:
    stage: int  # from 0; arguments before the first stage count to it
    name: str  # in capitals
    rest: str  # with lines that go on joined

    @property
    def words(self) -> list[str]:
        """Of an instruction in JSON its elements."""
        words: list[str] = json.loads(self.rest) if self.rest.startswith("[") else shlex.split(self.rest)
        return words

    @property
    def commands(self) -> list[list[str]]:
        """What RUN runs, one after the other."""
        if self.rest.startswith("["):
            return [self.words]
        return [shlex.split(one) for one in self.rest.split("&&")]


def instructions(path: Path) -> list[Instruction]:
    lines = [line for line in path.read_text().splitlines() if line and not line.lstrip().startswith("#")]
    found: list[Instruction] = []
    stage = -1
    for text in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        name, _, rest = text.partition(" ")
        stage += name == "FROM"
        found.append(Instruction(max(stage, 0), name, rest.strip()))
    return found


def variables(found: list[Instruction]) -> dict[str, str]:
    """What the last stage says with ENV."""
    last = max(one.stage for one in found)
    said = [word for one in found if one.stage == last and one.name == "ENV" for word in one.words]
    return dict(word.split("=", 1) for word in said)
