"""Places and models that tests of several files need. What is not there skips the test, with the reason."""

import json
import os
from pathlib import Path

import pytest

TINY_GOLDEN = Path(__file__).parent / "golden"


def place(variable: str, what: str) -> Path:
    """The path in an environment variable; skips the test when it is unset."""
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"{variable} is unset: it names {what}")
    return Path(value)


@pytest.fixture(scope="session")
def _profile_home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("huggingface")


@pytest.fixture(autouse=True)
def profiles_of_this_run(monkeypatch, _profile_home):
    """Cost tables measured by tests stay out of the user's Hugging Face home."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(_profile_home))


@pytest.fixture(scope="session")
def golden_folder() -> Path:
    """The full golden set (a few cases of it are in `tests/golden`)."""
    return place("DSPARK_GOLDEN", "the folder of the full golden set")


@pytest.fixture(scope="session")
def scout_folder() -> Path:
    """A DSpark draft for SmolLM2-135M-Instruct."""
    return place("DSPARK_SCOUT_DRAFT", "the folder of a draft for SmolLM2-135M-Instruct")


@pytest.fixture(scope="session")
def eval_rows() -> list[dict]:
    """Prompts with SmolLM2's answers: `source`, `prompt`, `prompt_ids`, `response_ids`."""
    path = place("DSPARK_EVAL_DATA", "a JSONL file of prompts for SmolLM2-135M-Instruct")
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """Folder of SmolLM2-135M-Instruct, downloaded on first use; skips offline. Mark such tests `smollm2`."""
    from dspark_hf.demo import smollm2_folder

    try:
        return smollm2_folder()
    except (OSError, ImportError) as error:
        pytest.skip(f"SmolLM2-135M-Instruct is not at hand: {error}")


@pytest.fixture(scope="session")
def tiny_pair() -> tuple[Path, Path]:
    """Folders of the tiny target and of its draft that this repository holds."""
    return TINY_GOLDEN / "qwen3_target", TINY_GOLDEN / "qwen3_rnn" / "draft"
