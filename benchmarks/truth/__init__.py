"""Grades of predictions against published rows."""
