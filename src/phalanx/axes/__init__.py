"""The axes of the mesh as objects: what each cuts, its rules, its messages, and how it is verified."""
