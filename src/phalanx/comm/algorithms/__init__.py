"""Collective algorithms written over point-to-point messages: to teach, to measure, and to predict with.

A CollectiveProgram is data: which rank sends which elements to which, step by step. `program` builds and counts them,
`draw` draws them, `execute` runs them over torch; only `execute` imports it. Training uses the backend's own
collectives.
"""
