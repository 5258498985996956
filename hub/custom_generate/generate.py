"""DSpark decoding as a `custom_generate` repository: no method of Transformers is replaced.

    model.generate(**inputs, assistant_model=draft, custom_generate="<this repository>", trust_remote_code=True)
"""

from dspark_hf import decoder


def generate(model, assistant_model=None, streamer=None, tokenizer=None, **kwargs):
    if assistant_model is None:
        raise ValueError("pass the DSpark draft as `assistant_model`")
    for name in ("assistant_tokenizer", "synced_gpus", "use_model_defaults"):
        if kwargs.get(name) is None:
            kwargs.pop(name, None)
    if tokenizer is not None:
        kwargs["tokenizer"] = tokenizer
    return model.generate(custom_generate=decoder(assistant_model, streamer=streamer), **kwargs)
