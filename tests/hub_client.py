"""What a user's process does with the Hub; run by `test_hub.py` with `HF_ENDPOINT` set, prints JSON.

Usage: `python hub_client.py FOLDER NAME...`, each NAME one of the functions below.
"""

import contextlib
import io
import json
import sys
import warnings
from pathlib import Path

from packagings import checksum
from transformers import AutoConfig, AutoModel

from dspark_hf import DSparkDraftModel
from dspark_hf.checkpoints import convert_checkpoint, inspect_checkpoint
from dspark_hf.cli import main

FOLDER = Path(sys.argv[1])
TOKEN = "hf_right"


def load(repo, **options):
    return checksum(DSparkDraftModel.from_pretrained(repo, **options))


def failure(repo, **options):
    """How loading fails: the message, or what was loaded if it does not."""
    try:
        return f"loaded {load(repo, **options)}"
    except ValueError as error:
        return f"ValueError: {error}"


def plain():
    return load("org/draft")


def again():
    return load("org/draft")


def other_cache():
    return load("org/draft", cache_dir=FOLDER / "cache")


def forced():
    return load("org/draft", force_download=True)


def older_revision():
    return load("org/draft", revision="v1")


def wrong_revision():
    return failure("org/draft", revision="v9")


def no_repository():
    return failure("org/nothing")


def private():
    return {
        "without": failure("org/private"),
        "wrong": failure("org/private", token="hf_wrong"),
        "with": load("org/private", token=TOKEN),
    }


def sharded():
    return load("org/sharded")


def subfolder():
    return load("org/several", subfolder="inner")


def missing_subfolder():
    return failure("org/several", subfolder="outer")


def truncated():
    return failure("org/truncated")


def pickled():
    return failure("org/pickled")


def gguf():
    return failure("org/gguf")


def embedded():
    return failure("org/embedded")


def other_model():
    return failure("org/dflash2")


def lost_shard():
    return failure("org/lost")


def auto_classes():
    config, draft = AutoConfig.from_pretrained("org/own"), AutoModel.from_pretrained("org/own", dtype="auto")
    return {"config": type(config).__name__, "model": type(draft).__name__, "sum": checksum(draft)}


def inspected():
    found = inspect_checkpoint("org/headers").to_dict()
    sharded = inspect_checkpoint("org/headers-sharded")
    return found | {"sharded_problem": sharded.problem, "sharded_parameters": sharded.parameters}


def inspect_command():
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = main(["inspect", "org/headers", "--revision", "main"])
    return {"status": status, "output": output.getvalue()}


def converted():
    return convert_checkpoint("org/draft", FOLDER / "converted", "speculators")["source"]


def pushed():
    draft = DSparkDraftModel.from_pretrained("org/draft")
    draft.generation_config.num_assistant_tokens = 3
    draft.push_to_hub("me/pushed", token=TOKEN, commit_message="first")
    first = DSparkDraftModel.from_pretrained("me/pushed")
    first.norm.weight.data += 1.0
    first.save_pretrained(FOLDER / "saved", push_to_hub=True, repo_id="me/pushed", token=TOKEN)
    second = DSparkDraftModel.from_pretrained("me/pushed")
    return {
        "first": checksum(draft),
        "second": checksum(second),
        "width": second.config.hidden_size,
        "tokens": second.generation_config.num_assistant_tokens,
    }


def push_without_token():
    draft = DSparkDraftModel.from_pretrained("org/draft")
    try:
        draft.push_to_hub("me/other")
    except OSError as error:
        return type(error).__name__
    return "pushed"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    results = {name: globals()[name]() for name in sys.argv[2:]}
    print("RESULTS" + json.dumps(results))
