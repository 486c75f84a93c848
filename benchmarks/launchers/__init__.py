"""The same small job under every launcher that is installed: `make launchers`."""
