"""Which version answers is decided once: with its trials, and without decoding or hashing anything twice."""

from __future__ import annotations

from hashlib import blake2b
from unittest.mock import patch

import pytest

from motet.adapters.adapter import AdapterVersion
from motet.adapters.registry.canary_counts import TrialMember
from motet.adapters.registry.tenants.records import KeyRecord, TenantRecord
from motet.adapters.registry.versions import rollout as rollouts
from motet.adapters.registry.versions.rollout import Canary, Rollout, Shadow, VersionFacts, canary_place
from motet.router.http.auth import Identity
from motet.router.http.errors import ApiError
from motet.router.openai.request_schema import CompletionRequest
from motet.router.versions.version_choice import VersionChoice, choose_version

IDENTITY = Identity(TenantRecord(name="acme"), KeyRecord(key_id="key", tenant="acme"))
CANARY, SHADOW = Canary("a-trial", 1, 0.5), Shadow("a-shadow", 2, 1.0)


def current(canary: Canary | None = CANARY, shadow: Shadow | None = SHADOW) -> AdapterVersion:
    others = tuple(VersionFacts(number, f"{number:064}", 10, 0.0, {"q_proj": 8}) for number in (1, 2))
    rollout = Rollout(others=others, aliases={"prod": 2}, canary=canary, shadow=shadow)
    return AdapterVersion("acme", "pirate", 3, "d" * 64, {"q_proj": 8}, 10, 0.0, rollout=rollout.json())


def choose(model: str = "pirate", *, user: str = "", name: AdapterVersion | None = None) -> VersionChoice:
    request = CompletionRequest(model=model, prompt="Hello", user=user or None)
    return choose_version(name or current(), request, IDENTITY)


def numbers(choice: VersionChoice) -> list[int]:
    return [0 if one is None else one.version for one in choice.candidates()]


def test_a_share_of_users_gets_the_canary_and_each_answer_counts_in_its_arm() -> None:
    choices = {f"u{number}": choose(user=f"u{number}") for number in range(200)}
    for user, choice in choices.items():
        assert choice.version is not None and choice.shadow == SHADOW
        arm = "canary" if choice.version.version == 1 else "stable"
        place = canary_place(f"user {user}", "a-trial").hex()
        assert choice.trial == TrialMember("a-trial", arm, place)  # type: ignore[arg-type]
        assert choice == choose(user=user)
    assert 60 < sum(choice.version is not None and choice.version.version == 1 for choice in choices.values()) < 140


def test_a_request_that_names_a_version_is_in_no_trial() -> None:
    for model, version in (("pirate@1", 1), ("pirate@2", 2), ("pirate@3", 3), ("pirate@prod", 2)):
        choice = choose(model)
        assert choice.version is not None and choice.version.version == version
        assert choice.trial is None and choice.shadow is None
    with pytest.raises(ApiError, match="pirate@9"):
        choose("pirate@9")


def test_a_name_without_a_canary_hashes_nothing() -> None:
    with patch("motet.router.versions.version_choice.blake2b", side_effect=AssertionError):
        choice = choose(name=current(canary=None))
        base = choose_version(None, CompletionRequest(model="base", prompt="Hello"), IDENTITY)
    assert choice.version is not None and choice.version.version == 3
    assert choice.trial is None and choice.shadow == SHADOW
    assert base == VersionChoice() and numbers(base) == [0] and base.trial is None


def test_a_resumed_stream_counts_for_the_version_that_it_began_with() -> None:
    choice = choose(user="u1")
    first, *others = choice.candidates()
    assert first is choice.version and sorted(numbers(choice)) == [1, 2, 3] and len(others) == 2
    arms = {}
    for begun in choice.candidates():
        assert begun is not None
        trial = choice.with_version(begun).trial
        arms[begun.version] = None if trial is None else trial.arm
    assert arms == {1: "canary", 2: None, 3: "stable"}


def test_a_record_is_decoded_once_and_a_prompt_hashed_once() -> None:
    name = current()
    rollouts._decode.cache_clear()
    with patch("motet.router.versions.version_choice.blake2b", wraps=blake2b) as hashes:
        choice = choose(name=name)
        assert choice.trial is not None and choice.shadow is not None
        assert choice.version is not None
    assert hashes.call_count == 1
    choose(name=name)
    assert rollouts._decode.cache_info().misses == 1
