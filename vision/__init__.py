"""The image-image lane: SimCLR and MoCo."""
