"""`phalanx doctor`: looks for what would keep a run from starting or finishing, on one machine and between nodes."""
