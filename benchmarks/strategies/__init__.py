"""The same model under every strategy that the machine can run."""
