"""The text-text lane: retrieval (asymmetric) and sentence similarity (symmetric)."""
