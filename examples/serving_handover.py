"""From here to a server: check a draft, write it for vLLM and SGLang, and print the lines that serve it.

    python examples/serving_handover.py --output served
    python examples/serving_handover.py --model TARGET --draft DRAFT --output served

Nothing is served here. Both engines choose what to do by names and keys in the draft's files, so what they would make
of them can be told without running them; docs/serving.md says how far that was checked. The engines' draft layers have
query and key norms and (SGLang) the whole vocabulary: a draft without them stays with Transformers, and the reason is
printed.
"""

from __future__ import annotations

import json
from pathlib import Path

from _pair import pair_names, pair_parser

from dspark_hf.cli import main as dspark_hf


def handover(target: str, draft: str, output: Path) -> list[str]:
    """Writes `draft` in the first packaging that can hold it; returns the engines that serve it."""
    for packaging in ("serving", "speculators"):
        print(f"\n== convert --to {packaging}", flush=True)
        folder = output / packaging
        if dspark_hf(["convert", draft, str(folder), "--to", packaging, "--target", target]) == 0:
            break
    else:
        return []
    record = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    print(f"read from {record['source']['location']} ({record['source']['packaging']})")
    for name, digest in record["written"]["sha256"].items():
        print(f"written   {name}  sha256 {digest[:16]}…")
    served = []
    for engine in ("vllm", "sglang"):
        print(f"\n== {engine}", flush=True)
        if dspark_hf(["serve-command", str(folder), "--engine", engine, "--target", target]) == 0:
            served.append(engine)
    return served


def main(argv: list[str] | None = None) -> None:
    parser = pair_parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder to write the served draft into")
    args = parser.parse_args(argv)
    target, draft = pair_names(args)

    print("== what it is", flush=True)
    if dspark_hf(["inspect", draft, "--target", target]) != 0:
        raise SystemExit("that draft cannot be loaded, or does not fit the target")
    served = handover(target, draft, args.output)
    if served:
        print(f"\nready for: {', '.join(served)}. Start with one of the lines above, then compare a few greedy answers")
        print("with those of Transformers before you trust it: the engine must accept about as much as it does here.")
    else:
        print("\nNo engine runs this draft; the reasons are above. `dspark-hf train --qk-norm` without --draft-vocab")
        print("makes one that they do.")


if __name__ == "__main__":
    main()
