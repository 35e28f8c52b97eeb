"""Grammars made to take time, memory or the stack: each ends in a grammar or a 400, and the next one is served.

What is a grammar then, a gang compiles and follows in its own process. It takes some 5 s of CPU: what the grammars are
allowed to take.
"""

from __future__ import annotations

from pathlib import Path

from motet.router.grammars.check_process import MAX_GRAMMAR_BYTES
from motet.router.grammars.grammar_check import GrammarCheck
from motet.router.grammars.response_format import WantedGrammar
from motet.router.http.errors import ApiError
from motet.tests.rigs.grammar_matcher import NUM_TOKENS, accepts
from motet.tests.rigs.grammar_tokenizer import EOS, write_tokenizer
from motet.tests.rigs.hostile_grammars import hostile_grammars
from motet.tests.rigs.oracle import VOCAB_SIZE
from motet.workers.decoding.constraints import CompiledGrammars, Constraint, Vocabulary


async def test_a_hostile_grammar_ends_nothing_but_itself(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    vocabulary, compiled, num_followed = Vocabulary(tmp_path, VOCAB_SIZE, [EOS]), CompiledGrammars(), 0
    check = GrammarCheck({})
    refusals: list[tuple[WantedGrammar, ApiError]] = []
    for number, wanted in enumerate(hostile_grammars(0)):
        try:
            lark = await check.lark("hostile", wanted, NUM_TOKENS)
            assert len(lark.encode()) <= MAX_GRAMMAR_BYTES
            constraint = Constraint("hostile", [], ignores_eos=False)
            constraint.begin(compiled.matcher("hostile", lark, vocabulary))
            constraint.make_mask(vocabulary)
            num_followed += constraint.problem == ""
        except ApiError as error:
            refusals.append((wanted, error))
        other = await check.lark("neighbour", WantedGrammar("regex", "regex", f"a{number}"), NUM_TOKENS)
        assert accepts(other, f"a{number}")
    messages = [error.detail.message for _, error in refusals]
    assert all((error.status_code, error.detail.param) == (400, wanted.param) for wanted, error in refusals)
    assert max(map(len, messages)) < 500
    assert sum("nested too deeply" in message for message in messages) >= 3  # they ended the process that tried them
    assert sum("at most" in message for message in messages) >= 3
    assert num_followed >= 5
