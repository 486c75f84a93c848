#compdef phalanx
@ARGUMENTS@
@VALUES@
_phalanx() {
  local cur="${words[CURRENT]}" verb="${words[2]}" key values
  if (( CURRENT == 2 )); then
    local -a verbs=(@VERBS@)
    _describe verb verbs; return
  fi
  if [[ $cur == *=* ]]; then
    key="${${cur%%=*}#--}"; values="$(_phalanx_values "${key//-/_}")"
    compset -P '*='
    if [[ -n $values ]]; then compadd -- ${=values}; else _files; fi
    return
  fi
  compadd -- ${=$(_phalanx_arguments "$verb")}
  case " @OF_JOBS@ " in *" $verb "*)
    [[ -n $cur && $cur != -* ]] && compadd -S '' -- @SETTINGS@ ;;
  esac
  [[ $cur == -* ]] || _files
}
compdef _phalanx phalanx
