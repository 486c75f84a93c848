"""How replicas agree when they do not sum their gradients in every step: `layout.sync` other than bsp."""
