"""`python -m phalanx`: the same as the command `phalanx`."""

import sys

from phalanx.cli.main import main

sys.exit(main())
