"""A target spread over several GPUs with `device_map`, its draft on one of them.

    python examples/multi_gpu.py --model TARGET --draft DRAFT
    python examples/multi_gpu.py --model TARGET --draft DRAFT --device-map balanced

The draft is small and runs on one device: that of the target's embedding, which it borrows. Hidden states come to it
from wherever the tapped layers are. A target that is partly offloaded to memory or disk works in the same way, and is
where fewer target forwards pay most.
"""

from __future__ import annotations

import torch
from _pair import chat_inputs, pair_names, pair_parser
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkDraftModel, record_generation


def main(argv: list[str] | None = None) -> None:
    parser = pair_parser(__doc__)
    parser.add_argument("prompt", nargs="?", default="Explain in three sentences why the sky is blue.")
    parser.add_argument("--device-map", default="auto", help="auto (default), balanced, sequential, or one device")
    args = parser.parse_args(argv)
    gpus = torch.cuda.device_count()
    if args.device_map in ("auto", "balanced", "sequential") and gpus < 2:
        raise SystemExit(f"--device-map {args.device_map}: needs two GPUs, this machine has {gpus}; name one device")
    target_name, draft_name = pair_names(args)

    tokenizer = AutoTokenizer.from_pretrained(target_name)
    model = AutoModelForCausalLM.from_pretrained(target_name, dtype="auto", device_map=args.device_map)
    draft = DSparkDraftModel.from_pretrained(draft_name, dtype=model.dtype, device_map=model.device)

    places: dict[str, int] = {}
    for parameter in model.parameters():
        places[str(parameter.device)] = places.get(str(parameter.device), 0) + parameter.numel()
    for place, count in sorted(places.items()):
        print(f"target on {place}: {count / 1e6:.1f} M parameters")
    print(f"draft on {draft.device}: {sum(p.numel() for p in draft.parameters()) / 1e6:.1f} M parameters")

    inputs = chat_inputs(tokenizer, [{"role": "user", "content": args.prompt}], model.device)
    with record_generation() as stats:
        output = model.generate(**inputs, assistant_model=draft, do_sample=False, max_new_tokens=args.max_new_tokens)
    print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    print(f"\ntau {stats.tau:.2f}, {stats.tokens_per_second:.1f} tokens/s, {stats.path} verification")


if __name__ == "__main__":
    main()
