"""The reference for the training system: the loop one would write by hand around the same model.

One process, no framework: tokens in memory, forward, backward, clip, AdamW. Prints the seconds of each step as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from phalanx.check.load import load_file
from phalanx.data.loader import TokenData
from phalanx.data.prepare import prepare
from phalanx.model.seeding import initialise
from phalanx.model.transformer import Transformer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    job = load_file(options.job, options.overrides).job
    data = TokenData(prepare(job.data), "train", job.model.seq_len)
    tokens = data.read(0, data.tokens).astype(np.int64)
    model = Transformer(job.model, data.vocab_size)
    initialise(model, job.model, job.train.seed)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": job.optimizer.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=job.optimizer.lr,
        betas=job.optimizer.betas,
        fused=True,
    )
    length, seconds = job.model.seq_len, []
    for _ in range(options.steps):
        began = time.perf_counter()
        starts = np.random.randint(len(tokens) - length - 1, size=job.train.global_batch)
        batch = torch.from_numpy(np.stack([tokens[start : start + length + 1] for start in starts]))
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.optimizer.clip)
        optimizer.step()
        loss.item()
        seconds.append(time.perf_counter() - began)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
