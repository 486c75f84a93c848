"""Other preparations of the corpus that a job asks for, so that another tokenizer does not go unnoticed."""

from __future__ import annotations

from pathlib import Path

from phalanx.config.data import Data
from phalanx.data.index import INDEX, read_index
from phalanx.data.settings import overrides
from phalanx.errors import DataError

TOKENIZER = ("data.tokenizer=", "data.bpe_vocab=")


def prepared_otherwise(folder: Path, data: Data) -> str:
    """Returns a line about a whole preparation of the corpus that differs in the tokenizer alone, or nothing.

    Args:
        folder: the folder of the shards that `data` asks for.
        data: a job's data settings.
    """
    wanted = overrides(data)
    for other in sorted(folder.parent.glob(f"{data.corpus}-*")):
        if other == folder or not (other / INDEX).is_file():
            continue
        try:
            index = read_index(other)
        except DataError:
            continue
        if not index.complete or _without_tokenizer(index.settings) != _without_tokenizer(wanted):
            continue
        theirs = [setting for setting in index.settings if setting not in wanted]
        ours = [setting for setting in wanted if setting not in index.settings]
        return (
            f"the corpus is prepared in {other} with {' '.join(theirs)}; this job has {' '.join(ours)}, and prepares "
            f"{folder}"
        )
    return ""


def _without_tokenizer(settings: list[str] | tuple[str, ...]) -> list[str]:
    return [setting for setting in settings if not setting.startswith(TOKENIZER)]
