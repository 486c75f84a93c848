"""Operator graphs for tests."""

from __future__ import annotations

from typing import Any


def gpt(
    layers: int, b: int, s: int = 2048, h: int = 4096, n: int = 32, v: int = 50304, dtype: str = "bf16"
) -> dict[str, Any]:
    """Returns the document of a GPT, as a person would write it."""
    operators: list[dict[str, Any]] = []
    block = ""

    def add(name: str, einsum: str = "", *inputs: str, **more: Any) -> str:
        name = f"{block}.{name}" if block else name
        known = {"einsum": einsum, "inputs": [*inputs]} if einsum else {}
        operators.append({"name": name, "dtype": dtype, **known, **more, **({"block": block} if block else {})})
        return name

    def weight(name: str, *shape: int) -> str:
        return add(name, kind="parameter", shape=[*shape])

    heads = {"n": n, "d": h // n}
    add("ids", kind="input", shape=[b, s], dtype="int64")
    x = add("embed", "bs,vh->bsh", "ids", weight("wte", v, h), flops=0, bytes=4 * b * s * h)
    for layer in range(layers):
        block = f"layers.{layer}"
        y = add("norm1", "bsh,h->bsh", x, weight("g1", h), whole="h")
        qkv = [add(each, "bsh,hf->bsf", y, weight(f"w{each}", h, h)) for each in "qkv"]
        qkv = [add(f"{each[-1]}_heads", "bs(nd)->bnsd", each, kind="view", sizes=heads) for each in qkv]
        y = add("attention", "bnqd,bnkd,bnke->bnqe", *qkv, whole="qkde", flops=2 * b * s * s * h, bytes=8 * b * s * h)
        y = add("merge", "bnsd->bs(nd)", y, kind="view", sizes=heads)
        x = add("add1", "bsh,bsh->bsh", x, add("proj", "bsf,fh->bsh", y, weight("wo", h, h)))
        y = add("norm2", "bsh,h->bsh", x, weight("g2", h), whole="h")
        y = add("gelu", "bsf->bsf", add("up", "bsh,hf->bsf", y, weight("w1", h, 4 * h)))
        x = add("add2", "bsh,bsh->bsh", x, add("down", "bsf,fh->bsh", y, weight("w2", 4 * h, h)))
    block = ""
    x = add("norm", "bsh,h->bsh", x, weight("g", h), whole="h")
    add("logits", "bsh,hv->bsv", x, weight("head", h, v))
    return {"format": "phalanx-graph-1", "name": "gpt", "operators": operators}
