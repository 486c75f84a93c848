"""Built-in chat templates: what `data.template` may name besides the tokenizer's own and a file.

They are Jinja, like a tokenizer's, so that one renderer serves all of them and an exported model can carry them. What
stands in a `generation` block is an answer's: the text that the model learns to write, with what ends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

OWN_TEMPLATE = "tokenizer"
"""The value of `data.template` that means the template beside the tokenizer."""

_CHATML = (
    r"{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    r"{% if message['role'] == 'assistant' %}"
    r"{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    r"{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    r"{{ '\n' }}{% endfor %}"
    r"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_LLAMA3 = (
    r"{{ bos_token }}{% for message in messages %}"
    r"{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    r"{% if message['role'] == 'assistant' %}"
    r"{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}"
    r"{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    r"{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
_ALPACA = (
    r"{% for message in messages %}{% if message['role'] == 'assistant' %}"
    r"{{ '### Response:\n' }}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    r"{{ '' if loop.last else '\n\n' }}"
    r"{% elif message['role'] == 'user' %}{{ '### Instruction:\n' + message['content'] + '\n\n' }}"
    r"{% elif message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    r"{% else %}{{ raise_exception('template alpaca has no role ' + message['role']) }}{% endif %}{% endfor %}"
    r"{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
)
_RAW = (
    r"{% for message in messages %}{% if message['role'] == 'assistant' %}"
    r"{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    r"{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class BuiltInTemplate:
    """A chat template of this project."""

    jinja: str
    title: str
    """One-line description."""
    source: str
    """Where its form comes from."""


BUILT_IN: Mapping[str, BuiltInTemplate] = {
    "chatml": BuiltInTemplate(
        _CHATML, "<|im_start|>role, the content, <|im_end|>", "OpenAI's ChatML; SmolLM2 and Qwen use it"
    ),
    "llama3": BuiltInTemplate(
        _LLAMA3, "<|start_header_id|>role<|end_header_id|>, the content, <|eot_id|>", "Llama 3 (Meta 2024)"
    ),
    "alpaca": BuiltInTemplate(
        _ALPACA,
        "### Instruction: and ### Response:, for models without tokens of their own for roles",
        "Stanford Alpaca (Taori et al. 2023), without its preamble",
    ),
    "raw": BuiltInTemplate(_RAW, "the contents one after the other, for prompt and completion", "plain text"),
}
"""Built-in templates by name."""
