"""The command line: one thin file a verb. Nothing at the top of these files imports torch."""
