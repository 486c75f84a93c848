"""Writes safetensors files with their sha256 in one pass, from memory to the disk.

The library's own writer gives no digest, which would take a second pass over the file. The format is 8 bytes with the
header's length, the header (JSON: each tensor's type, shape and place), and the tensors' bytes, little-endian and
without gaps (https://github.com/huggingface/safetensors#format). The library reads the files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from phalanx.checkpoint.manifest import ShardFile
from phalanx.launch.watchdog import heartbeat

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
CHUNK_BYTES = 8 * 2**20
"""Bytes that are hashed and written at a time."""


def write(path: Path, tensors: Mapping[str, Tensor]) -> ShardFile:
    """Writes tensors, on any device, to a new safetensors file and waits until it is on the disk. One tensor at a time
    is copied to the host. Returns size and digest. Raises OSError."""
    # The widest types first, so that every tensor is aligned.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    digest = hashlib.sha256()
    with path.open("xb") as file:
        header = _header(ordered)
        digest.update(header)
        file.write(header)
        for tensor in ordered.values():
            data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), CHUNK_BYTES):
                chunk = data[start : start + CHUNK_BYTES]
                digest.update(chunk)
                file.write(chunk)
                heartbeat.beat()
        file.flush()
        os.fsync(file.fileno())
        return ShardFile(file.tell(), digest.hexdigest())


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries, position = {}, 0
    for name, tensor in tensors.items():
        end = position + tensor.nbytes
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
