"""One model and one global batch, under several strategies."""
