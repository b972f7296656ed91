"""Every algorithm of `tfscale.collectives`, measured beside the model."""
