"""Bytes sent per mesh axis and collective, by formula."""
