"""From features to named numbers: kNN, linear probe, zero-shot, retrieval, STS."""
