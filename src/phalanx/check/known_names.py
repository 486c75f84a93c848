"""The names that text fields of a job may have from a catalogue: presets, machines, schedules, corpora and so on."""

from __future__ import annotations

from phalanx.config.clusters import CLUSTERS, LOCAL
from phalanx.config.corpora import CORPORA
from phalanx.config.devices import ACCELERATORS
from phalanx.config.layout import TILED
from phalanx.config.presets import CATALOGUE
from phalanx.config.templates import BUILT_IN, OWN_TEMPLATE
from phalanx.config.tokenizers import TOKENIZERS
from phalanx.config.trackers import TRACKERS
from phalanx.optimizers.catalogue import OPTIMIZERS
from phalanx.schedule.catalogue import SCHEDULES


def known_names() -> dict[str, list[str]]:
    """Returns the names by the dotted path of the field. A field may take others, too: a path, or `dgx-h100:4`."""
    return {
        "model.preset": [*CATALOGUE],
        "cluster.preset": [*CLUSTERS, LOCAL],
        "cluster.accelerator.name": [*ACCELERATORS],
        "layout.schedule": [*SCHEDULES],
        "layout.tile": [*TILED, "all"],
        "data.corpus": [*CORPORA],
        "data.tokenizer": [*TOKENIZERS],
        "data.template": [OWN_TEMPLATE, *BUILT_IN],
        "optimizer.name": [*OPTIMIZERS],
        "run.trackers": [*TRACKERS],
    }
