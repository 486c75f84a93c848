"""Synchronization of replicas that do not sum their gradients in every step: `layout.sync` other than bsp."""
