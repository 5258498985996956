"""`dspark-hf inspect`: what a draft is, which targets it fits and who would serve it, without loading it."""

from __future__ import annotations

import argparse
import json

from ..checkpoints import Inspection, inspect_checkpoint
from . import source


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "inspect",
        help="what a draft is, what it fits and who would serve it",
        description="Read a draft's configuration and tensor headers and say what it is. Of a Hub repository nothing "
        "else is downloaded. Exit status 1 if it cannot be loaded, with the reason.",
    )
    source.add_source_arguments(parser)
    parser.add_argument("--target", metavar="REPO|FOLDER", help="a target to compare with, by its configuration")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the subcommand."""
    options = source.source_options(args)
    found = inspect_checkpoint(args.draft, target=args.target, sample_from_anchor=source.layout(args), **options)
    print(json.dumps(found.to_dict(), indent=2) if args.json else report(found))
    fits = found.targets.get("given", {}).get("fits", True)
    return 0 if found.problem is None and fits else 1


def report(found: Inspection) -> str:
    """The findings as text, one fact a line."""
    lines = [found.location + (f" at {found.revision}" if found.revision else "")]
    lines += [_line("packaging", found.packaging or "none that is read")]
    if found.draft:
        lines += _draft_lines(found)
    if found.targets:
        lines += _target_lines(found)
    for engine, verdict in found.engines.items():
        answer = "serves it as it is" if verdict.serves else "no: " + "; ".join(verdict.obstacles)
        lines.append(_line(f"{engine} {verdict.version}", answer))
        lines += [_line("", caveat) for caveat in verdict.caveats]
    lines += [_line("assumed" if number == 0 else "", note) for number, note in enumerate(found.assumed)]
    lines.append(_line("loads", "yes" if found.problem is None else f"no: {found.problem}"))
    return "\n".join(lines)


def _line(name: str, value: object) -> str:
    return f"  {name:<14}{value}"


def _draft_lines(found: Inspection) -> list[str]:
    draft = found.draft
    kinds = ", ".join(f"{count} {kind.removesuffix('_attention')}" for kind, count in draft["layer_types"].items())
    rotary = dict(draft["rotary"])
    turned = "neighbouring pairs" if rotary.pop("interleaved") else "halves"
    rotary_text = f"{rotary.pop('rope_type')}, base {rotary.pop('rope_theta'):g}, {turned}"
    rotary_text += "".join(f", {key} {value}" for key, value in sorted(rotary.items()))
    confidence = "no"
    if draft["confidence"]:
        confidence = "yes, fed by the Markov head" if draft["confidence_reads_markov"] else "yes"
        confidence += ", calibrated" if draft["calibrated"] else ", not calibrated"
    vocabulary = f"{draft['vocab_size']}"
    if draft["draft_vocab_size"] != draft["vocab_size"]:
        vocabulary += f", drafts from {draft['draft_vocab_size']} of them"
    stored = [part for part in ("embedding", "head") if draft[f"stores_{part}"]]
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in sorted(draft["dtypes"].items()))
    heads = f"{draft['attention_heads']} heads of {draft['head_dim']}, {draft['key_value_heads']} for keys and values"
    return [
        _line("layout", f"{draft['layout']}: blocks of {draft['block_size']} draft {draft['drafted_tokens']} tokens"),
        _line("layers", f"{draft['layers']} {draft['backbone']} ({kinds}), hidden size {draft['hidden_size']}"),
        _line("attention", heads),
        *([_line("window", draft["sliding_window"])] if draft["sliding_window"] else []),
        _line("rotary", rotary_text),
        _line("Markov head", draft["markov"] or "no"),
        _line("confidence", confidence),
        _line("taps", f"outputs of target layers {', '.join(map(str, draft['target_layer_ids']))}"),
        _line("vocabulary", f"{vocabulary}; mask token {draft['mask_token_id']}"),
        _line("stores", " and ".join(stored) or "neither embedding nor head: the target's are used"),
        _line("size", f"{found.parameters:,} parameters, {found.bytes / 1e6:,.1f} MB ({dtypes} tensors)"),
    ]


def _target_lines(found: Inspection) -> list[str]:
    targets = found.targets
    depth = targets["layers"] or f"at least {targets['layers_at_least']}"
    needs = f"hidden size {targets['hidden_size']}, {depth} layers, vocabulary {targets['vocab_size']}"
    lines = [_line("target", needs)]
    if targets["named"]:
        lines.append(_line("", f"made for {', '.join(targets['named'])}"))
    if targets["known_to_fit"]:
        lines.append(_line("", f"of that shape: {', '.join(targets['known_to_fit'])}"))
    given = targets.get("given")
    if given:
        lines.append(_line("", f"{given['name']}: {'fits' if given['fits'] else given['problem']}"))
    return lines


__all__ = ["add_parser", "report", "run"]
