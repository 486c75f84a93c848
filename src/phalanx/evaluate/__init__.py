"""Measures runs: perplexity of any text under any layout, and the tasks of lm-eval."""
