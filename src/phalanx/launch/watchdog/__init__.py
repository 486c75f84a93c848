"""Finds ranks that hang: heartbeats of the ranks, and a watchdog outside their processes that reads them."""
