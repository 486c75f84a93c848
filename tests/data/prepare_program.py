"""Prepares a folder of text with small shards; stops before the shard it is told, until it is killed.

prepare_program.py TEXT DIR TOKENIZER WORKERS [SHARDS_BEFORE_IT_STOPS]
"""

from __future__ import annotations

import sys
import time

from phalanx.config.job import Data
from phalanx.data import prepare

# No `if __name__ == "__main__"`: a preparation that imported its caller's main module again would show here.
text, folder, tokenizer, workers, *stop = sys.argv[1:]
prepare.SHARD_CHARACTERS = 400
written = 0


def progress(what: str, done: int, total: int) -> None:
    global written  # noqa: PLW0603 - a program of one function
    if what == "tokenizing":
        written += 1
        print(f"{written} shards", flush=True)
        if stop and written == int(stop[0]):
            time.sleep(120)
    elif not total:
        print(what, flush=True)


job_data = Data(corpus="text", path=text, dir=folder, tokenizer=tokenizer, bpe_vocab=300, workers=int(workers))
print(prepare.prepare(job_data, progress=progress), flush=True)
print("torch" in sys.modules, flush=True)
