"""Every SVG and HTML page, in one style."""
