"""Models of the Hugging Face hub, downloaded by its own library into its own cache."""

from __future__ import annotations

import re
from pathlib import Path

from phalanx.check.start import ADAPTER
from phalanx.config.corpora import TOKENIZER_FILES
from phalanx.errors import CheckpointError, JobError, RunError
from phalanx.exchange.folder import BESIDE

PREFIX = "hub:"
"""Begins the name of a model on the hub, so that no path is ever taken for one: nothing is downloaded unasked."""
PATTERNS = ("*.safetensors", "*.safetensors.index.json", *TOKENIZER_FILES, ADAPTER, *BESIDE)
"""The files that are downloaded: no pickle, no code."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w./-]+)?")


def downloaded(text: str) -> Path:
    """Returns the folder of the model `hub:OWNER/NAME`, or `hub:OWNER/NAME@REVISION`, downloaded if it is not in the
    cache. HF_HOME, HF_HUB_OFFLINE and HF_TOKEN hold as everywhere.

    Raises JobError if it is no name of a model, CheckpointError if the hub has no such model, RunError if it cannot be
    reached."""
    from huggingface_hub import snapshot_download  # imported here: half a second, and only this needs it
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    name = text.removeprefix(PREFIX)
    if not _NAME.fullmatch(name):
        raise JobError(f"{text}: no name of a model; write {PREFIX}OWNER/NAME, such as {PREFIX}openai-community/gpt2")
    repository, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=list(PATTERNS)))
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"{text}: the hub has no such model, or it is a gated one and HF_TOKEN is not set"
        ) from None
    except LocalEntryNotFoundError:
        reason = "is neither in the cache nor can the hub be reached (or HF_HUB_OFFLINE is set)"
    except (HfHubHTTPError, OSError) as error:
        reason = f"could not be downloaded: {str(error).splitlines()[0]}"
    raise RunError(
        f"{text} {reason}. Where there is a network: `hf download {repository} --local-dir DIR`; then, with DIR copied "
        "here: `phalanx import hf DIR --out RUN`"
    )
