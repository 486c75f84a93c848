"""Choosing a layout for a model and a cluster; so far, where a pipeline is cut into stages."""
