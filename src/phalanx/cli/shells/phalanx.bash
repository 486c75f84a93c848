# phalanx: completion for bash
@ARGUMENTS@
@VALUES@
_phalanx() {
  local line="${COMP_LINE:0:COMP_POINT}" cur verb key values found
  cur="${line##*[[:space:]]}"
  read -r _ verb _ <<< "${line%"$cur"}"
  if [[ -z $verb ]]; then
    COMPREPLY=($(compgen -W "@VERBS@" -- "$cur")); return
  fi
  if [[ $cur == *=* ]]; then
    key="${cur%%=*}"; key="${key#--}"; values="$(_phalanx_values "${key//-/_}")"
    if [[ -n $values ]]; then found="$(compgen -W "$values" -- "${cur#*=}")"
    else found="$(compgen -f -- "${cur#*=}")"; fi
    COMPREPLY=($found)
    [[ $COMP_WORDBREAKS == *=* ]] || COMPREPLY=("${COMPREPLY[@]/#/${cur%%=*}=}")
    return
  fi
  found="$(_phalanx_arguments "$verb")"
  case " @OF_JOBS@ " in *" $verb "*)
    [[ -n $cur && $cur != -* ]] && found="$found @SETTINGS@" ;;
  esac
  COMPREPLY=($(compgen -W "$found" -- "$cur"))
  [[ $cur == -* ]] || COMPREPLY+=($(compgen -f -- "$cur"))
  [[ ${#COMPREPLY[@]} == 1 && ( ${COMPREPLY[0]} == *= || -d ${COMPREPLY[0]} ) ]] && compopt -o nospace
}
complete -F _phalanx phalanx
