"""Every process but the gateway killed, one after another, sixty times, under load: no client ever notices.

`PACELINE_KILLS=20` for a shorter run. What is killed next is killed as soon as another instance of its role serves,
so that some pair always does; the other role may be in any state of recovery.
"""

from __future__ import annotations

import itertools
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.load import Load, addresses, told, until
from tests.e2e.test_resume import metric

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(3600)]
KILLS = int(os.environ.get("PACELINE_KILLS", "60"))
CLIENTS = 16
RECOVERY = 180.0  # seconds for an instance to serve again while everything else is busy


def test_sixty_kills_and_no_client_notices(tiny: Path) -> None:
    options = ("--chunk-size", "64", "--prefill-instances", "2", "--decode-instances", "2")
    with Cluster(*options, model=tiny) as cluster:
        places = addresses(cluster, "prefill") | addresses(cluster, "decode")
        # Daemons and ranks, the roles in turn.
        victims = [
            f"{role}-{i}{what}" for what in (" rank 0", " rank 1", "") for i in (0, 1) for role in ("prefill", "decode")
        ]
        with Load(cluster, tiny, CLIENTS, (3, 4, 5, 6, 21, 22, 23)) as load:
            for number, victim in enumerate(itertools.islice(itertools.cycle(victims), KILLS), 1):
                name, _, rank = victim.partition(" rank ")
                role = name.partition("-")[0]
                twins = [place for other, place in places.items() if other.startswith(role)]

                def both_serve(role: str = role, twins: list[str] = twins) -> bool:
                    known = metric(cluster, f'serving_instances{{role="{role}"')
                    states = [told(place) for place in twins]
                    return known == 2 and all(state is not None and state.phase == "serving" for state in states)

                until(
                    f"both {role} instances serve, before kill {number}", lambda: both_serve() or load.broken, RECOVERY
                )
                if load.broken:
                    break
                status = until(f"{name} answers", partial(told, places[name]))
                os.kill(status.ranks[int(rank)].pid if rank else status.pid, signal.SIGKILL)
                print(f"kill {number}: {victim}, {load.done} answers so far", flush=True)
                load.wait_for(4)
        print(f"{load.done} answers, {metric(cluster, 'resumed_requests_total'):g} resumed")
        assert not load.broken or load.done, "see the clients' errors"
        assert metric(cluster, "resumes_given_up_total") == 0
        cluster.assert_baseline()
