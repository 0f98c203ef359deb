"""The prefill instance's process: `python -m prefill.io.daemon [CONFIG.json]`.

In: a `DaemonConfig` as JSON, from the file or standard input. Out: an exit code. All but the role is in
`pipeline.io.daemon`, which is handed what it must not import: the reader of model folders.
"""

from __future__ import annotations

import sys
from functools import partial

from engine.facts import read_facts
from pipeline.io.daemon import main

if __name__ == "__main__":
    sys.exit(main("prefill", "prefill.io.rank_process", partial(read_facts, with_head=False)))
