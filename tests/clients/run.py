"""Runs the checks of the client libraries against a running motet; each library is a file of this folder.

    python run.py URL KEY FOLDER_OF_THE_BASE [LIBRARY ...]

One line of JSON for each check: the library, its version, the check, and what was wrong, if anything. Run by
`scripts/clients` in an environment of its own, which has the libraries and nothing of motet.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from importlib.metadata import version

# File: the package, as it is called on PyPI.
LIBRARIES = {
    "openai_python": "openai",
    "langchain_client": "langchain-openai",
    "litellm_client": "litellm",
    "instructor_client": "instructor",
    "pydantic_ai_client": "pydantic-ai-slim",
    "openai_agents": "openai-agents",
    "llama_index_client": "llama-index-llms-openai-like",
    "anthropic_client": "anthropic",
    "lm_eval_client": "lm-eval",
    "guidellm_client": "guidellm",
}


def main() -> None:
    url, key, folder, *chosen = sys.argv[1:]
    os.environ |= {"MOTET_URL": url, "MOTET_API_KEY": key, "MOTET_DEMO_BASE": folder}
    os.environ |= {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}
    for name in chosen or LIBRARIES:
        module = importlib.import_module(name)
        for check in module.CHECKS:
            wrong = ""
            try:
                check()
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"[:500]
            package = LIBRARIES[name]
            shown = {"library": package, "version": version(package), "check": check.__name__, "wrong": wrong}
            print(json.dumps(shown), flush=True)


if __name__ == "__main__":
    main()
