"""The completion scripts of `phalanx completion` for bash, zsh and fish.

All do the same: first the verb; then its commands, options and job files, and `key=` of a job's fields; behind the
= the names that the field knows, or files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Words:
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


def bash(words: Words) -> str:
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


def zsh(words: Words) -> str:
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


def fish(words: Words) -> str:
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
