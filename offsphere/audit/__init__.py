"""Does magnitude carry information in given vectors? Vectors and relevance in, answers out."""
