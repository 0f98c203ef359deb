"""Logits to tokens.

In: logits `[n, vocab]` and one `Sample` per row. Out: one `Sampled` per row.

Invariant: each result is a pure function of (that row's logits, its parameters, seed, position and
token history). Randomness is counter-based: a hash of (seed, position), so a request that resumes on
another instance, or beside other requests, continues with the same tokens.

Order of the steps, that of vLLM:
1. `logit_bias` is added; `forbidden` ids become impossible.
2. Penalties: repetition (over prompt and output), then frequency and presence (over output).
3. `temperature` < 1e-5: the best id wins, the lowest of equals. Otherwise logits are divided by it.
4. `min_p`, then `top_k`, then `top_p`, each on what the one before left. Each keeps at least one id.
   Ids that tie with the k-th best are all kept; `top_p` takes ids best first, the lower of equals first.
5. One draw, by inverting the cumulative distribution in id order.

`transformers` orders step 4 top_k, top_p, min_p, which differs when both min_p and top_p are set.
Log-probabilities are of the raw logits, before step 1.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Collection, Sequence

import torch

from engine.batch import Sample, Sampled, Sampling

_GREEDY_BELOW = 1e-5  # a smaller temperature would overflow and means the same
_SHORTLIST = 1024  # ids that are tried first by top_p, because sorting the whole vocabulary is slow


@torch.inference_mode()
def sample(logits: torch.Tensor, samples: Sequence[Sample]) -> list[Sampled]:
    """Choose a token for each row of `logits` `[n, vocab]` (any float dtype; not modified).

    Raises `ValueError` if there are not as many samples as rows or an id is outside the vocabulary,
    `FloatingPointError` if a row holds NaN or no finite best logit.
    """
    if logits.dim() != 2 or len(logits) != len(samples):
        raise ValueError(f"{len(samples)} samples for logits of shape {list(logits.shape)}")
    if not samples:
        return []
    logits = logits.float()
    tokens = logits.argmax(dim=-1)  # the lowest of equals; a NaN counts as the largest
    best = logits.gather(1, tokens[:, None]).squeeze(1)
    if not bool(torch.isfinite(best).all()):
        raise FloatingPointError(f"logits of row {int((~torch.isfinite(best)).nonzero()[0])} are not finite")
    return [
        _report(row, token if _is_plain(wish) else _choose(row, wish), wish.params.logprobs)
        for row, wish, token in zip(logits, samples, tokens.tolist(), strict=True)
    ]


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) that belongs to this seed (0 <= seed < 2**64) and position."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8, person=b"paceline.sample")
    return (int.from_bytes(digest.digest(), "little") >> 11) * 2.0**-53


_LARGEST = 1e30  # finite in float32 with room for what is done to it afterwards


def adjust(logits: torch.Tensor, wish: Sample) -> torch.Tensor:
    """Steps 1 and 2 on one row of float32 logits `[vocab]`; returns a new row."""
    params, row = wish.params, logits.clone()
    if params.logit_bias:
        biases = torch.tensor([bias for _, bias in params.logit_bias], dtype=torch.float32)
        row.index_add_(0, _ids([token for token, _ in params.logit_bias], len(row)), biases)
    if wish.forbidden:
        row[_ids(wish.forbidden, len(row))] = -torch.inf
    if params.repetition_penalty != 1:
        seen = _ids({*wish.prompt, *wish.output}, len(row))
        scores = row[seen]
        row[seen] = torch.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
    if wish.output and (params.frequency_penalty or params.presence_penalty):
        counts = Counter(wish.output)
        ids = _ids(counts.keys(), len(row))
        times = torch.tensor(list(counts.values()), dtype=torch.float32)
        row[ids] = row[ids] - params.frequency_penalty * times - params.presence_penalty
    # Extreme penalties and biases overflow, and inf - inf is no number; -inf stays what it means, "never".
    return torch.nan_to_num(row, nan=-torch.inf, posinf=_LARGEST, neginf=-torch.inf)


def candidates(row: torch.Tensor, params: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps 3 and 4 for a temperature above zero: the ids that may come, ascending, and their probabilities.

    int64 `[m]` and float64 `[m]`, m >= 1; the probabilities sum to 1.
    """
    scaled = row.double() / params.temperature
    if not bool((scaled > -torch.inf).any()):  # nothing may come: the lowest id, as argmax would have it
        return torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.float64)
    ids = (scaled > -torch.inf).nonzero().squeeze(1)
    if params.min_p > 0:
        # p / p_best >= min_p, without the need to normalize
        kept = scaled[ids]
        ids = ids[(kept - kept.max()).exp() >= min(params.min_p, 1.0)]
    if 0 < params.top_k < len(ids):
        kept = scaled[ids]
        ids = ids[kept >= kept.topk(params.top_k).values[-1]]
    probabilities = torch.softmax(scaled[ids], dim=0)
    if params.top_p < 1:
        kept = _nucleus(probabilities, params.top_p)
        ids, probabilities = ids[kept], probabilities[kept]
        probabilities = probabilities / probabilities.sum()
    return ids, probabilities


def _choose(logits: torch.Tensor, wish: Sample) -> int:
    row = adjust(logits, wish)
    if wish.params.temperature < _GREEDY_BELOW:
        return int(row.argmax())
    ids, probabilities = candidates(row, wish.params)
    cumulative = probabilities.cumsum(0)
    target = uniform(wish.params.seed, wish.position) * float(cumulative[-1])
    # The first id whose cumulative probability exceeds the target; rounding may put the target at the very end.
    place = int(torch.searchsorted(cumulative, target, right=True))
    return int(ids[min(place, len(ids) - 1)])


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Ascending indices of the best ids, up to and including the one that brings their sum to `top_p`."""
    for size in (_SHORTLIST, len(probabilities)):
        if size >= len(probabilities):
            shortlist = torch.arange(len(probabilities))
        else:
            # Everything that ties with the last of the best, so that equals are ordered by id, not by topk's whim.
            shortlist = (probabilities >= probabilities.topk(size).values[-1]).nonzero().squeeze(1)
        order = shortlist[probabilities[shortlist].argsort(descending=True, stable=True)]
        sums = probabilities[order].cumsum(0)
        if float(sums[-1]) >= top_p or len(shortlist) == len(probabilities):
            break
    count = int((sums < top_p).sum()) + 1
    return order[:count].sort().values


def _report(logits: torch.Tensor, token: int, wanted: int) -> Sampled:
    if wanted < 0:
        return Sampled(token)
    logprobs = torch.log_softmax(logits, dim=0)
    if wanted == 0:
        return Sampled(token, float(logprobs[token]))
    last = logprobs.topk(min(wanted, len(logprobs))).values[-1]
    ids = (logprobs >= last).nonzero().squeeze(1)
    ids = ids[logprobs[ids].argsort(descending=True, stable=True)][:wanted]
    top = tuple(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))
    return Sampled(token, float(logprobs[token]), top)


def _is_plain(wish: Sample) -> bool:
    """Greedy, and nothing that changes which logit is the best."""
    params = wish.params
    return (
        params.temperature < _GREEDY_BELOW
        and not params.logit_bias
        and not wish.forbidden
        and params.repetition_penalty == 1
        and not params.presence_penalty
        and not params.frequency_penalty
    )


def _ids(values: Collection[int], vocab: int) -> torch.Tensor:
    ids = torch.tensor(list(values), dtype=torch.int64)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise ValueError(f"token id {int(ids.min() if ids.min() < 0 else ids.max())} is outside 0..{vocab - 1}")
    return ids
