"""The fastest way to spread any operator graph over a mesh of devices: Alpa's problem (Zheng et al. 2022)."""
