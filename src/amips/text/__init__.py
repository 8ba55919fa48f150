"""Text in: reading corpora, encoders, pseudo-queries, data sets, relevance."""
