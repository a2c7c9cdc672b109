"""A run leaves with its cell: for sentence-transformers, open_clip, MTEB, stores and the atlas."""
