"""A byte-level tokenizer for the tiny targets: every one of the 96 ids is one byte, or the bytes the test wants."""

from __future__ import annotations

from targets import VOCAB_SIZE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode


def byte_tokenizer(special: dict[int, bytes] | None = None, vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Tokenizer of `vocab_size` ids, id 0 being the padding token.

    Args:
        special: ids that stand for other bytes than the default (printable ASCII from the space on).
        vocab_size: number of ids.
    """
    alphabet = bytes_to_unicode()
    contents = {i: bytes([31 + i]) for i in range(1, vocab_size)}
    contents.update(special or {})
    vocab = {"<pad>": 0}
    for token_id in range(1, vocab_size):
        token = "".join(alphabet[byte] for byte in contents[token_id])
        # Two ids may not share a token; the later one is renamed to a byte that text never holds.
        vocab[token if token not in vocab else f"<unused{token_id}>"] = token_id
    missing = [c for c in "abcdef" if c not in vocab]
    if missing:  # StopStringCriteria encodes this prefix
        raise ValueError(f"the test took the ids of {missing}; take others")
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", clean_up_tokenization_spaces=False, padding_side="left"
    )
