"""Writes `engine_readers.json`: what the readers of vLLM, SGLang and speculators look for, from their wheels.

    pip download --no-deps --only-binary :all: vllm sglang speculators -d wheels
    python tests/data/make_engine_readers.py wheels

The wheels are opened as archives and their sources parsed; nothing of them is installed or run. Recorded are, per file
that reads a draft: the identifiers it has as strings or reads as attributes of a configuration, the attributes its
classes assign (which name the tensors), and the fields its classes declare.
"""

import ast
import hashlib
import json
import re
import sys
import zipfile
from pathlib import Path

OUTPUT = Path(__file__).with_name("engine_readers.json")
FILES = {
    "vllm": (
        "vllm/model_executor/models/qwen3_dspark.py",
        "vllm/model_executor/models/qwen3_dflash.py",
        "vllm/model_executor/models/gemma4_dspark.py",
        "vllm/model_executor/models/registry.py",
        "vllm/config/speculative.py",
        "vllm/transformers_utils/configs/speculators/algos.py",
        "vllm/transformers_utils/configs/speculators/base.py",
        "vllm/v1/worker/gpu/spec_decode/dspark/speculator.py",
        "vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py",
    ),
    "sglang": (
        "sglang/srt/models/dspark.py",
        "sglang/srt/models/dflash.py",
        "sglang/srt/models/lfm2_dspark.py",
        "sglang/srt/speculative/dflash_utils.py",
        "sglang/srt/speculative/dspark_components/dspark_config.py",
        "sglang/srt/arg_groups/field_order.py",
    ),
    "speculators": (
        "speculators/config.py",
        "speculators/model.py",
        "speculators/proposals/greedy.py",
        "speculators/models/dflash/config.py",
        "speculators/models/dspark/config.py",
        "speculators/models/dflash/core.py",
        "speculators/models/dflash/model_definitions.py",
        "speculators/models/dspark/core.py",
        "speculators/models/dspark/model_definitions.py",
    ),
}
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:[.-][A-Za-z0-9_]+)*\.?$")
CONFIGURATIONS = ("config", "hf_config", "text_config", "tl_config", "transformer_layer_config")
# The registry names every model there is; only drafts matter.
KEPT = re.compile("DSpark|DFlash")


def facts(source: str, path: str) -> dict:
    """Identifiers, assigned attributes and declared fields of a Python file."""
    tree = ast.parse(source)
    words = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and IDENTIFIER.match(node.value)
    }
    words |= {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).rsplit(".", 1)[-1] in CONFIGURATIONS
    }
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    assigned = {
        target.attr
        for node in ast.walk(tree)
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
    }
    fields = {
        item.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    if path.endswith("registry.py"):
        words = {word for word in words if KEPT.search(word)}
        classes, assigned, fields = set(), set(), set()
    return {
        "sha256": hashlib.sha256(source.encode()).hexdigest(),
        "words": sorted(words),
        "classes": sorted(classes),
        "assigned": sorted(assigned),
        "fields": sorted(fields),
    }


def read_wheels(folder: Path) -> dict:
    """Facts by engine, from the wheels in a folder."""
    found = {}
    for engine, paths in FILES.items():
        wheel = max(folder.glob(f"{engine}-*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            files = {path: facts(archive.read(path).decode(), path) for path in paths}
        found[engine] = {"version": wheel.name.split("-")[1], "files": files}
    return found


if __name__ == "__main__":
    data = read_wheels(Path(sys.argv[1]))
    lines = []
    for engine, entry in data.items():
        files = ",\n".join(f"  {json.dumps(path)}: {json.dumps(found)}" for path, found in entry["files"].items())
        lines.append(f'{json.dumps(engine)}: {{"version": "{entry["version"]}", "files": {{\n{files}\n}}}}')
    OUTPUT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print({engine: entry["version"] for engine, entry in data.items()})
