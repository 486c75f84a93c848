"""`python -m phalanx`: the same as the command `phalanx`."""

import sys

from phalanx.safe_path import drop_current_directory

drop_current_directory()

from phalanx.cli.main import command  # noqa: E402  (the libraries that it imports must not be found in the current directory)

sys.exit(command())
