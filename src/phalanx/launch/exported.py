"""Which environment variables a launch writes down or sends to other hosts, and which it never does."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from phalanx.errors import JobError
from phalanx.nearest import did_you_mean

PATTERNS = (
    *("NCCL_*", "RCCL_*", "CCL_*", "FI_*", "UCX_*", "GLOO_*", "MPICH_*", "MPIR_CVAR_*", "I_MPI_*"),
    *("TORCH_*", "TORCHINDUCTOR_*", "PYTORCH_*", "TRITON_*", "CUDA_*", "CUBLAS_*", "HIP_*", "ROCR_*", "HSA_*", "ZE_*"),
    *("OMP_*", "MKL_*", "KMP_*", "HF_*", "TOKENIZERS_*", "PHALANX_*"),
    *("LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONUNBUFFERED", "TMPDIR", "TZ"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
"""Names that are exported if they are set."""

PER_PROCESS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Matching names that describe this host's devices, not those of others: never exported by a pattern."""

_SECRET = re.compile("TOKEN|SECRET|PASSW|CREDENTIAL|PRIVATE|COOKIE|AUTH|APIKEY|(^|_)(API_?)?KEY(S|$|_)|KEY$", re.I)
_NOT_SECRET = ("TOKENIZERS_",)
_USER_INFO = re.compile("://[^/@\\s]+@")
_NAME = r"[A-Za-z_][A-Za-z0-9_]{0,254}"


@dataclass(frozen=True)
class Exported:
    values: Mapping[str, str]  # names and values that may be shown and written down
    secrets: tuple[str, ...] = ()
    """Names that the user has given one by one although they look like secrets: their values are handed over, but
    neither shown nor written."""


def is_secret(name: str) -> bool:
    return bool(_SECRET.search(name)) and not name.startswith(_NOT_SECRET)


def exported(
    env: Mapping[str, str], patterns: Iterable[str], settings: Iterable[str], site: Mapping[str, str]
) -> Exported:
    """Returns the variables that a launch exports: those of this process that match PATTERNS or the user's own
    (--export-env: names, or patterns such as WANDB_*), the site's, for which the user's environment wins, and the
    user's settings (--env NAME=VALUE), which win.

    Raises JobError for a setting that is no NAME=VALUE, for one that puts a secret on the command line, and for a name
    that is not set.
    """
    problems: list[str] = []
    patterns = tuple(patterns)
    chosen = {
        name: value
        for name, value in env.items()
        if name not in PER_PROCESS
        and not is_secret(name)
        and any(fnmatch.fnmatchcase(name, pattern) for pattern in (*PATTERNS, *patterns))
        and value.isprintable()
        and not _USER_INFO.search(value)
    }
    secrets = []
    for pattern in patterns:
        if not re.fullmatch(_NAME, pattern):
            continue
        if pattern not in env:
            problems.append(f"--export-env {pattern}: not set{did_you_mean(pattern, env)}")
        elif pattern not in chosen:  # named exactly: a secret, or a value that is not for showing
            secrets.append(pattern)
    stated: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not re.fullmatch(_NAME, name):
            problems.append(f"--env {name[:80]}: expected NAME=VALUE")
        elif is_secret(name):
            problems.append(
                f"--env {name}: everybody on the machine can read a command line; `export {name}` in your shell, and "
                f"give --export-env {name}"
            )
        elif stated.get(name, value) != value:
            problems.append(f"--env {name} is given twice, as {stated[name]} and as {value}")
        elif not value.isprintable():
            problems.append(f"--env {name}: the value has control characters")
        else:
            stated[name] = value
    if problems:
        raise JobError(problems)
    return Exported(
        {**{name: env.get(name, value) for name, value in site.items()}, **chosen, **stated}, tuple(secrets)
    )
