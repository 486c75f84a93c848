# phalanx: completion for fish
function __phalanx_arguments
  set -l cur (commandline -ct)
  set -l verb (commandline -opc)[2]
  if string match -q -- '*=*' $cur
    set -l given (string replace -r '=.*' '=' -- $cur)
    set -l values
    switch (string replace -a -- - _ (string replace -r '^--' '' -- (string replace -r '=$' '' -- $given)))
@VALUES@
    end
    for value in $values
      echo $given$value
    end
    return
  end
  switch $verb
@ARGUMENTS@
  end
  if contains -- $verb @OF_JOBS@; and test -n "$cur"; and not string match -q -- '-*' $cur
    string split ' ' -- '@SETTINGS@'
  end
end
@VERBS@
complete -c phalanx -n 'not __fish_use_subcommand' -a '(__phalanx_arguments)'
