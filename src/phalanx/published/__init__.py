"""Tables of measured runs: read, predicted row by row, and compared with what was measured."""
