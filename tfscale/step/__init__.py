"""A training step: parts of a batch that count as the whole.

A step logs what a model's `train_step` returns. The loss is that of
batch_shard.py (of stages, pipeline/running/trainer.py); packed_logs.py averages
over replicas.
"""

__all__ = []
