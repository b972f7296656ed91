"""How unmodified Keras layers run on shards of their variables.

A family of layers has a module with a `make_rule`, listed in sharded_call.py.
"""

__all__ = []
