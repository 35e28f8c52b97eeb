"""Forms of answers that a hostile tenant asks for: large, deep, recursive, and slow to compile or to follow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from motet.router.grammars.response_format import WantedGrammar


def hostile_grammars(salt: int) -> Iterator[WantedGrammar]:
    """Each is another one with another `salt`, so none is known from before."""
    for number, (form, value) in enumerate(_forms(f"s{salt}")):
        yield WantedGrammar(f"form {number}", form, value)


def _forms(salt: str) -> Iterator[tuple[Any, Any]]:
    deep: Any = {"const": salt}
    for _ in range(400):
        deep = {"type": "array", "items": deep}
    yield "json", deep
    yield "json", {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2500)}, "$ref": f"#/$defs/{salt}"}
    yield (
        "json",
        {"$ref": "#/$defs/d0", "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2500)}, salt: 1},
    )
    yield "json", {"title": salt, "$ref": "#"}
    yield "json", {"enum": [f"{salt} {i}" for i in range(100_000)]}
    yield "json", {"enum": [f"{salt} {i}" for i in range(7_000)]}
    yield "json", {"anyOf": [{"properties": {f"p{i}": {"const": salt}}, "required": [f"p{i}"]} for i in range(50_000)]}
    yield "json", {"anyOf": [{"properties": {f"p{i}": {"const": salt}}, "required": [f"p{i}"]} for i in range(1_800)]}
    yield "json", {"allOf": [{"anyOf": [{"properties": {f"{x}{i}": {}}} for x in (salt, "b")]} for i in range(24)]}
    yield "json", {"type": "string", "pattern": f"^({salt}.*a){{40}}$", "minLength": 100, "maxLength": 100_000}
    yield "json", {"type": "array", "minItems": 10**9, "items": {"const": salt}}
    yield "regex", f"({salt}{{1000}}){{1000}}"
    yield "regex", f"(({salt}{{0,100}}){{0,100}}){{0,100}}"
    yield "regex", f"({salt}|a|aa|aaa)*" * 200
    yield "grammar", f'start: A "{salt}"\nA: ' + " & ".join(f"/.*a.{{{i}}}b.*/" for i in range(1, 40))
    yield "grammar", "\n".join(["start: r0", *(f'r{i}: r{i + 1} "x"' for i in range(5000)), f'r5000: "{salt}"'])
    yield "grammar", f'start: ((("{salt}"{{1000}}){{1000}}){{1000}}){{1000}}'
    yield "grammar", 'root ::= "' + salt + '" ' + "." * 100_000
    yield "grammar", "root ::= " + '"\\' * 60_000 + salt
    yield "grammar", f'start: "{salt}" // ' + '"\\' * 30_000 + "\nb: " + '"\\' * 30_000
    yield "choice", [f"{salt} {i}" for i in range(9_000)]
