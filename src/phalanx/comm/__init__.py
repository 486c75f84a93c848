"""Communication: collectives along an axis, the ledger that counts them, and agreement between ranks."""
