import struct
from pathlib import Path

import numpy as np
import pytest

from phalanx.data.megatron import open_megatron
from phalanx.errors import DataError


def write(folder: Path, *, version: int = 1, code: int = 8, dtype: str = "<u2") -> Path:
    tokens = np.arange(7, dtype=dtype)
    (folder / "set.bin").write_bytes(tokens.tobytes())
    parts = [np.array([3, 4], "<i4"), np.array([0, 3 * tokens.itemsize], "<i8"), np.array([0, 1, 2], "<i8")]
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", version, code, 2, 3)
    (folder / "set.idx").write_bytes(header + b"".join(part.tobytes() for part in parts))
    return folder / "set"


@pytest.mark.parametrize(("version", "code", "dtype"), [(1, 8, "<u2"), (2, 4, "<i4"), (1, 5, "<i8"), (1, 1, "u1")])
def test_reads_tokens_and_index(tmp_path: Path, version: int, code: int, dtype: str):
    found = open_megatron(write(tmp_path, version=version, code=code, dtype=dtype), 7)
    assert isinstance(found.tokens, np.memmap)
    assert found.tokens.tolist() == list(range(7))
    assert (found.lengths.tolist(), found.starts.tolist()) == ([3, 4], [0, 3])
    assert found.documents.tolist() == [0, 1, 2]


def test_refuses_what_is_damaged_or_outside_the_vocabulary(tmp_path: Path):
    path = write(tmp_path)
    with pytest.raises(DataError, match="holds token 6, expected 0 to 5"):
        open_megatron(path, 6)
    (tmp_path / "set.bin").write_bytes(b"\0" * 12)
    with pytest.raises(DataError, match="expected 14 bytes by its index, found 12"):
        open_megatron(path, 7)
    (tmp_path / "set.idx").write_bytes((tmp_path / "set.idx").read_bytes()[:-1])
    with pytest.raises(DataError, match="for 2 sequences, found"):
        open_megatron(path, 7)
    with pytest.raises(DataError, match="version 3"):
        open_megatron(write(tmp_path, version=3), 7)
    with pytest.raises(DataError, match="dtype code 6"):
        open_megatron(write(tmp_path, code=6), 7)
