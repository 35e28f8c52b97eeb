"""Matches regular expressions from uploads, and limits the cost of hostile ones.

A PEFT config may hold any regular expression, and Python's `re` can take years for a short one while it holds the
interpreter's lock. Plain names are matched in this process, all else in a child with limited memory and time. All
expressions of one upload share that time.
"""

from __future__ import annotations

import json
import math
import re
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import AdapterInvalid, listed, shown
from .plain_names import PlainNames

MAX_PATTERNS = 2048
MAX_PATTERN_CHARS = 4096
CPU_S = 1.0  # of children, for all expressions of an upload
TIMEOUT_S = 20.0  # wall time of one child
_AS_NAMES = (r"(.*\.)?(", r")$")  # what PEFT puts around each name of a rank or alpha pattern
# Names, dots, escaped dots and anchors: patterns of these cannot backtrack.
_PLAIN = re.compile(r"(?:[A-Za-z0-9_.^$-]|\\\.)*")
_CHILD = """
import json, re, sys
templates, patterns, keys, full, cpu_s = json.load(sys.stdin)
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
except (ImportError, ValueError, OSError):
    pass  # not every system has these limits; the parent's timeout holds everywhere
found, error = [], None
try:
    compiled = []
    for pattern in patterns:
        compiled.append(re.compile(templates[0] + pattern + templates[1]))
    for key in keys:
        tests = (i for i, p in enumerate(compiled) if (p.fullmatch(key) if full else p.match(key)))
        found.append(next(tests, None))
except (re.error, OverflowError, RecursionError) as problem:
    error = [pattern, str(problem)]
json.dump([found, error], sys.stdout)
"""


@dataclass
class PatternTime:
    """Seconds of CPU that the expressions of one upload may still use."""

    left_s: float = CPU_S


def first_matches(
    patterns: Sequence[str],
    keys: Sequence[str],
    what: str,
    time: PatternTime,
    template: tuple[str, str] = ("", ""),
    full: bool = False,
) -> list[int | None]:
    """For each key the index of the first pattern that matches it; None: no pattern does.

    Patterns match as with `re.match` or, if `full`, `re.fullmatch`. `template`: text before and after each pattern.
    Raises AdapterInvalid, which names `what`, for a pattern that is not a regular expression or takes too long.
    """
    _check_size(patterns, what)
    if not all(_PLAIN.fullmatch(pattern) for pattern in patterns):
        return _match_in_child(patterns, keys, what, time, template, full)
    compiled = [re.compile(template[0] + pattern + template[1]) for pattern in patterns]
    return [
        next((i for i, p in enumerate(compiled) if (p.fullmatch(key) if full else p.match(key))), None) for key in keys
    ]


def first_names(names: Sequence[str], keys: Sequence[str], what: str, time: PatternTime) -> list[int | None]:
    """As `first_matches`, where each pattern matches a key, or its last parts, as PEFT's rank patterns do."""
    _check_size(names, what)
    if all(map(PlainNames.is_plain, names)):
        plain = PlainNames(names)
        return [plain.first(key) for key in keys]
    return first_matches(names, keys, what, time, _AS_NAMES)


def _check_size(patterns: Sequence[str], what: str) -> None:
    if len(patterns) > MAX_PATTERNS or any(len(pattern) > MAX_PATTERN_CHARS for pattern in patterns):
        raise AdapterInvalid(
            f"{what} is too large: at most {MAX_PATTERNS} patterns of {MAX_PATTERN_CHARS} characters are accepted"
        )


def _match_in_child(
    patterns: Sequence[str],
    keys: Sequence[str],
    what: str,
    time: PatternTime,
    template: tuple[str, str],
    full: bool,
) -> list[int | None]:
    request = json.dumps([template, list(patterns), list(keys), full, max(1, math.ceil(time.left_s))])
    child = None
    if time.left_s > 0:
        before_s = _children_s()
        try:
            child = subprocess.run(  # -I -S: Python imports nothing from this environment
                [sys.executable, "-I", "-S", "-c", _CHILD],
                input=request,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            pass
        time.left_s -= _children_s() - before_s
    if child is None or child.returncode != 0:
        raise AdapterInvalid(
            f"{what} ({listed(list(patterns))}) takes too long to match: use plain names or a simpler expression"
        )
    found, error = json.loads(child.stdout)
    if error is not None:
        raise AdapterInvalid(f"{what} holds {shown(error[0])}, which is not a regular expression: {error[1]}")
    matches: list[int | None] = found
    return matches


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
