"""Exact distributions of short continuations, and the statistics that compare them with samples."""

from __future__ import annotations

import itertools

import torch
from transformers import LogitsProcessorList


@torch.no_grad()
def exact_joint(target, prompt: list[int], length: int, processors: LogitsProcessorList) -> torch.Tensor:
    """Probability of every continuation of `length` tokens under the processors: shape [V] * length, float64."""
    vocab = target.config.get_text_config().vocab_size
    joint = torch.ones((), dtype=torch.float64)
    for step in range(length):
        # Left to right: the prefixes of this step are all continuations of the steps before.
        prefixes = torch.tensor(list(itertools.product(range(vocab), repeat=step))).reshape(vocab**step, step).long()
        alive = (joint.reshape(-1) > 0).nonzero().flatten()
        ids = torch.cat([torch.tensor([prompt]).expand(len(alive), -1), prefixes[alive]], dim=1)
        logits = target(input_ids=ids, use_cache=False).logits[:, -1].float()
        conditional = torch.zeros(vocab**step, vocab, dtype=torch.float64)
        conditional[alive] = processors(ids, logits).double().softmax(dim=-1)
        joint = joint[..., None] * conditional.reshape([vocab] * step + [vocab])
    return joint


def histogram(samples: torch.Tensor, vocab: int) -> torch.Tensor:
    """Counts of the rows of `samples` [N, L] as a tensor of shape [V] * L."""
    length = samples.shape[1]
    weights = vocab ** torch.arange(length - 1, -1, -1)
    return torch.bincount((samples * weights).sum(dim=1), minlength=vocab**length).reshape([vocab] * length)


def total_variation(counts: torch.Tensor, exact: torch.Tensor) -> float:
    """Half the L1 distance between the observed frequencies and the exact probabilities."""
    return 0.5 * (counts.double() / counts.sum() - exact).abs().sum().item()


def chi_square_p(counts: torch.Tensor, exact: torch.Tensor) -> float:
    """p-value of Pearson's test; cells with fewer than five expected samples are pooled into one."""
    observed, expected = counts.double().flatten(), exact.flatten() * counts.sum()
    assert observed[expected == 0].sum() == 0, "a continuation of probability zero was sampled"
    small = expected < 5
    observed = torch.cat([observed[~small], observed[small].sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    if expected[-1] < 1e-9:
        observed, expected = observed[:-1], expected[:-1]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(observed) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, statistic / 2).item()


def check_distribution(samples: torch.Tensor, exact: torch.Tensor, distance: float = 0.03) -> None:
    """Total variation below `distance` and chi-square p above 1e-3, for samples [N, L] and exact [V] * L."""
    counts = histogram(samples, exact.shape[0])
    assert total_variation(counts, exact) < distance, total_variation(counts, exact)
    assert chi_square_p(counts, exact) > 1e-3, chi_square_p(counts, exact)
