"""Matches regular expressions that come from uploads, and bounds what a hostile one can cost.

A PEFT config may hold any regular expression, and Python's `re` can take years for a short one while it holds the
interpreter's lock. Plain names are matched in this process, everything else in a child with little memory and time.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence

from ..errors import AdapterInvalid, listed, shown

MAX_PATTERNS = 2048
MAX_PATTERN_CHARS = 4096
TIMEOUT_S = 20.0  # wall time; the child may use 2 s of CPU
# Names, dots, escaped dots and anchors: patterns of these cannot backtrack.
_PLAIN = re.compile(r"(?:[A-Za-z0-9_.^$-]|\\\.)*")
_CHILD = """
import json, re, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, (2, 2))
    resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
except (ImportError, ValueError, OSError):
    pass  # not every system has these limits; the parent's timeout holds everywhere
templates, patterns, keys, full = json.load(sys.stdin)
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


def first_matches(
    patterns: Sequence[str], keys: Sequence[str], what: str, template: tuple[str, str] = ("", ""), full: bool = False
) -> list[int | None]:
    """For each key the index of the first pattern that matches it; None: no pattern does.

    Patterns match as with `re.match` or, if `full`, `re.fullmatch`. `template`: text before and after each pattern.
    Raises AdapterInvalid, which names `what`, for a pattern that is no regular expression or takes too long.
    """
    if len(patterns) > MAX_PATTERNS or any(len(pattern) > MAX_PATTERN_CHARS for pattern in patterns):
        raise AdapterInvalid(
            f"{what} is too large: at most {MAX_PATTERNS} patterns of {MAX_PATTERN_CHARS} characters are accepted"
        )
    if not all(_PLAIN.fullmatch(pattern) for pattern in patterns):
        return _match_in_child(patterns, keys, what, template, full)
    compiled = [re.compile(template[0] + pattern + template[1]) for pattern in patterns]
    return [
        next((i for i, p in enumerate(compiled) if (p.fullmatch(key) if full else p.match(key))), None) for key in keys
    ]


def _match_in_child(
    patterns: Sequence[str], keys: Sequence[str], what: str, template: tuple[str, str], full: bool
) -> list[int | None]:
    request = json.dumps([template, list(patterns), list(keys), full])
    try:
        child = subprocess.run(  # -I -S: Python imports nothing from this environment
            [sys.executable, "-I", "-S", "-c", _CHILD], input=request, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        child = None
    if child is None or child.returncode != 0:
        raise AdapterInvalid(
            f"{what} ({listed(list(patterns))}) takes too long to match: use plain names or a simpler expression"
        )
    found, error = json.loads(child.stdout)
    if error is not None:
        raise AdapterInvalid(f"{what} holds {shown(error[0])}, which is no regular expression: {error[1]}")
    matches: list[int | None] = found
    return matches
