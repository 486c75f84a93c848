"""Tables of published runs: rows read, predicted, graded."""
