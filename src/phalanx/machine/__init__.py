"""Checks (`doctor`), tests (`test-dist`) and measurements (`bench`) of a machine and its nodes."""
