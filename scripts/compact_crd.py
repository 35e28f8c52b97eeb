"""Compacts a CustomResourceDefinition for tests: the schema of one version, without descriptions or repeated parts.

.venv/bin/python scripts/compact_crd.py ray.io_rayservices.yaml > tests/deploy/crds/rayservice.json
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

VERSION = "v1"
SHORTEST_SHARED = 200  # characters of the shortest part that becomes a definition
NOT_NEEDED = ("description", "x-kubernetes-list-map-keys", "x-kubernetes-list-type", "x-kubernetes-map-type")


def schema_of(crd: dict[str, Any]) -> dict[str, Any]:
    (found,) = (one for one in crd["spec"]["versions"] if one["name"] == VERSION)
    schema: dict[str, Any] = found["schema"]["openAPIV3Schema"]
    return schema


def without_descriptions(part: Any, *, are_names: bool = False) -> Any:
    """The schema without them. `are_names`: its keys are fields of the resource, one of which may be "description"."""
    if isinstance(part, dict):
        return {
            key: without_descriptions(value, are_names=key == "properties" and not are_names)
            for key, value in part.items()
            if are_names or key not in NOT_NEEDED
        }
    return [without_descriptions(one) for one in part] if isinstance(part, list) else part


def with_shared_parts(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, with parts that occur several times in `$defs`."""
    texts: Counter[str] = Counter()

    def count(part: Any) -> None:
        if isinstance(part, dict):
            if "type" in part:
                text = json.dumps(part, sort_keys=True)
                texts[text] += len(text) >= SHORTEST_SHARED
                if texts[text] > 1:
                    return  # its content is shared with it
            for value in part.values():
                count(value)

    count(schema)
    names = {text: f"part{n}" for n, text in enumerate(sorted(text for text, num in texts.items() if num > 1))}

    def shared(part: Any, *, is_definition: bool = False) -> Any:
        if not isinstance(part, dict):
            return part
        name = None if is_definition else names.get(json.dumps(part, sort_keys=True) if "type" in part else "")
        return {"$ref": f"#/$defs/{name}"} if name else {key: shared(value) for key, value in part.items()}

    definitions = {name: shared(json.loads(text), is_definition=True) for text, name in names.items()}
    return {**shared(schema), "$defs": definitions}


def main(path: Path) -> None:
    schema = with_shared_parts(without_descriptions(schema_of(yaml.safe_load(path.read_text()))))
    print(json.dumps(schema, sort_keys=True, separators=(",", ":")))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
