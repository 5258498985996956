"""Writes `compatibility.md`: what this package makes of every published draft whose configuration is known.

    python docs/make_compatibility.py            # write the page
    python docs/make_compatibility.py --check    # exit status 1 if it is not up to date

The table is computed by the package's own readers from `tests/data/published_configs.json`; the tests hold every row
of it to an expectation that was written by hand.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = Path(__file__).with_name("compatibility.md")
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from published import EXPECTED, PUBLISHED, opened  # noqa: E402

from dspark_hf.checkpoints import CHECKED, detect_reader, serving_config, verdicts  # noqa: E402

HEADER = """# Which published drafts load

Made by `docs/make_compatibility.py`; do not edit. One row per draft whose `config.json` is known, in whole or in
part: *verbatim* files were read, *derived* ones follow from the exporter's code, of *partial* ones some keys were seen
and the rest is completed as the last column says, *training configs* are what an export keeps.

- **Loads** means: recognised, and a model built from it has exactly the tensors that the exporter writes, by name and
  shape. No weights were run; use `dspark-hf inspect REPO` on the real repository.
- **γ** is the number of tokens drafted a round, from blocks that are anchor-first (all slots draft) or 1+N.
- **vLLM** and **SGLang** say whether that engine would serve the file as it is, by the rules of vLLM {vllm} and SGLang
  {sglang}, read from their sources. "(c)": not as it is, but after `dspark-hf convert --to serving`.
"""

LAYOUTS = """
## Packagings

| packaging | recognised by | settings from | block layout when no key says it |
|---|---|---|---|
| this package's own | `model_type` "dspark" and `backbone` | top level | explicit |
| DeepSpec, NeMo AutoModel, MiniCPM5 | `target_layer_ids` at top level | top level | anchor-first |
| speculators | `speculators_model_type` | top level and nested | by `speculative_tokens`, else the user is asked |
| SpecForge, LFM2 | `dflash_config` and `markov_head.*` or `logit_head.*` | both places | anchor-first |
| ModelOpt | `dflash_config` and bare `markov_w1` | both places | anchor-first |
| z-lab DFlash | `dflash_config` and no heads | both places | 1+N |
| Transformers' DFlash | `model_type` "muse_glimmer_assistant" | top level | 1+N |
| TorchSpec | `target_num_hidden_layers`, `context_proj` | top level | anchor-first with a Markov head, else 1+N |

Layout, first hit wins: `sample_from_anchor` given to `from_pretrained` > the key `sample_from_anchor` >
`dspark_bonus_anchor` (inverse) > `shift_label` > the table. Taps of speculators files are indices of hidden states,
one more than the layer whose output they are; all other packagings count layers. Names with a wrapper's `model.` or
`encoder.` in front are read too. What a file lacks can be put in:
`from_pretrained(..., config_overrides={"block_size": 16})`, `dspark-hf inspect --set block_size=16`.

Not read, each with its reason in the message: DFlash2, Domino, Eagle-3, LiLiCorr, XPress and DFly drafts;
latent-attention (MLA), mixture-of-experts and gated-attention draft layers; attention sinks; causal blocks in
full-attention layers; a mask embedding of its own; quantised weights; drafts inside a DeepSeek-V4 target (`mtp.*`);
pickled or GGUF weights.
"""

ENGINES = """
## Checked against

The keys and tensor names that `--to serving` and `--to speculators` write were compared with the readers in
vLLM {vllm}, SGLang {sglang} and speculators {speculators}: their wheels were unpacked and read, not run
(`tests/test_engines.py`, facts in `tests/data/engine_readers.json`, made by `tests/data/make_engine_readers.py`).
"""


def row(name: str) -> str:
    """One line of the table."""
    expected, entry = EXPECTED[name], PUBLISHED[name]
    label = name.replace("__", "/", 1).replace("specforge_training_", "SpecForge: ")
    if not expected.style:
        try:
            detect_reader(opened(name))
        except ValueError as error:
            reason = str(error).split("' ", 1)[1].rstrip(".")
            return f"| {label} | {entry['status']} | - | - | - | no: {reason} | - | - | {expected.origin} |"
        raise RuntimeError(f"{name} was to be refused")
    files = opened(name)
    reader = detect_reader(files)
    config = reader.read_config(files.config, files.tensors)
    loads = "yes" if not expected.overrides else f"with `config_overrides` {expected.overrides}"
    layout = "anchor-first" if config.sample_from_anchor else "1+N"
    cells = [label, entry["status"], reader.name, layout, str(config.num_draft_tokens), loads]
    found = verdicts(files, reader, config)
    cells += [_engine(found[engine], config, entry["status"]) for engine in ("vllm", "sglang")]
    return f"| {' | '.join([*cells, expected.origin])} |"


def _engine(verdict, config, status: str) -> str:
    if verdict.serves:
        return "yes"
    seen = "as far as seen: " if status == "partial" else ""
    try:
        serving_config(config)
    except ValueError:
        return f"no: {seen}{'; '.join(verdict.obstacles)}"
    return f"(c) {seen}{'; '.join(verdict.obstacles)}"


def page() -> str:
    """The whole page."""
    head = "| draft | configuration | packaging | layout | γ | loads | vLLM | SGLang | completed from |\n"
    table = head + "|" + "---|" * 9 + "\n" + "\n".join(row(name) for name in sorted(PUBLISHED, key=str.lower))
    read = sum(bool(expected.style) for expected in EXPECTED.values())
    summary = (
        f"\n{read} of {len(PUBLISHED)} load; {len(PUBLISHED) - read} are other models and are refused by name.\n\n"
    )
    return HEADER.format(**CHECKED) + summary + table + "\n" + LAYOUTS + ENGINES.format(**CHECKED)


if __name__ == "__main__":
    text = page()
    if "--check" in sys.argv[1:]:
        current = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
        if current != text:
            sys.exit(f"{PAGE.name} is not up to date: run python docs/{Path(__file__).name}")
    else:
        PAGE.write_text(text, encoding="utf-8")
        print(f"wrote {PAGE.name}")
