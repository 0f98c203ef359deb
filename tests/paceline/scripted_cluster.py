"""Not a test: `paceline up`'s supervision with scripted parts. `scripted_cluster.py RUN_DIR NAME=WORDS…`.

Runs in a process of its own because the supervisor adopts and ends every orphan below its process.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from paceline.child import ChildSpec, Patience
from paceline.config import free_ports
from paceline.health import GatewayProbe, close_all
from paceline.local_plan import Plan
from paceline.up import Supervisor, lock

PATIENCE = Patience(
    probe_every=0.2, probe_timeout=0.3, silent=1.0, first_answer=20, first_pause=0.1, last_pause=0.4, stop=1.0
)


async def main() -> int:
    run_dir = Path(sys.argv[1])
    parts = dict(argument.split("=", 1) for argument in sys.argv[2:])
    ports = free_ports("127.0.0.1", len(parts))
    probes = [GatewayProbe(f"http://127.0.0.1:{port}") for port in ports]
    specs = [
        ChildSpec(
            name=name,
            role="gateway" if name == "gateway" else "prefill",
            address=f"127.0.0.1:{port}",
            command=(sys.executable, str(Path(__file__).with_name("scripted_part.py")), str(port), *words.split()),
            log=run_dir / "logs" / f"{name}.log",
            probe=probe,
        )
        for (name, words), port, probe in zip(parts.items(), ports, probes, strict=True)
    ]
    plan = Plan(specs, f"http://127.0.0.1:{ports[-1]}", "scripted", run_dir, lambda: close_all(list(probes)))
    with lock(run_dir):
        return await Supervisor(plan, PATIENCE).run(None)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
