"""Techniques: each states its fields, rules, costs, application and layouts to verify."""
