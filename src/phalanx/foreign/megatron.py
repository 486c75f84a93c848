"""Megatron-LM's arguments, in a shell script or in YAML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import yaml

from phalanx.errors import JobError
from phalanx.foreign import shell
from phalanx.foreign.frame import Fields, ForeignFormat, Source, Stated, Unresolved, once, yaml_values
from phalanx.foreign.megatron_core import CHOOSES, COVERS, FIXED, core, written
from phalanx.foreign.shell import Script, ScriptWord

TORCHRUN = {"nproc-per-node": "nproc_per_node", "nnodes": "nnodes", "ntasks-per-node": "nproc_per_node"}
"""Options of torchrun and Slurm that say how many processes there are."""
_NODES, _EACH, _ALL = "nnodes", "nproc_per_node", "processes"
_LAUNCHERS: dict[str, dict[str, str]] = {
    "torchrun": {},
    "deepspeed": {"--num-nodes": _NODES, "--num-gpus": _EACH},
    "accelerate": {"--num-machines": _NODES, "--num-processes": _ALL},
    "srun": {"--nodes": _NODES, "-N": _NODES, "--ntasks": _ALL, "-n": _ALL},
    "mpirun": {"-n": _ALL, "-np": _ALL, "--np": _ALL, "-npernode": _EACH, "--npernode": _EACH, "-ppn": _EACH},
}
_LAUNCHERS["mpiexec"] = _LAUNCHERS["mpirun"]
"""Options of launchers for the nodes, the processes per node, and all processes."""
_GPUS = re.compile(r"--(?:gpus-per-node|gres)[= ](?:gpu:)?(?:[\w.-]+:)?([0-9]+)\b")
"""Slurm's accelerators of a node."""
_OPTION = re.compile(r"--([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)
_OTHER_MODELS = re.compile("t5|bert|ict|vision|retro|vlm|multimodal|mimo|dino|rl|classif", re.IGNORECASE)
_MARKS = {"num_layers", "hidden_size", "tensor_model_parallel_size", "micro_batch_size", "num_attention_heads"}


def in_script(source: Source) -> bool:
    """Returns whether a text is a shell script with Megatron-LM's arguments."""
    found = {each.replace("-", "_") for each in re.findall(r"--([A-Za-z][\w-]*)", source.text)}
    return len(found & _MARKS) >= 2 and not in_yaml(source)


def in_yaml(source: Source) -> bool:
    """Returns whether a text is YAML with them: the `MODEL_ARGS` of its functional tests, or its `--yaml-cfg`."""
    if "MODEL_ARGS" in source.keys:
        return True
    inner = {"language_model", "model_parallel"}
    return inner <= source.keys or len({key.lstrip("-").replace("-", "_") for key in source.keys} & _MARKS) >= 2


def parse_script(source: Source) -> Sequence[Stated]:
    """Returns the arguments of the command that a script starts."""
    try:
        script = shell.run_through(source.text)
    except ValueError as error:
        raise JobError(f"{source.path}: not a script that can be read: {error}") from None
    words, doubt = _command(script)
    stated = _options(words)
    lost = [("command", words[0], doubt)] if doubt else []
    program = next((word for word in words if re.search(r"\.py$", word.text)), None)
    if program and _OTHER_MODELS.search(program.text.rpartition("/")[2]):
        lost.append(("program", program, "this program trains another kind of model than a GPT"))
    known = {each.name for each in stated}
    for number, row in script.comments:
        for name, least, most in re.findall(r"--?([\w-]+)[= ]([0-9]+)(?:-([0-9]+))?\b", row):
            value = most or least
            ours = "nnodes" if name in ("nodes", "N") else TORCHRUN.get(name, "")
            if ours and ours not in known:
                stated.append(Stated(ours, value, number, value, label=f"--{name}"))
    if not {_EACH, _ALL} & {each.name for each in stated}:
        for number, row in script.comments:
            stated += [Stated(_EACH, each[1], number, each[1], label="#SBATCH") for each in _GPUS.finditer(row)]
    lost += [("source", each, "another script is not read") for each in script.sourced]
    lost += [("arguments", each, each.why) for each in _loose(words)]
    lost += [("eval", each, "the text that it runs does not follow from the file") for each in script.evaluated]
    return [*stated, *(Stated(name, Unresolved(word.text, why), *word.place) for name, word, why in lost)]


def _command(script: Script) -> tuple[list[ScriptWord], str]:
    """Returns the words of the command that trains, and why it may not run: of all commands, those with the most
    options of a model; if none has any, those of all variables."""
    several = [(_flat(words), "") for words in (*script.commands, *script.variables.values())]
    doubtful = [(_flat(words), why) for words, why in script.doubtful]
    best = max([*several, *doubtful], key=lambda each: (_rank(each[0]), len(each[0])), default=([], ""))
    if _rank(best[0])[0]:
        others = [
            words for words in map(_flat, script.commands) if _rank(words)[0] and _texts(words) != _texts(best[0])
        ]
        return best[0], best[1] or ("another command trains, too, with other options" if others else "")
    with_options = [words for words in map(_flat, script.variables.values()) if any(map(_is_option, words))]
    return [word for words in (with_options or [words for words, _ in several]) for word in words], ""


def _flat(words: Sequence[ScriptWord]) -> list[ScriptWord]:
    """Returns words, and those inside of words that are command lines in quotes."""
    found = list[ScriptWord]()
    for word in words:
        has_options = " --" in word.text or word.text.lstrip().startswith("--")
        found += shell.words_of(word) if has_options and re.search(r"\s", word.text.strip()) else [word]
    return found


def _texts(words: Sequence[ScriptWord]) -> list[str]:
    """Returns the texts from the program on: a command that is shown before it runs has another beginning."""
    first = next((n for n, word in enumerate(words) if ".py" in word.text), 0)
    return [word.text for word in words[first:]]


def _rank(words: Sequence[ScriptWord]) -> tuple[bool, int]:
    """Returns whether words start a program with the options of a model, and the number of their options."""
    names = {each[1].replace("-", "_") for word in words if (each := _OPTION.fullmatch(word.text))}
    return len(names & _MARKS) >= 2 and any(".py" in word.text for word in words), len(names)


def _is_option(word: ScriptWord) -> bool:
    return _OPTION.fullmatch(word.text) is not None and not (word.why and not word.segments[0].text)


def _options(words: Sequence[ScriptWord]) -> list[Stated]:
    """Returns the options among words, with the words after each as its values. Those before the program are the
    launcher's."""
    script = next((n for n, word in enumerate(words) if re.search(r"\.py$", word.text)), -1)
    found, place = _launcher(words[: max(script, 0)]), 0
    while place < len(words):
        option = _OPTION.fullmatch(words[place].text)
        at, place = place, place + 1
        if not option:
            continue
        values = list[ScriptWord]()
        while place < len(words) and not _OPTION.fullmatch(words[place].text) and place != script:
            if not words[place].segments or words[place].text in ("", "\\"):
                place += 1
                continue
            values.append(words[place])
            place += 1
        if at < script and option[1] not in TORCHRUN and option[1].replace("_", "-") not in TORCHRUN:
            continue  # the launcher's, such as --container-image
        name = TORCHRUN.get(option[1].replace("_", "-"), option[1].replace("-", "_"))
        found.append(_stated(name, f"--{option[1]}", option[2], words[at], values))
    return found


def _launcher(words: Sequence[ScriptWord]) -> list[Stated]:
    """Returns the numbers of nodes and processes that the words before a program give launchers. All processes are
    those of the last launcher: one before it starts it, and not the program."""
    found, options = list[Stated](), dict[str, str]()
    known = [n for n, word in enumerate(words) if word.text.rpartition("/")[2] in _LAUNCHERS]
    for place, word in enumerate(words):
        if place in known:
            options = _LAUNCHERS[word.text.rpartition("/")[2]]
        flag, equals, joined = word.text.partition("=")
        flag = flag.replace("_", "-")
        name = options.get(flag, "")
        if not name or (name == _ALL and known[-1:] > [place]):
            continue
        value = word if equals else words[place + 1] if place + 1 < len(words) else word
        text = joined if equals else value.text
        line, shown = value.place
        found.append(Stated(name, Unresolved(text, value.why) if value.why else text, line, shown, label=flag))
    return found


def _loose(words: Sequence[ScriptWord]) -> list[ScriptWord]:
    """Returns the words between the program and its first option that do not follow from the script, and may be
    options. What is not set, and the script's own arguments, count as empty."""
    start = next((n for n, word in enumerate(words) if re.search(r"\.py$", word.text)), -1)
    after = words[start + 1 :] if start >= 0 else ()
    first = next((n for n, word in enumerate(after) if _OPTION.fullmatch(word.text)), len(after))
    return [word for word in after[:first] if word.why and not shell.is_absent(word)]


def _stated(name: str, label: str, joined: str | None, option: ScriptWord, values: Sequence[ScriptWord]) -> Stated:
    line, _ = option.place
    if joined is not None:
        value: Any = Unresolved(joined, option.why) if option.why else joined
        return Stated(name, value, line, joined, label=label)
    if not values:
        return Stated(name, True, line, label=label)
    line, text = values[0].place
    if why := next((word.why for word in (option, *values) if word.why), ""):
        return Stated(name, Unresolved(" ".join(word.text for word in values), why), line, text, label=label)
    texts = [word.text.strip("'\"") for word in values]
    return Stated(name, texts[0] if len(texts) == 1 else texts, line, text, label=label)


def parse_yaml(source: Source) -> Sequence[Stated]:
    """Returns the arguments of YAML: options as keys, or the sections of `--yaml-cfg`, whose names are unique."""
    root = source.root
    assert isinstance(root, yaml.MappingNode), "recognised as a mapping"
    pairs = {str(key.value): value for key, value in root.value}
    inner = pairs.get("MODEL_ARGS", root)
    found = list[Stated]()
    for each in yaml_values(source, inner):
        name = each.name.rpartition(".")[2].lstrip("-").replace("-", "_")
        value = each.value
        if isinstance(value, str) and "$" in value:
            value = Unresolved(value, "a variable that the file does not set")
        found.append(Stated(name, value, each.line, each.text, label=each.name))
    return once(source, found)


def launched(fields: Fields) -> None:
    """Sets the cluster's nodes and devices from torchrun's or Slurm's options."""
    nodes, each = fields.take("nnodes", str, ""), fields.take("nproc_per_node", str, "")
    nodes = nodes.partition(":")[2] or nodes  # torchrun's MIN:MAX
    total = fields.take("processes", int, 0)
    if total and (nodes.isdigit() or each.isdigit()):
        count = int(nodes) if nodes.isdigit() else max(1, total // max(1, int(each)))
        per_node = int(each) if each.isdigit() else total // max(1, count)
        if count * per_node != total:
            text = f"{total} processes are not {count} nodes × {per_node}: give numbers that go together"
            fields.problems.append(f"{fields.origin('processes')}: {text}")
        nodes, each, total = str(count), str(per_node), 0
    for name, text, path in (("nnodes", nodes, "cluster.nodes"), ("nproc_per_node", each, "cluster.devices_per_node")):
        if text.isdigit():
            fields.set(path, int(text), (name, "processes"))
        elif text:
            fields.leave(name, "the number of devices is the cluster's", affects=False)
    if devices := fields.first("world_size", "num_gpus") or total:
        known = (name for name in ("num_gpus", "world_size") if fields.has(name))
        name, per_node = next(known, "processes"), min(8, devices)
        fields.set("cluster.nodes", -(-devices // per_node), name, f"nodes of {per_node} devices")
        fields.set("cluster.devices_per_node", per_node, name)


def finish(fields: Fields) -> None:
    """Sets what Megatron-LM's arguments mean together, with its own defaults."""
    launched(fields)
    names, how = ("hidden_dropout", "attention_dropout"), "Megatron-LM's default"
    dropouts = [fields.take(name, float, 0.1) for name in names]
    if dropouts[0] != dropouts[1]:
        fields.leave(names[1], f"model.dropout is one for all, here {dropouts[0]:g}")
    fields.set("model.dropout", dropouts[0], names, "" if names[0] in fields.stated else how)
    if "weight_decay" not in fields.stated:
        fields.set("optimizer.weight_decay", 0.01, "weight_decay", how)
    if "position_embedding_type" not in fields.stated:
        fields.set("model.positions", "learned", "position_embedding_type", how)
    positions, length = fields.take("max_position_embeddings", int, 0), fields.take("seq_length", int, 0)
    if 0 < positions < length:
        fields.problems.append(
            f"{fields.origin('max_position_embeddings')}: {positions:,} positions for sequences of {length:,} tokens, "
            f"which Megatron-LM refuses; nearest: {length}"
        )
    grouped(fields)
    core(fields)
    overlapped(fields, "overlap_grad_reduce" in fields.stated)


def grouped(fields: Fields) -> None:
    """Heeds query groups only beside group_query_attention, as Megatron-LM's arguments do
    (core_transformer_config_from_args)."""
    switch = "group_query_attention"
    if fields.has("num_query_groups") and not fields.on(switch):
        why = f"Megatron-LM heeds it with {switch} only: every head has keys and values of its own"
        fields.leave("num_query_groups", why, affects=False)
        fields.stated.setdefault(switch, Stated(switch, False))


def overlapped(fields: Fields, overlaps: bool) -> None:
    """Sets the framework, and whether it sends gradients during the backward pass."""
    fields.framework = "megatron-core"
    fields.recipe |= {} if overlaps else {"figures": {"dp_overlaps": False}}


def written_as_option(name: str, value: Any) -> str:
    option = f"--{name.replace('_', '-')}"
    return option if value is True else f"{option} {value}"


SCRIPT = ForeignFormat(
    kind="Megatron-LM",
    table="megatron",
    recognises=in_script,
    parse=parse_script,
    finish=finish,
    written=written,
    covers=COVERS,
    new_line=written_as_option,
    fixed=FIXED,
    chooses=CHOOSES,
    marks="a shell script with --num-layers, --tensor-model-parallel-size, …",
)
YAML = replace(
    SCRIPT,
    kind="Megatron-LM (YAML)",
    recognises=in_yaml,
    parse=parse_yaml,
    new_line=ForeignFormat.new_line,
    marks="YAML with MODEL_ARGS, or with language_model and model_parallel",
)
