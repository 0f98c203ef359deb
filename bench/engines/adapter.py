"""What every engine's process does: loads the model once, then answers on its standard output.

In: the model's folder and the engine's own options as arguments; on standard input one JSON line per question,
`{"prompts": [[id, …], …], "new_tokens": n}`. Out: when the model is loaded `{"engine": "name version"}`, then per
question `{"tokens": [[id, …], …]}`: each prompt's greedy continuation, exactly `new_tokens` long, whatever the model
says about its end.

Always holds: nothing but answers is on standard output, what libraries print goes to standard error. The standard
library only, because the environments of other engines have nothing of ours.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

Generate = Callable[[list[list[int]], int], list[list[int]]]


def serve(load: Callable[..., tuple[str, Generate]]) -> None:
    """`load(folder, *options)` gives the engine's name with its version, and how it generates. Ends with the input."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    name, generate = load(*sys.argv[1:])
    print(json.dumps({"engine": name}), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps({"tokens": generate(asked["prompts"], asked["new_tokens"])}), file=answers)
