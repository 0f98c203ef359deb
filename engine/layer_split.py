"""How the layers of a model are shared out over pipeline ranks.

In: a `ModelSpec` and a number of ranks, or an explicit list such as "8,7,8,7". Out: half-open
ranges `(start, end)` in rank order.

Invariants: the ranges cover every layer once, in order, and none is empty. The default split makes
the costliest rank as cheap as possible. A rank's cost is the weights that a token goes through there.
Where tokens are decoded the output head counts; a prompt goes through it with its last token alone, so
for prefill it does not. The embedding is a gather and never does.
"""

from __future__ import annotations

from engine.model_spec import ModelSpec

Split = list[tuple[int, int]]


def split_layers(spec: ModelSpec, parts: int, with_head: bool = True) -> Split:
    """The cost-balanced split of `spec` over `parts` ranks. `with_head`: every token goes through the output head.

    Raises `ValueError` if some rank would get no layer.
    """
    if not 1 <= parts <= spec.layers:
        raise ValueError(f"{spec.layers} layers cannot be split over {parts} ranks: every rank needs at least one")
    costs = [float(spec.layer_parameters(layer)) for layer in range(spec.layers)]
    if with_head:
        costs[-1] += spec.head_parameters()
    return _balance(costs, parts)


def parse_split(text: str, layers: int) -> Split:
    """The split that a list of layer counts such as "8,7,8,7" names.

    Raises `ValueError` if it is not a list of positive numbers that add up to `layers`.
    """
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"layer split {text!r} is not a list of numbers like 8,7,8,7") from None
    if min(counts) < 1:
        raise ValueError(f"layer split {text!r} gives a rank no layer")
    if sum(counts) != layers:
        raise ValueError(f"layer split {text!r} adds up to {sum(counts)}, but the model has {layers} layers")
    ends = [sum(counts[: rank + 1]) for rank in range(len(counts))]
    return list(zip([0, *ends], ends, strict=False))


def _balance(costs: list[float], parts: int) -> Split:
    """Contiguous parts with the smallest possible maximum and, among those, the most even ones."""
    count = len(costs)
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    # smallest[p][e]: the smallest achievable maximum of p parts over the first e layers.
    infinity = float("inf")
    smallest = [[infinity] * (count + 1) for _ in range(parts + 1)]
    smallest[0][0] = 0.0
    for part in range(1, parts + 1):
        for end in range(part, count + 1):
            smallest[part][end] = min(
                max(smallest[part - 1][start], before[end] - before[start]) for start in range(part - 1, end)
            )
    bound = smallest[parts][count] * (1 + 1e-12)
    # squares[p][e]: the least sum of squares with every part within the bound; and where its last part starts.
    squares = [[(infinity, 0)] * (count + 1) for _ in range(parts + 1)]
    squares[0][0] = (0.0, 0)
    for part in range(1, parts + 1):
        for end in range(part, count + 1):
            squares[part][end] = min(
                (
                    (squares[part - 1][start][0] + (before[end] - before[start]) ** 2, start)
                    for start in range(part - 1, end)
                    if before[end] - before[start] <= bound
                ),
                default=(infinity, 0),
            )
    split: Split = []
    end = count
    for part in range(parts, 0, -1):
        start = squares[part][end][1]
        split.append((start, end))
        end = start
    return split[::-1]
