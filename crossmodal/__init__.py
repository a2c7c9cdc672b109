"""The image-text lane: CLIP-style training and zero-shot benchmarks."""
