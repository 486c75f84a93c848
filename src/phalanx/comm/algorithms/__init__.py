"""Collective algorithms written over point-to-point messages: to teach, to measure, and to predict with.

A collective is a Plan: data that says which rank sends which elements to which, step by step. `ring`, `tree`,
`halving`, `hierarchical` and `direct` make plans, `plan` counts them, `draw` draws them, `execute` runs them over
torch; only `execute` imports it. Training uses the backend's own collectives.
"""
