"""What this installation brings into a group.

In: the configuration and the model's facts. Out: `pipeline.group.Terms`.
"""

from __future__ import annotations

from pipeline.group import PROTOCOL_VERSION, Terms
from pipeline.io.instance_config import DaemonConfig, ModelFacts
from pipeline.io.release import release


def terms_of(config: DaemonConfig, facts: ModelFacts) -> Terms:
    return Terms(
        protocol_version=PROTOCOL_VERSION,
        release=release(),
        instance=config.instance,
        role=config.role,
        group_size=config.group_size,
        pp_size=config.pp_size,
        model_digest=facts.digest,
    )
