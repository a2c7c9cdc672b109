"""fit(): the one training loop, with its optimisers, random streams and checkpoints."""
