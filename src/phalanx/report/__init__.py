"""A run seen from outside: its files read back, the page of one or several runs, and the live view."""
