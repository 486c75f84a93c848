"""Every verb, option, field and name for other programs: `phalanx completion SHELL`, a script with all of them, so that
a Tab starts no program; `phalanx schema`, the fields of a job for editors, or as a page.

The scripts all do the same: first the verb; then its commands, options and job files, and `key=` of a job's fields;
behind the = the names that the field knows, or files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from phalanx.check.schema import known_names, schema
from phalanx.cli.files import OutputFiles, write
from phalanx.cli.main import VERBS, description_of
from phalanx.cli.option import Option, flag_of
from phalanx.cli.verb import WHOLE, Command, Verb, Words
from phalanx.config import reference
from phalanx.config.fields import SECTION_SHORTHAND, short_names
from phalanx.config.layout_line import AUTO, SECTION
from phalanx.echo import echo


@dataclass(frozen=True)
class Completed:
    """What is completed."""

    verbs: Mapping[str, str]
    """Every verb with what it does."""
    arguments: Mapping[str, Sequence[str]]
    """Commands and options of every verb."""
    takes_job: Sequence[str]
    """Verbs that take fields of a job."""
    keys: Sequence[str]
    """Names of fields."""
    values: Mapping[str, Sequence[str]]
    """Values of fields that have a list of them."""

    @property
    def settings(self) -> str:
        """The beginnings of settings: "layout.tp= ..."."""
        return " ".join(f"{key}=" for key in self.keys)


def bash(words: Completed) -> str:
    """Returns the script for bash 4 or later."""
    return rf"""# phalanx: completion for bash
{_table("_phalanx_arguments", words.arguments)}
{_table("_phalanx_values", words.values)}
_phalanx() {{
  local line="${{COMP_LINE:0:COMP_POINT}}" cur verb key values found
  cur="${{line##*[[:space:]]}}"
  read -r _ verb _ <<< "${{line%"$cur"}}"
  if [[ -z $verb ]]; then
    COMPREPLY=($(compgen -W "{" ".join(words.verbs)}" -- "$cur")); return
  fi
  if [[ $cur == *=* ]]; then
    key="${{cur%%=*}}"; key="${{key#--}}"; values="$(_phalanx_values "${{key//-/_}}")"
    if [[ -n $values ]]; then found="$(compgen -W "$values" -- "${{cur#*=}}")"
    else found="$(compgen -f -- "${{cur#*=}}")"; fi
    COMPREPLY=($found)
    [[ $COMP_WORDBREAKS == *=* ]] || COMPREPLY=("${{COMPREPLY[@]/#/${{cur%%=*}}=}}")
    return
  fi
  found="$(_phalanx_arguments "$verb")"
  case " {" ".join(words.takes_job)} " in *" $verb "*)
    [[ -n $cur && $cur != -* ]] && found="$found {words.settings}" ;;
  esac
  COMPREPLY=($(compgen -W "$found" -- "$cur"))
  [[ $cur == -* ]] || COMPREPLY+=($(compgen -f -- "$cur"))
  [[ ${{#COMPREPLY[@]}} == 1 && ( ${{COMPREPLY[0]}} == *= || -d ${{COMPREPLY[0]}} ) ]] && compopt -o nospace
}}
complete -F _phalanx phalanx"""


def zsh(words: Completed) -> str:
    """Returns the script for zsh with compinit."""
    return rf"""#compdef phalanx
{_table("_phalanx_arguments", words.arguments)}
{_table("_phalanx_values", words.values)}
_phalanx() {{
  local cur="${{words[CURRENT]}}" verb="${{words[2]}}" key values
  if (( CURRENT == 2 )); then
    local -a verbs=({" ".join(f"'{verb}:{_plain(what)}'" for verb, what in words.verbs.items())})
    _describe verb verbs; return
  fi
  if [[ $cur == *=* ]]; then
    key="${{${{cur%%=*}}#--}}"; values="$(_phalanx_values "${{key//-/_}}")"
    compset -P '*='
    if [[ -n $values ]]; then compadd -- ${{=values}}; else _files; fi
    return
  fi
  compadd -- ${{=$(_phalanx_arguments "$verb")}}
  case " {" ".join(words.takes_job)} " in *" $verb "*)
    [[ -n $cur && $cur != -* ]] && compadd -S '' -- {words.settings} ;;
  esac
  [[ $cur == -* ]] || _files
}}
compdef _phalanx phalanx"""


def fish(words: Completed) -> str:
    """Returns the script for fish."""
    verbs = "\n".join(
        f"complete -c phalanx -n __fish_use_subcommand -a {verb} -d '{_plain(what)}'"
        for verb, what in words.verbs.items()
    )
    arguments = "\n".join(
        f"    case {verb}\n      string split ' ' -- '{' '.join(found)}'" for verb, found in words.arguments.items()
    )
    values = "\n".join(f"    case {key}\n      set values {' '.join(found)}" for key, found in words.values.items())
    return f"""# phalanx: completion for fish
function __phalanx_arguments
  set -l cur (commandline -ct)
  set -l verb (commandline -opc)[2]
  if string match -q -- '*=*' $cur
    set -l given (string replace -r '=.*' '=' -- $cur)
    set -l values
    switch (string replace -a -- - _ (string replace -r '^--' '' -- (string replace -r '=$' '' -- $given)))
{values}
    end
    for value in $values
      echo $given$value
    end
    return
  end
  switch $verb
{arguments}
  end
  if contains -- $verb {" ".join(words.takes_job)}; and test -n "$cur"; and not string match -q -- '-*' $cur
    string split ' ' -- '{words.settings}'
  end
end
{verbs}
complete -c phalanx -n 'not __fish_use_subcommand' -a '(__phalanx_arguments)'"""


def _table(name: str, found: Mapping[str, Sequence[str]]) -> str:
    """Returns a function of bash and zsh that prints the words found for its argument."""
    cases = "\n".join(f"{key}) echo '{' '.join(values)}' ;;" for key, values in found.items())
    return f'{name}() {{ case "$1" in\n{cases}\nesac; }}'


def _plain(text: str) -> str:
    """Returns a description without what shells read as syntax."""
    return text.replace("'", "’").replace(":", ";")


SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}
VERB = Verb(
    "completion",
    "Prints a script that completes verbs, options, fields (layout.tp=) and their names in a shell. Write it once, and "
    "again after an update or a new package.",
    {
        "bash": Command(switches={}, about="for bash 4 or later: ~/.bashrc has `source ~/.phalanx.bash`"),
        "zsh": Command(switches={}, about="for zsh: ~/.zshrc has `source ~/.phalanx.zsh` after compinit"),
        "fish": Command(switches={}, about="for fish, which reads its folder of completions by itself"),
    },
    (
        ("completion bash > ~/.phalanx.bash", "for bash"),
        ("completion fish > ~/.config/fish/completions/phalanx.fish", "for fish"),
    ),
)


@VERB.runs
def run(parsed: Words) -> None:
    echo(SHELLS[parsed.command](words()))


def words() -> Completed:
    """Returns everything that is completed."""
    return Completed(
        verbs=dict(VERBS),
        arguments={verb: [*_arguments(verb)] for verb in VERBS},
        takes_job=[verb for verb in VERBS if description_of(verb).takes_job],
        keys=[*_keys()],
        values=_values(),
    )


def _arguments(verb: str) -> Iterator[str]:
    """Yields the commands of a verb and its options."""
    described = description_of(verb)
    yield from (*described.name.split()[1:], *filter(None, described.commands))
    yield from (flag_of(option.name) for option in described.page.options)
    yield "--help"


def _keys() -> Iterator[str]:
    """Yields the names by which the command line sets fields: sections as one word, short names, and dotted paths."""
    yield from (SECTION, *SECTION_SHORTHAND)
    fields = [field for field in reference.fields().values() if not field.path.startswith(reference.MEASURED)]
    yield from dict.fromkeys(name for field in fields for name in (field.short, field.path))


def _values() -> dict[str, list[str]]:
    """Returns the values of every key that has a list of them."""
    known, found = known_names(), {SECTION: [AUTO]}
    for field in reference.fields().values():
        choices = known.get(field.path) or [*map(str, field.choices)]
        choices = choices or (["true", "false"] if field.kind is bool else [])
        if choices and not field.path.startswith(reference.MEASURED):
            found.update(dict.fromkeys((field.path, field.short), choices))
            if field.name not in short_names():  # the value decides: schedule=zb_v, schedule=cosine
                found[field.name] = [*found.get(field.name, []), *choices]
    return {**found, **{section: found[path] for section, path in SECTION_SHORTHAND.items() if path in found}}


SCHEMA = Verb(
    "schema",
    "Prints every field of a job, with type, default, range and meaning: as JSON schema, with which an editor "
    "completes and checks job files, or as a page.",
    {
        WHOLE: Command(
            (),
            {"out": Option(str, "", "file to write instead of standard output", value="FILE")},
            switches={"markdown": "as a page (docs/reference/job.md)", "json": "as JSON schema, the default"},
        )
    },
    (
        ("schema --out phalanx.schema.json", "for an editor"),
        ("schema --markdown --out job.md", "for a reader"),
    ),
    (
        "An editor with the YAML language server reads the schema that a job file names in its first line, as those of "
        "`phalanx init` do: # yaml-language-server: $schema=phalanx.schema.json",
    ),
    default=WHOLE,
)


@SCHEMA.runs
def run_schema(words: Words) -> None:
    out = OutputFiles.of(words, "out").paths.get("out", "")
    if "markdown" in words.switches:
        from phalanx.check.schema import page

        text = page()
    else:
        text = schema_text()
    if out:
        write(out, text)
        echo(f"written: {out}")
    else:
        echo(text.rstrip())


def schema_text() -> str:
    """Returns the schema as a JSON document."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"
