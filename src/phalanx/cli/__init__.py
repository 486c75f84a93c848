"""The command line: one thin file per verb. Nothing at the top of these files imports torch."""
